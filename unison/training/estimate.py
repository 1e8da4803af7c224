"""From columns to advantages, returns and corrections: what is the same however the batch is cut afterwards."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unison.algorithms.assemble import Algorithm
from unison.algorithms.corrections import correct
from unison.algorithms.kl import kl_estimate
from unison.algorithms.shaping import shaped_rewards
from unison.algorithms.trajectories import Trajectories
from unison.core.errors import AlgorithmError
from unison.training.calls import call_advantage
from unison.training.columns import TokenColumns


def estimate(columns: TokenColumns, algorithm: Algorithm, kl_coef: float) -> None:
    """Fill in advantages, and returns where there is a critic. ``kl_coef`` is the present one of a KL in the reward.

    Raises AlgorithmError where the estimator returns anything but one finite number for each trained token.
    """
    result = call_advantage(algorithm, trajectories(columns, algorithm, kl_coef))
    columns.advantages_T = _checked(result.advantages, "advantages", columns, algorithm)
    if result.returns is not None:
        columns.returns_T = _checked(result.returns, "returns", columns, algorithm)
    elif "values" in algorithm.uses:
        raise AlgorithmError(
            f"the advantage {algorithm.advantage_name} uses a critic's values and returned no returns for it to learn; "
            "return Estimate(advantages, returns)"
        )


def apply_correction(columns: TokenColumns, algorithm: Algorithm) -> None:
    """Fill in the weights of importance and what is left out, over the whole rollout."""
    correction = algorithm.correction
    if not correction.needs_recompute or columns.trainer_logprobs_T is None:
        return
    numbers: dict[str, int] = {}
    trajectory_of_row = [numbers.setdefault(row.trajectory_id, len(numbers)) for row in columns.rows]
    corrected = correct(
        correction,
        trainer_logprobs_T=columns.trainer_logprobs_T,
        rollout_logprobs_T=columns.rollout_logprobs_T,
        trained_T=columns.trained_T,
        trajectory_T=torch.tensor(trajectory_of_row, dtype=torch.int64)[columns.row_T],
        num_trajectories=len(numbers),
    )
    columns.correction_T = corrected.weights_T if correction.weighs else None
    columns.kept_T = corrected.kept_T
    columns.metrics |= corrected.metrics
    if correction.old == "trainer":
        columns.old_logprobs_T = columns.trainer_logprobs_T


def trajectories(columns: TokenColumns, algorithm: Algorithm, kl_coef: float) -> Trajectories:
    """The rows as an estimator sees them."""
    rows = columns.rows
    final = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    final = shaped_rewards(
        algorithm.shaping,
        final,
        [sum(row.sampled) for row in rows],
        [row.group_id for row in rows],
        columns.valid_N,
    )
    rewards, rewarded = _reward_columns(columns, final)
    turns = torch.tensor([math.fsum(row.turn_rewards.values()) for row in rows], dtype=torch.float64)
    greedy = "greedy" in algorithm.uses
    baselines = _baselines(columns, algorithm) if greedy else None
    # Where the greedy answer could not be scored there is nothing to compare with.
    valid = columns.valid_N if baselines is None else columns.valid_N & baselines.isfinite()
    return Trajectories(
        lengths=columns.lengths,
        # Copies: an estimator that works in place must not reach what the critic learns from.
        sampled_T=columns.sampled_T.clone(),
        trained_T=columns.trained_T,
        outcomes_N=final + turns,
        rewards_T=rewards,
        rewarded_T=rewarded,
        group_ids=[row.group_id for row in rows],
        valid_N=valid,
        truncated_N=torch.tensor([row.truncated for row in rows], dtype=torch.bool),
        penalties_T=_penalties(columns, algorithm, kl_coef),
        values_T=None if columns.values_T is None else columns.values_T.clone(),
        final_values_N=None if columns.final_values_N is None else columns.final_values_N.clone(),
        baselines_N=baselines,
    )


def _baselines(columns: TokenColumns, algorithm: Algorithm) -> Tensor:
    """The whole reward of each row's greedy answer, shaped as the row's own is; NaN where there is none [N]."""
    greedy = [row.greedy for row in columns.rows]
    outcomes = [math.nan if one is None else one.reward for one in greedy]
    return shaped_rewards(
        algorithm.shaping,
        torch.tensor(outcomes, dtype=torch.float64),
        [0 if one is None else one.num_tokens for one in greedy],
        [row.group_id for row in columns.rows],
        torch.tensor([one is not None for one in greedy], dtype=torch.bool),
    )


def _reward_columns(columns: TokenColumns, final_N: Tensor) -> tuple[Tensor, Tensor]:
    """(rewards where they fall [T], whether one falls there [T]); the final one at the last response token."""
    rewards = torch.zeros(columns.num_tokens, dtype=torch.float64)
    rewarded = torch.zeros(columns.num_tokens, dtype=torch.bool)
    for i, row in enumerate(columns.rows):
        first, end = columns.offsets[i], columns.offsets[i + 1]
        if not row.is_valid or first == end:
            continue
        rewards[end - 1] = final_N[i]
        rewarded[end - 1] = True
        for place, reward in row.turn_rewards.items():
            rewards[first + place - columns.starts[i]] += reward
            rewarded[first + place - columns.starts[i]] = True
    return rewards, rewarded


def _penalties(columns: TokenColumns, algorithm: Algorithm, kl_coef: float) -> Tensor | None:
    if not algorithm.kl.in_reward():
        return None
    if columns.reference_logprobs_T is None:
        raise RuntimeError("the KL in the reward needs the reference's log-probs")
    chosen = columns.scored_T
    policy = columns.rollout_logprobs_T if columns.trainer_logprobs_T is None else columns.trainer_logprobs_T
    kl = kl_estimate(policy[chosen], columns.reference_logprobs_T[chosen], algorithm.kl.kind).double()
    columns.metrics["train/reward_kl"] = float(kl.mean()) if kl.numel() else 0.0
    return torch.zeros(columns.num_tokens, dtype=torch.float64).index_put((chosen,), kl_coef * kl)


def _checked(values: Tensor, what: str, columns: TokenColumns, algorithm: Algorithm) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != (columns.num_tokens,):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise AlgorithmError(
            f"the advantage {algorithm.advantage_name} returned {what} of shape {shape}; one for each of the "
            f"{columns.num_tokens} response tokens is needed (Trajectories.spread makes them of one per trajectory)"
        )
    values = values.detach().double()
    bad = (columns.trained_T & ~values.isfinite()).nonzero()
    if bad.numel():
        place = int(bad[0])
        row = columns.rows[int(columns.row_T[place])]
        raise AlgorithmError(
            f"the advantage {algorithm.advantage_name} returned {what} {float(values[place])} for sample "
            f"{row.sample_id}; an estimator must return finite numbers"
        )
    return values
