"""The critic: a model of its own that learns the returns of the policy's tokens.

Dims: N chosen tokens, T response tokens of a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.algorithms.aggregation import masked_mean
from unison.algorithms.value_loss import explained_variance, value_loss
from unison.config.algorithm import CriticConfig
from unison.config.schema import TrainerConfig
from unison.core.errors import CheckpointError, NonFiniteError
from unison.models.value_model import ValueModel
from unison.ops.padding import NumericsPath
from unison.training.batch import micro_batches
from unison.training.columns import TokenColumns
from unison.training.learner import Learner, OptimizerSettings, steps_done
from unison.training.passes import value_columns

NAME = "critic"


@dataclass(slots=True)
class CriticTotals:
    """Sums over trained tokens of a training step."""

    loss_sum: float = 0.0
    grad_norm_sum: float = 0.0
    num_steps: int = 0
    num_clipped: int = 0
    num_tokens: int = 0

    def metrics(self) -> dict[str, float]:
        steps, tokens = max(self.num_steps, 1), max(self.num_tokens, 1)
        return {
            "critic/loss": self.loss_sum / steps,
            "critic/grad_norm": self.grad_norm_sum / steps,
            "critic/clip_share": self.num_clipped / tokens,
        }


class Critic:
    """Value model and optimizer. Values are of states: of what stood before a token was chosen."""

    def __init__(
        self,
        model: ValueModel,
        initial: dict[str, Tensor],
        *,
        path: NumericsPath,
        config: CriticConfig,
        trainer: TrainerConfig,
        total_steps: int,
    ) -> None:
        self.model = model
        self.learner = Learner(model, initial, _settings(config, trainer, total_steps), name=NAME)
        self.num_rollouts = 0
        """Training steps it has learnt in."""
        self._path = path
        self._config = config
        self._budget_tokens = trainer.micro_batch_tokens

    def evaluate(self, columns: TokenColumns, on_micro_batch: Callable[[], None] = lambda: None) -> None:
        """Fill in the values of all response tokens that an estimator may look at."""
        valid = columns.valid_N[columns.row_T]
        columns.values_T, columns.final_values_N = value_columns(
            self.model,
            columns,
            range(len(columns.rows)),
            valid,
            path=self._path,
            budget_tokens=self._budget_tokens,
            on_micro_batch=on_micro_batch,
        )

    def measure(self, columns: TokenColumns) -> dict[str, float]:
        """How well the values of ``evaluate`` foretold the returns, over the trained tokens."""
        if columns.values_T is None or columns.returns_T is None:
            return {}
        trained = columns.trained_T
        return {
            "critic/explained_variance": float(explained_variance(columns.values_T, columns.returns_T, trained)),
            "critic/value_mean": float(masked_mean(columns.values_T, trained)),
            "critic/return_mean": float(masked_mean(columns.returns_T, trained)),
        }

    def step(self, columns: TokenColumns, members: Sequence[int], factors_T: Tensor, totals: CriticTotals) -> None:
        """One optimizer step on the rows ``members``; ``factors_T`` weigh the tokens, as they do in the policy's loss.

        Raises NonFiniteError before any update where loss or gradient are not finite.
        """
        if columns.values_T is None or columns.returns_T is None:
            raise RuntimeError("the critic learns from values and returns: evaluate and estimate first")
        cuts = micro_batches(columns, members, factors_T != 0, self._budget_tokens, path=self._path, whole=True)
        if not cuts:
            return
        self.learner.masters.zero_gradients()
        loss_sum = 0.0
        for micro in cuts:
            values = self.model(micro.tokens_T, micro.positions_1T, micro.plan)[micro.predictors_N].double()
            per_token, clipped = value_loss(
                values,
                columns.values_T[micro.places_N],
                columns.returns_T[micro.places_N],
                clip=self._config.value_clip,
            )
            loss = (per_token * factors_T[micro.places_N]).sum()
            if not bool(torch.isfinite(loss)):
                raise NonFiniteError(f"the critic's loss is {loss.item()}; none of its weights was changed")
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
            totals.num_clipped += int(clipped.sum())
            totals.num_tokens += len(micro.places_N)
        norm = self.learner.gradient_norm()
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient norm of the critic is {norm}; none of its weights was changed")
        if not self.learner.update(norm):
            raise NonFiniteError("weights of the critic are NaN or infinite; they were not published")
        totals.loss_sum += loss_sum
        totals.grad_norm_sum += norm
        totals.num_steps += 1

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """What it goes on from, live, as ``critic_weights`` and so on."""
        counts = {"num_rollouts": torch.tensor(self.num_rollouts, dtype=torch.int64)}
        return {**self.learner.state_tensors(), "critic_counts": counts}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from ``state_tensors``. Raises CheckpointError where they do not fit."""
        counts = tensors.get("critic_counts", {})
        if "num_rollouts" not in counts:
            raise CheckpointError("the saved critic does not say how many steps it has learnt in")
        self.learner.load_state(tensors, steps_done(tensors, NAME))
        self.num_rollouts = int(counts["num_rollouts"])


def _settings(config: CriticConfig, trainer: TrainerConfig, total_steps: int) -> OptimizerSettings:
    return OptimizerSettings(
        learning_rate=config.learning_rate,
        schedule=config.schedule,
        warmup_steps=config.warmup_steps,
        total_steps=total_steps,
        min_learning_rate=config.min_learning_rate,
        beta1=trainer.beta1,
        beta2=trainer.beta2,
        adam_epsilon=trainer.adam_epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )
