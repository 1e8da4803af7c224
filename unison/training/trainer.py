"""The training step: from the columns of one rollout to optimizer steps of the policy, and of a critic."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unison.algorithms.aggregation import token_weights
from unison.algorithms.assemble import Algorithm
from unison.algorithms.kl import kl_estimate, ratio_weighted_kl
from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.config.schema import TrainerConfig
from unison.core.errors import NonFiniteError
from unison.models.decoder import Decoder
from unison.models.names import published_tensors
from unison.ops.padding import NumericsPath
from unison.training.batch import MicroBatch, micro_batches
from unison.training.calls import call_loss
from unison.training.columns import TokenColumns
from unison.training.critic import Critic, CriticTotals
from unison.training.dump import dump_rows
from unison.training.estimate import apply_correction, estimate
from unison.training.kl_coefficient import KlCoefficient
from unison.training.learner import Learner, OptimizerSettings
from unison.training.masters import MasterWeights
from unison.training.mini_batches import cut_mini_batches, shuffle_seed
from unison.training.packing import pack_micro_batches
from unison.training.passes import chosen_logprobs, logprob_column
from unison.training.reference import Reference
from unison.training.totals import StepTotals

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a rollout becomes optimizer steps."""

    epochs: int = 1
    mini_batches: int = 1
    shuffle: bool = False
    run_seed: int = 0
    critic_only_steps: int = 0
    total_steps: int = 0
    """Optimizer steps of the policy in the whole run: its schedule ends there."""


class Trainer:
    """Owns what is trained: the policy, the reference it is held to, and a critic where the algorithm has one.

    ``step`` takes all optimizer steps of one rollout. Until its first update it leaves every weight as it was, whatever
    happens; afterwards an error leaves the weights of the last complete optimizer step.
    """

    def __init__(
        self,
        model: Decoder,
        initial: dict[str, Tensor],
        *,
        path: NumericsPath,
        config: TrainerConfig,
        algorithm: Algorithm,
        plan: Plan | None = None,
        reference: Reference | None = None,
        critic: Critic | None = None,
        dump_dir: Path | None = None,
    ) -> None:
        """``initial`` are float32 values of the model's parameters (see MasterWeights).

        ``reference`` is needed where algorithm.kl.coef is above 0, ``critic`` where the advantage uses values. A batch
        that turns out not finite is written into ``dump_dir``.
        """
        if algorithm.kl.coef > 0 and reference is None:
            raise ValueError("algorithm.kl_coef is above 0, so a reference model is needed")
        if "values" in algorithm.uses and critic is None:
            raise ValueError(f"the advantage {algorithm.advantage_name} uses values, so a critic is needed")
        self.model = model
        self.critic = critic
        self.algorithm = algorithm
        self.reference = reference
        self._plan = plan or Plan(total_steps=config.steps)
        self._policy = Learner(model, initial, _optimizer_settings(config, self._plan))
        self._kl = KlCoefficient(algorithm.kl)
        self._path = path
        self._config = config
        self._dump_dir = dump_dir

    @property
    def masters(self) -> MasterWeights:
        return self._policy.masters

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the policy done."""
        return self._policy.num_steps

    def step(
        self,
        columns: TokenColumns,
        step: int = 1,
        on_progress: Progress | None = None,
        before_update: Callable[[], None] | None = None,
    ) -> StepTotals:
        """All optimizer steps of training step ``step``: passes, advantages, then epochs over mini-batches.

        Each optimizer step is over its whole mini-batch: every token's loss has its factor before the first backward,
        so the gradient does not depend on how the mini-batch is cut. Where no token is trained, nothing moves and
        ``totals.updated`` is False. ``on_progress`` hears (micro-batches done, of how many); what it raises before the
        first update leaves every weight as it was. ``before_update`` is called before weights and moments change:
        whoever still reads them copies them there. Raises NonFiniteError before any update of the optimizer step that
        met it.
        """
        totals = StepTotals(learning_rate=self._policy.learning_rate)
        if not bool(columns.trained_T.any()):
            return totals
        started = time.perf_counter()
        self.evaluate(columns, totals, (lambda: on_progress(0, 1)) if on_progress is not None else lambda: None)
        totals.pass_s = time.perf_counter() - started
        mini_batches = self._mini_batches(columns, step)
        progress = _Counter(on_progress, self._count(columns, mini_batches))
        critic_totals = CriticTotals()
        only_critic = self.critic is not None and self.critic.num_rollouts < self._plan.critic_only_steps
        for members in mini_batches:
            if self.critic is not None:
                self._critic_step(columns, members, critic_totals, totals, before_update)
            if not only_critic:
                self._policy_step(columns, members, totals, progress, before_update)
        self._conclude(columns, step, totals, critic_totals)
        return totals

    def evaluate(
        self, columns: TokenColumns, totals: StepTotals, on_micro_batch: Callable[[], None] = lambda: None
    ) -> None:
        """Fill in what is the same for all optimizer steps: log-probs, values, advantages, corrections."""
        algorithm = self.algorithm
        if algorithm.correction.needs_recompute:
            chosen = columns.scored_T if algorithm.kl.in_reward() else columns.trained_T
            columns.trainer_logprobs_T = self._logprob_column(self.model, columns, chosen, on_micro_batch)
            trained = columns.trained_T
            totals.compare(columns.rollout_logprobs_T[trained], columns.trainer_logprobs_T[trained])
        if self.reference is not None:
            chosen = columns.scored_T if algorithm.kl.in_reward() else columns.trained_T
            columns.reference_logprobs_T = self._logprob_column(self.reference.model, columns, chosen, on_micro_batch)
            gap = columns.reference_logprobs_T[chosen].double() - columns.rollout_logprobs_T[chosen].double()
            totals.first_reference_diff = float(gap.abs().max())
        if self.critic is not None:
            self.critic.evaluate(columns, on_micro_batch)
        estimate(columns, algorithm, self._kl.value)
        apply_correction(columns, algorithm)
        totals.others |= columns.metrics
        if self.critic is not None:
            totals.others |= self.critic.measure(columns)

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """What training goes on from, live, in named groups; those of parts that are not there are left out."""
        groups = self._policy.state_tensors()
        if self.critic is not None:
            groups |= self.critic.state_tensors()
        if self.reference is not None and (tensors := self.reference.state_tensors()):
            groups["reference"] = tensors
        if tensors := self._kl.state_tensors():
            groups["algorithm"] = tensors
        return groups

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]], num_steps: int) -> list[str]:
        """Go on from ``state_tensors`` and the policy's optimizer steps done; sentences about what begins anew.

        Raises CheckpointError where the tensors do not fit.
        """
        self._policy.load_state(tensors, num_steps)
        notes = []
        if self.critic is not None and "critic_weights" in tensors:
            self.critic.load_state(tensors)
        elif self.critic is not None:
            notes.append("the critic begins anew: the state was saved without one")
        elif "critic_weights" in tensors:
            notes.append("the critic of the saved state is dropped: the advantage has none now")
        if self.reference is not None:
            notes += self._load_reference(tensors.get("reference", {}))
        self._kl.load_state(tensors.get("algorithm", {}))
        return notes

    def _load_reference(self, tensors: Mapping[str, Tensor]) -> list[str]:
        if self.reference is None or not (tensors or self.reference.state_tensors()):
            return []
        if tensors and self.reference.state_tensors():
            self.reference.load_state(tensors)
            return []
        why = "reference.update is fixed now" if tensors else "the state was saved without one that moves"
        return [f"the reference is the model the run began with: {why}"]

    def published(self) -> dict[str, Tensor]:
        """The policy in compute dtype under its published names: what the engine is given."""
        return published_tensors(self.model)

    def _logprob_column(
        self, model: Decoder, columns: TokenColumns, chosen_T: Tensor, on_micro_batch: Callable[[], None]
    ) -> Tensor:
        return logprob_column(
            model,
            columns,
            chosen_T,
            path=self._path,
            budget_tokens=self._config.micro_batch_tokens,
            chunk_tokens=self._config.logprob_chunk_tokens,
            on_micro_batch=on_micro_batch,
        )

    def _mini_batches(self, columns: TokenColumns, step: int) -> list[list[int]]:
        """The rows of each optimizer step to come, all passes one after the other."""
        plan = self._plan
        # What a correction left out belongs to its mini-batch too: kept denominators count it.
        trained = sorted(set(columns.row_T[columns.trained_T].tolist()))
        trajectories = [columns.rows[i].trajectory_id for i in trained]
        found = []
        for epoch in range(plan.epochs):
            seed = shuffle_seed(plan.run_seed, step, epoch) if plan.shuffle else None
            found += cut_mini_batches(trained, plan.mini_batches, units=trajectories, seed=seed)
        return found

    def _count(self, columns: TokenColumns, mini_batches: Sequence[Sequence[int]]) -> int:
        budget, active = self._config.micro_batch_tokens, set(columns.row_T[columns.active_T].tolist())
        lengths = [[len(columns.rows[i].token_ids) - 1 for i in members if i in active] for members in mini_batches]
        return sum(len(pack_micro_batches(of_step, budget)) for of_step in lengths)

    def _factors(self, columns: TokenColumns, members: Sequence[int], *, of_critic: bool = False) -> Tensor:
        """The factor of each token's loss in one optimizer step, [T]; 0 for tokens that have no part in it."""
        chosen_N = torch.zeros(len(columns.rows), dtype=torch.bool)
        chosen_N[torch.tensor(members)] = True
        everywhere = torch.where(chosen_N[columns.row_T], columns.weights_T, 0.0)
        active = torch.where(columns.active_T, everywhere, 0.0)
        kept = self.algorithm.correction.denominator == "kept"
        return token_weights(
            "token_mean" if of_critic else self.algorithm.aggregation,
            weights_T=active,
            counted_T=everywhere if kept else active,
            row_T=columns.row_T,
            num_rows=len(columns.rows),
            trajectory_ids=[row.trajectory_id for row in columns.rows],
            group_ids=[row.group_id for row in columns.rows],
            fixed_length=self.algorithm.fixed_length,
        )

    def _policy_step(
        self,
        columns: TokenColumns,
        members: Sequence[int],
        totals: StepTotals,
        progress: _Counter,
        before_update: Callable[[], None] | None,
    ) -> None:
        factors = self._factors(columns, members)
        budget = self._config.micro_batch_tokens
        cut = micro_batches(columns, members, factors != 0, budget, path=self._path)
        if not cut:
            return
        self.masters.zero_gradients()
        for micro in cut:
            self._accumulate(micro, columns, factors, totals)
            progress.advance()
        norm = self._policy.gradient_norm()
        if not math.isfinite(norm):
            raise self._not_finite(f"the gradient norm is {norm}", columns, totals)
        started = time.perf_counter()
        if before_update is not None:
            before_update()
        if not self._policy.update(norm):
            raise self._not_finite("weights are NaN or infinite", columns, totals, "they were not published")
        totals.updated = True
        totals.num_optimizer_steps += 1
        totals.grad_norm_sum += norm
        totals.grad_norm_max = max(totals.grad_norm_max, norm)
        totals.optimizer_s += time.perf_counter() - started

    def _accumulate(self, micro: MicroBatch, columns: TokenColumns, factors_T: Tensor, totals: StepTotals) -> None:
        """Forward and backward of one micro-batch."""
        started = time.perf_counter()
        logprobs, entropy = chosen_logprobs(
            self.model, micro, self._path, self._config.logprob_chunk_tokens, with_entropy=True
        )
        policy = self._policy_loss(micro, columns, logprobs)
        per_token = policy.loss
        if columns.correction_T is not None:
            per_token = per_token * columns.correction_T[micro.places_N].to(per_token.dtype)
        kl = self._loss_kl(micro, columns, logprobs)
        if kl is not None:
            per_token = per_token + self._kl.value * kl
        if self.algorithm.entropy_coef > 0:
            per_token = per_token - self.algorithm.entropy_coef * entropy
        loss = (per_token.double() * factors_T[micro.places_N]).sum()
        forward_done = time.perf_counter()
        if not bool(torch.isfinite(loss)):
            raise self._not_finite(f"the loss is {loss.item()}", columns, totals)
        loss.backward()  # type: ignore[no-untyped-call]
        totals.add(micro, loss.detach(), policy, kl, entropy.detach())
        if not totals.updated and columns.trainer_logprobs_T is None:
            totals.compare(columns.rollout_logprobs_T[micro.places_N], logprobs.detach())
        totals.forward_s += forward_done - started
        totals.backward_s += time.perf_counter() - forward_done

    def _policy_loss(self, micro: MicroBatch, columns: TokenColumns, logprobs: Tensor) -> PolicyLoss:
        if columns.advantages_T is None:
            raise RuntimeError("advantages come before the loss")
        # A copy: what a loss does to its own columns in place must not reach the KL or the comparison with the rollout.
        return call_loss(
            self.algorithm,
            LossBatch(
                logprobs_N=logprobs.clone(),
                old_logprobs_N=columns.old_logprobs_T[micro.places_N],
                advantages_N=columns.advantages_T[micro.places_N].float(),
                sequence_N=micro.sequence_N,
                num_sequences=len(micro.members),
                rollout_logprobs_N=columns.rollout_logprobs_T[micro.places_N],
            ),
        )

    def _loss_kl(self, micro: MicroBatch, columns: TokenColumns, logprobs: Tensor) -> Tensor | None:
        if columns.reference_logprobs_T is None or not self.algorithm.kl.in_loss():
            return None
        reference, kind = columns.reference_logprobs_T[micro.places_N], self.algorithm.kl.kind
        if self.algorithm.kl.ratio_weighted:
            return ratio_weighted_kl(logprobs, columns.old_logprobs_T[micro.places_N], reference, kind)
        return kl_estimate(logprobs, reference, kind)

    def _critic_step(
        self,
        columns: TokenColumns,
        members: Sequence[int],
        critic_totals: CriticTotals,
        totals: StepTotals,
        before_update: Callable[[], None] | None,
    ) -> None:
        if self.critic is None:
            return
        started = time.perf_counter()
        if before_update is not None:
            before_update()
        self.critic.step(columns, members, self._factors(columns, members, of_critic=True), critic_totals)
        totals.critic_updated = critic_totals.num_steps > 0
        totals.critic_s += time.perf_counter() - started

    def _conclude(self, columns: TokenColumns, step: int, totals: StepTotals, critic_totals: CriticTotals) -> None:
        if self.critic is not None and totals.critic_updated:
            self.critic.num_rollouts += 1
            totals.others |= critic_totals.metrics()
        if self.reference is not None and totals.updated:
            self.reference.after_step(step, self.masters.parameters)
        measured = columns.metrics.get("train/reward_kl") if self.algorithm.kl.in_reward() else _mean_kl(totals)
        if measured is not None and totals.updated:
            totals.others |= self._kl.after_step(measured, num_samples=len(columns.rows))

    def _not_finite(
        self, what: str, columns: TokenColumns, totals: StepTotals, state: str | None = None
    ) -> NonFiniteError:
        if state is None:
            moved = totals.updated or totals.critic_updated
            state = "earlier updates of this rollout stand" if moved else "no weight was changed"
        where = ""
        if self._dump_dir is not None:
            try:
                where = f"; the batch was written to {dump_rows(self._dump_dir, self.num_steps + 1, columns)}"
            except OSError as error:
                where = f"; the batch could not be written to {self._dump_dir}: {error.strerror}"
        return NonFiniteError(f"{what} in optimizer step {self.num_steps + 1}; {state}{where}")


class _Counter:
    """Tells of micro-batches as they are done."""

    def __init__(self, tell: Progress | None, total: int) -> None:
        self._tell, self._total, self._done = tell, total, 0

    def advance(self) -> None:
        self._done += 1
        if self._tell is not None:
            self._tell(self._done, self._total)


def _mean_kl(totals: StepTotals) -> float | None:
    return None if totals.kl_sum is None else totals.kl_sum / max(totals.num_trained_tokens, 1)


def _optimizer_settings(config: TrainerConfig, plan: Plan) -> OptimizerSettings:
    return OptimizerSettings(
        learning_rate=config.learning_rate,
        schedule=config.schedule,
        warmup_steps=config.warmup_steps,
        total_steps=plan.total_steps,
        min_learning_rate=config.min_learning_rate,
        beta1=config.beta1,
        beta2=config.beta2,
        adam_epsilon=config.adam_epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )
