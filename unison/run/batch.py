"""The samples of a step: what is trained of them, and what the ledger says became of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unison.assembly import Parts
from unison.core.errors import NumericsError
from unison.core.records import Sample
from unison.rollout.greedy import without_greedy
from unison.rollout.ledger import GroupAccount, LedgerEntry, group_accounts
from unison.run.wrap_up import peak_memory_bytes
from unison.training.columns import TokenColumns
from unison.training.totals import StepTotals

_MAX_CURSOR_CHARS = 4096
"""A place in the data that takes more (a curriculum's) is kept in checkpoints only."""


@dataclass(slots=True)
class Batch:
    """The samples of a step, as drawn, and what is trained of them."""

    samples: list[Sample]
    filtered: dict[str, str]
    """Groups the filter discarded, with its reasons."""
    kept: list[Sample] = field(default_factory=list)
    columns: TokenColumns | None = None


@dataclass(frozen=True, slots=True)
class Digests:
    """What a step is tied to, for whoever checks it later."""

    base: str
    """Of the model the run began from."""
    weights: str
    """Of the policy after the step."""
    samples: str | None
    """Of the file of its samples."""


def batch_accounts(batch: Batch, totals: StepTotals) -> dict[str, GroupAccount]:
    """What became of each prompt of a batch, once the step is done."""
    has_learnt = totals.updated or totals.critic_updated
    rows = batch.columns.rows if batch.columns is not None and has_learnt else []
    trained = {row.sample_id for row in rows if row.is_trained}
    return group_accounts(without_greedy(batch.samples), trained, batch.filtered)


def ledger_entry(
    parts: Parts,
    step: int,
    batch: Batch,
    groups: dict[str, GroupAccount],
    totals: StepTotals,
    *,
    draws: list[int],
    digests: Digests,
) -> LedgerEntry:
    """The entry of one step, made once its weights are published and the data has heard of its rewards."""
    cursor = parts.cursor.state_dict()
    return LedgerEntry(
        step=step,
        draws=draws,
        groups=groups,
        filtered=list(batch.filtered),
        reward_sum=sum(sample.reward for sample in without_greedy(batch.samples) if sample.reward is not None),
        loss=totals.loss,
        grad_norm=totals.grad_norm,
        optimizer_steps=parts.trainer.num_steps,
        weights_version=parts.policy.version,
        weights_digest=digests.weights,
        base_digest=digests.base,
        samples_sha256=digests.samples,
        cursor=cursor if len(str(cursor)) <= _MAX_CURSOR_CHARS else {},
    )


def check_exact(totals: StepTotals, is_first: bool) -> None:
    """Raise NumericsError where training did not find the log-probs of the rollout."""
    if not totals.logp_diff_max == 0:
        raise NumericsError(
            f"exact numerics was broken: log-probs of rollout and training differ by up to {totals.logp_diff_max:.3g}; "
            "run `unison check exactness` on this model, and use model.numerics=fast to go on without the promise"
        )
    if is_first and totals.first_reference_diff != 0:
        raise NumericsError(
            "exact numerics was broken: before the first update log-probs of policy and reference differ by up to "
            f"{totals.first_reference_diff:.3g}, not 0"
        )


def step_accounts(parts: Parts, metrics: Mapping[str, float], totals: StepTotals, seconds: float) -> dict[str, float]:
    """Where a step's time and memory went."""
    busy = metrics["rollout/seconds"] + totals.pass_s + totals.forward_s + totals.backward_s + totals.critic_s
    return {
        "step/seconds": seconds,
        "step/other_share": max(0.0, 1 - busy / seconds),
        "memory/peak_bytes": float(peak_memory_bytes()),
        "data/epoch": float(parts.cursor.epoch),
        "data/skipped": float(parts.num_skipped),
    }
