"""One optimizer step from the rows of one rollout."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from unison.algorithms.aggregation import token_sum
from unison.algorithms.kl import kl_estimate
from unison.algorithms.policy_loss import clipped_policy_loss
from unison.config.schema import AlgorithmConfig, TrainerConfig
from unison.core.errors import CheckpointError, NonFiniteError
from unison.models.decoder import Decoder
from unison.models.names import published_tensors
from unison.ops.padding import NumericsPath
from unison.ops.vocab import token_logprobs
from unison.training.batch import MicroBatch, micro_batches
from unison.training.dump import dump_rows
from unison.training.masters import MasterWeights
from unison.training.rows import TrainingRow, loss_denominator
from unison.training.schedule import learning_rate
from unison.training.totals import StepTotals

MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for each parameter."""


class Trainer:
    """Owns the policy being trained: model, float32 masters, AdamW, and the fixed reference.

    ``step`` either takes one whole optimizer step or raises and leaves every weight as it was.
    """

    def __init__(
        self,
        model: Decoder,
        initial: dict[str, Tensor],
        *,
        path: NumericsPath,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        reference: Decoder | None = None,
        dump_dir: Path | None = None,
    ) -> None:
        """``initial`` are float32 values of the model's parameters (see MasterWeights).

        ``reference`` is needed where algorithm.kl_coef is above 0. A batch that turns out not finite is
        written into ``dump_dir``.
        """
        if algorithm.kl_coef > 0 and reference is None:
            raise ValueError("algorithm.kl_coef is above 0, so a reference model is needed")
        self.masters = MasterWeights(model, initial)
        self.model = model
        self.num_steps = 0
        self._path = path
        self._config = config
        self._algorithm = algorithm
        self._reference = reference
        self._dump_dir = dump_dir
        self._optimizer = _adamw(self.masters, config)

    def step(
        self,
        rows: Sequence[TrainingRow],
        on_progress: Callable[[int, int], None] | None = None,
        before_update: Callable[[], None] | None = None,
    ) -> StepTotals:
        """Forward and backward over all micro-batches, then one update.

        Rows are the whole global batch: every token's loss is divided by the batch's own number of
        trained tokens, so the gradient does not depend on how it is cut. Where no token is trained,
        nothing moves and ``totals.updated`` is False. ``on_progress`` hears (micro-batches done, of how
        many); what it raises ends the step with every weight as it was. ``before_update`` is called right before
        weights and moments change: whoever still reads them copies them there. Raises NonFiniteError before any
        update.
        """
        totals = StepTotals(learning_rate=self._learning_rate())
        denominator = loss_denominator(rows)
        if denominator == 0:
            return totals
        self.masters.zero_gradients()
        cut = self._cut(rows)
        for done, micro in enumerate(cut, start=1):
            self._accumulate(micro, denominator, totals, rows)
            if on_progress is not None:
                on_progress(done, len(cut))
        totals.grad_norm = self._checked_norm(rows)
        if before_update is not None:
            before_update()
        self._update(totals, rows)
        return totals

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """What training goes on from, live: ``weights`` (float32 masters) and ``optimizer`` (AdamW's moments).

        The optimizer's are named ``exp_avg.PARAMETER`` and so on; there are none before its first step.
        """
        moments = {
            f"{key}.{name}": value
            for name, parameter in self.masters.parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        return {"weights": self.published_masters(), "optimizer": moments}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]], num_steps: int) -> None:
        """Go on from ``state_tensors`` and the optimizer steps done. Raises CheckpointError where they do not fit."""
        _check_names(tensors, self.masters.parameters, num_steps)
        with torch.no_grad():
            for name, parameter in self.masters.parameters.items():
                _copy(parameter, tensors["weights"][name], name)
        for name, parameter in self.masters.parameters.items():
            self._optimizer.state.pop(parameter, None)
            if num_steps > 0:
                self._optimizer.state[parameter] = {
                    key: _moment(parameter, tensors["optimizer"][f"{key}.{name}"], key, name) for key in MOMENTS
                }
        self.masters.publish()
        self.num_steps = num_steps

    def published(self) -> dict[str, Tensor]:
        """The policy in compute dtype under its published names: what the engine is given."""
        return published_tensors(self.model)

    def published_masters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.masters.parameters.items()}

    def _cut(self, rows: Sequence[TrainingRow]) -> list[MicroBatch]:
        return micro_batches(rows, self._config.micro_batch_tokens, path=self._path)

    def _accumulate(
        self, micro: MicroBatch, denominator: float, totals: StepTotals, rows: Sequence[TrainingRow]
    ) -> None:
        started = time.perf_counter()
        logprobs, entropy = self._logprobs(self.model, micro, with_entropy=True)
        policy = clipped_policy_loss(
            logprobs,
            micro.old_logprobs_N,
            micro.advantages_N,
            clip_low=self._algorithm.clip_low,
            clip_high=self._algorithm.clip_high,
        )
        per_token = policy.loss
        kl = self._reference_kl(micro, logprobs)
        if kl is not None:
            per_token = per_token + self._algorithm.kl_coef * kl
        loss = token_sum(per_token, micro.weights_N) / denominator
        forward_done = time.perf_counter()
        if not bool(torch.isfinite(loss)):
            raise self._not_finite(f"the loss is {loss.item()}", rows)
        loss.backward()  # type: ignore[no-untyped-call]
        totals.add(micro, loss.detach(), logprobs.detach(), policy, kl, entropy.detach())
        totals.forward_s += forward_done - started
        totals.backward_s += time.perf_counter() - forward_done

    def _logprobs(self, model: Decoder, micro: MicroBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
        hidden = model(micro.tokens_T, micro.positions_1T, micro.plan)
        return token_logprobs(
            hidden.index_select(0, micro.predictors_N),
            model.head_weight(),
            micro.targets_N,
            micro.temperatures_N,
            path=self._path,
            chunk_tokens=self._config.logprob_chunk_tokens,
            with_entropy=with_entropy,
        )

    def _reference_kl(self, micro: MicroBatch, logprobs: Tensor) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            reference, _ = self._logprobs(self._reference, micro, with_entropy=False)
        return kl_estimate(logprobs, reference, "k3")

    def _checked_norm(self, rows: Sequence[TrainingRow]) -> float:
        norms = torch._foreach_norm(self.masters.gradients())
        norm = float(torch.linalg.vector_norm(torch.stack(list(norms)).double()))
        if not math.isfinite(norm):
            raise self._not_finite(f"the gradient norm is {norm}", rows)
        return norm

    def _update(self, totals: StepTotals, rows: Sequence[TrainingRow]) -> None:
        started = time.perf_counter()
        limit = self._config.max_grad_norm
        if 0 < limit < totals.grad_norm:
            torch._foreach_mul_(self.masters.gradients(), limit / totals.grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = totals.learning_rate
        self._optimizer.step()
        if not self.masters.all_finite():
            raise self._not_finite("weights are NaN or infinite", rows, "they were not published")
        self.masters.publish()
        self.num_steps += 1
        totals.updated = True
        totals.optimizer_s = time.perf_counter() - started

    def _learning_rate(self) -> float:
        return learning_rate(
            self.num_steps,
            peak=self._config.learning_rate,
            schedule=self._config.schedule,
            warmup_steps=self._config.warmup_steps,
            total_steps=self._config.steps,
            minimum=self._config.min_learning_rate,
        )

    def _not_finite(
        self, what: str, rows: Sequence[TrainingRow], state: str = "no weight was changed"
    ) -> NonFiniteError:
        where = ""
        if self._dump_dir is not None:
            try:
                where = f"; the batch was written to {dump_rows(self._dump_dir, self.num_steps + 1, rows)}"
            except OSError as error:
                where = f"; the batch could not be written to {self._dump_dir}: {error.strerror}"
        return NonFiniteError(f"{what} in optimizer step {self.num_steps + 1}; {state}{where}")


def _check_names(tensors: Mapping[str, Mapping[str, Tensor]], parameters: Mapping[str, Tensor], num_steps: int) -> None:
    moments = [f"{key}.{name}" for name in parameters for key in MOMENTS] if num_steps > 0 else []
    for group, names in (("weights", list(parameters)), ("optimizer", moments)):
        held = tensors.get(group, {})
        wrong = sorted(set(names) ^ set(held))
        if wrong:
            raise CheckpointError(
                f"the saved {group} do not fit this model: {wrong[0]!r} is "
                f"{'missing' if wrong[0] in names else 'not one of it'} ({len(wrong)} names differ)"
            )


def _copy(target: Tensor, saved: Tensor, name: str) -> None:
    if target.shape != saved.shape or target.dtype != saved.dtype:
        raise CheckpointError(
            f"the saved {name!r} is {saved.dtype} {list(saved.shape)}, this model's {target.dtype} {list(target.shape)}"
        )
    target.copy_(saved)


def _moment(parameter: Tensor, saved: Tensor, key: str, name: str) -> Tensor:
    moment = torch.zeros((), dtype=torch.float32) if key == "step" else torch.zeros_like(parameter)
    _copy(moment, saved, f"{key}.{name}")
    return moment


def _adamw(masters: MasterWeights, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019); norms and biases are not decayed."""
    matrices = [p for p in masters.parameters.values() if p.ndim > 1]
    vectors = [p for p in masters.parameters.values() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_epsilon,
        fused=True,
    )
