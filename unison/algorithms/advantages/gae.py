"""Generalised advantage estimation: advantages from rewards and a critic's values.

Dims: B padded rows, T places of a row, W places for the steps of a row and one before them, N trajectories, R of them,
L places of the longest of these. Flat columns [T] hold the response tokens of all trajectories.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from unison.algorithms.aggregation import masked_whiten
from unison.algorithms.registry import register_advantage
from unison.algorithms.scan import reverse_scan, whole_chunks
from unison.algorithms.trajectories import Estimate, Trajectories
from unison.core.errors import ConfigError, RewardError

Observations = Literal["across", "over"]

BLOCK_TOKENS: Final = 1 << 20
"""Rows are taken so many places at a time, whose intermediate results a last-level cache can hold."""


@register_advantage("gae", uses=("kl", "values"))
def gae_advantages(
    batch: Trajectories,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    observations: Observations = "across",
    bootstrap: bool = False,
    whiten: bool = True,
) -> Estimate:
    """Advantages and returns of each token from its critic's values; see gae.

    ``bootstrap``: what is truncated goes on into the critic's value of its end; without, and for all else, into 0.
    ``whiten``: advantages of mean 0 and sample standard deviation 1 over the trained tokens of the batch, 0 elsewhere.
    Returns are those before whitening. A trajectory without a valid reward has advantage 0 and its values as returns,
    from which a critic learns nothing.

    Raises ConfigError without the critic's values, RewardError for a reward on a token that is no step.
    """
    if batch.values_T is None:
        raise ConfigError(
            "the advantage gae needs a critic's values, and the batch has none; without a critic use grpo"
        )
    valid_T = batch.valid_N[batch.trajectory_T]
    advantages_T = torch.zeros_like(batch.values_T, dtype=torch.float64)
    returns_T = torch.where(batch.sampled_T & ~valid_T, batch.values_T.detach().double().nan_to_num(), 0.0)
    rewards_T, steps_T, finals_N = _rewards(batch, observations), batch.sampled_T & valid_T, _finals(batch, bootstrap)
    for rows in _of_like_length(batch.lengths):
        at_RL, inside_RL = _places(batch.lengths, rows, steps_T.device)
        mask_RL = steps_T[at_RL] & inside_RL
        advantages_RL, returns_RL = gae(
            rewards_T[at_RL],
            batch.values_T[at_RL],
            mask_RL,
            gamma=gamma,
            lam=lam,
            final_values_B=None if finals_N is None else finals_N[rows],
            observations=observations,
        )
        advantages_T[at_RL[mask_RL]] = advantages_RL[mask_RL].double()
        returns_T[at_RL[mask_RL]] = returns_RL[mask_RL].double()
    if whiten:
        advantages_T = masked_whiten(advantages_T, batch.trained_T & valid_T)
    return Estimate(advantages_T, returns_T)


@torch.no_grad()
def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float,
    lam: float,
    final_values_B: Tensor | None = None,
    observations: Observations = "across",
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] of padded rows, 0 where ``mask_BT`` is 0; they carry no gradient.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  returns = A + V.
    Source: Schulman et al. 2016, High-dimensional continuous control using generalized advantage estimation.

    ``mask_BT``: the tokens the policy wrote. What t + 1 means where other tokens stand between is ``observations``:
    with "across" only what the policy wrote is a step, so the next value is that at its next token, with one decay for
    the span, and nothing at other places has any effect, NaN included. With "over" every place from the first token
    it wrote to the last is a step, whose reward and value count; their results are not given.
    ``final_values_B``: V after the last step, for rows that were cut off; 0 where not given. Padding may be on either
    side, or anywhere with "across". Rows without a step are 0.

    The result is float32, or float64 where rewards or values are; the recursion adds up in float64. A value or reward
    that is not finite, at a step, spoils its own row and no other. Raises ConfigError for gamma or lam outside [0, 1]
    and for an unknown ``observations``, ValueError for shapes that differ.
    """
    _check_settings(gamma, lam, observations)
    if not rewards_BT.shape == values_BT.shape == mask_BT.shape or mask_BT.ndim != 2:
        raise ValueError(
            f"rewards {[*rewards_BT.shape]}, values {[*values_BT.shape]} and mask {[*mask_BT.shape]} given"
        )
    dtype = torch.promote_types(torch.promote_types(rewards_BT.dtype, values_BT.dtype), torch.float32)
    mask_BT = mask_BT.bool()
    steps_BT = mask_BT if observations == "across" else _span(mask_BT)
    finals_B = rewards_BT.new_zeros(len(mask_BT)) if final_values_B is None else final_values_B
    advantages_BT, returns_BT = torch.zeros_like(rewards_BT, dtype=dtype), torch.zeros_like(rewards_BT, dtype=dtype)
    size = max(BLOCK_TOKENS // max(mask_BT.shape[1], 1), 1)
    for start in range(0, len(mask_BT) if mask_BT.shape[1] else 0, size):
        rows = slice(start, start + size)
        block = rewards_BT[rows].to(dtype), values_BT[rows].to(dtype), steps_BT[rows], gamma * finals_B[rows].double()
        _advantages_of_block(*block, gamma, gamma * lam, advantages_BT[rows], returns_BT[rows])
    if steps_BT is not mask_BT:
        advantages_BT.masked_fill_(~mask_BT, 0.0)
        returns_BT.masked_fill_(~mask_BT, 0.0)
    return advantages_BT, returns_BT


def _advantages_of_block(
    rewards_BT: Tensor,
    values_BT: Tensor,
    steps_BT: Tensor,
    last_B: Tensor,
    gamma: float,
    decay: float,
    advantages_BT: Tensor,
    returns_BT: Tensor,
) -> None:
    """Advantages and returns into the last two. The steps of a row go to columns 1, 2, ...; all else to column 0."""
    column_BT = steps_BT.cumsum(1)
    counts_B = column_BT[:, -1].clone()
    column_BT.mul_(steps_BT)
    width = whole_chunks(1 + int(counts_B.max()))
    values_BW = _gather_left(values_BT, column_BT, width)
    deltas_BW = _gather_left(rewards_BT, column_BT, width).double().sub_(values_BW)
    deltas_BW[:, :-1].add_(values_BW[:, 1:], alpha=gamma)
    deltas_BW.scatter_add_(1, counts_B[:, None], last_B[:, None])
    advantages_BW = reverse_scan(deltas_BW, decay, dtype=rewards_BT.dtype)
    # The scan runs from the right: whatever column 0 held has reached no step, and now it is what all else gets.
    advantages_BW[:, 0] = 0.0
    torch.gather(advantages_BW, 1, column_BT, out=advantages_BT)
    torch.gather(advantages_BW.add_(values_BW), 1, column_BT, out=returns_BT)


def _gather_left(x_BT: Tensor, column_BT: Tensor, width: int) -> Tensor:
    left_BW = x_BT.new_zeros(len(x_BT), width).scatter_(1, column_BT, x_BT)
    left_BW[:, 0] = 0.0
    return left_BW


def _span(mask_BT: Tensor) -> Tensor:
    """True from the first True of a row to its last."""
    begun_BT = mask_BT.cumsum(1) > 0
    return begun_BT & (mask_BT.flip(1).cumsum(1) > 0).flip(1)


def _check_settings(gamma: float, lam: float, observations: str) -> None:
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ConfigError(f"{name}={value} must lie in [0, 1]; 1 is usual for answers that are scored at their end")
    if observations not in get_args(Observations):
        raise ConfigError(f"observations={observations!r} is unknown; known: {', '.join(get_args(Observations))}")


def _rewards(batch: Trajectories, observations: Observations) -> Tensor:
    rewards_T = batch.net_rewards_T
    lost_T = (rewards_T != 0) & ~batch.sampled_T
    if observations == "across" and bool(lost_T.any()):
        place = int(lost_T.nonzero()[0])
        raise RewardError(
            f"response token {place} of the batch has reward {float(rewards_T[place])}, but the policy did not write "
            'it; give the reward to the last token the policy wrote before it, or use observations="over"'
        )
    return rewards_T


def _finals(batch: Trajectories, bootstrap: bool) -> Tensor | None:
    if not bootstrap:
        return None
    if batch.final_values_N is None:
        raise ConfigError("bootstrap=true needs the critic's value after the last token, and the batch has none")
    return torch.where(batch.truncated_N, batch.final_values_N.detach(), 0.0)


def _of_like_length(lengths: Sequence[int]) -> Iterator[Tensor]:
    """Rows that are not empty, in blocks of like length, so that padding them wastes little."""
    block: list[int] = []
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row]):
        if block and (len(block) + 1) * lengths[block[0]] > BLOCK_TOKENS:
            yield torch.tensor(block)
            block = []
        block.append(row)
    if block:
        yield torch.tensor(block)


def _places(lengths: Sequence[int], rows_R: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each row the flat places of its tokens, padded to the longest with any place, and which are its own [R, L]."""
    lengths_N = torch.tensor(lengths, dtype=torch.int64)
    starts_R, lengths_R = (lengths_N.cumsum(0) - lengths_N)[rows_R], lengths_N[rows_R]
    offset_L = torch.arange(int(lengths_R.max()))
    inside_RL = offset_L < lengths_R[:, None]
    return torch.where(inside_RL, starts_R[:, None] + offset_L, 0).to(device), inside_RL.to(device)
