"""Rewards shaped by the length of an answer, before any advantage is taken."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What is added to rewards for length; nothing by default."""

    length_weight: float = 0.0
    correct_reward: float = 1.0
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    max_tokens: int = 0

    @property
    def is_on(self) -> bool:
        return self.length_weight > 0 or self.overlong_buffer > 0


def shaped_rewards(
    shaping: Shaping, rewards: Tensor, lengths: Sequence[int], group_ids: Sequence[Hashable], valid: Tensor
) -> Tensor:
    """Rewards [N] with what their lengths add -> float64 [N]; those that are not ``valid`` [N] stay as they are.

    ``lengths`` [N] count the tokens of the response that the policy wrote. Whether an answer is correct is told by
    its reward before shaping. Raises ConfigError for settings that cannot be meant.
    """
    added = torch.zeros(len(rewards), dtype=torch.float64)
    if shaping.length_weight > 0:
        correct = rewards >= shaping.correct_reward
        added += shaping.length_weight * length_rewards(lengths, correct, group_ids, valid)
    if shaping.overlong_buffer > 0:
        added += overlong_penalties(
            lengths,
            max_tokens=shaping.max_tokens,
            buffer=shaping.overlong_buffer,
            penalty=shaping.overlong_penalty,
        )
    return rewards.double() + torch.where(valid, added, 0.0)


def length_rewards(lengths: Sequence[int], correct: Tensor, group_ids: Sequence[Hashable], valid: Tensor) -> Tensor:
    """A reward for being shorter than the rest of the group -> float64 [N].

    Source: Kimi k1.5 (Kimi Team 2025), length penalty: lambda = 0.5 - (length - min) / (max - min), with the bounds
    over the ``valid`` [N] samples of the group; a correct answer gets lambda, another one min(0, lambda). Where all
    lengths are equal, and for a sample that is not valid, it is 0.
    """
    if not len(lengths) == len(correct) == len(group_ids) == len(valid):
        raise ValueError(
            f"{len(lengths)} lengths, {len(correct)} flags of correctness, {len(group_ids)} group ids and "
            f"{len(valid)} valid flags given"
        )
    scored: list[int] = valid.nonzero().flatten().tolist()
    bounds: dict[Hashable, tuple[int, int]] = {}
    for index in scored:
        length = lengths[index]
        shortest, longest = bounds.get(group_ids[index], (length, length))
        bounds[group_ids[index]] = (min(shortest, length), max(longest, length))
    rewards = [0.0] * len(lengths)
    for index in scored:
        shortest, longest = bounds[group_ids[index]]
        if shortest < longest:
            reward = 0.5 - (lengths[index] - shortest) / (longest - shortest)
            rewards[index] = reward if bool(correct[index]) else min(0.0, reward)
    return torch.tensor(rewards, dtype=torch.float64)


def overlong_penalties(lengths: Sequence[int], *, max_tokens: int, buffer: int, penalty: float) -> Tensor:
    """What responses cost that come close to the limit, 0 or negative -> float64 [N].

    Source: DAPO, soft overlong punishment (Yu et al. 2025): 0 up to max_tokens - buffer, from there linear, and
    -penalty at max_tokens and beyond. ``penalty`` is 1 in the paper.
    """
    if not 0 < buffer <= max_tokens:
        raise ConfigError(f"overlong_buffer={buffer} must be at least 1 and at most max_new_tokens={max_tokens}")
    if not penalty > 0:
        raise ConfigError(f"overlong_penalty={penalty} must be positive; 1 is the usual value")
    over = torch.tensor(lengths, dtype=torch.float64) - (max_tokens - buffer)
    return -penalty * (over / buffer).clamp(0.0, 1.0)
