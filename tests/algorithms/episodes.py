"""Batches of trajectories as estimators see them: written out, or random and ragged."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from unison.algorithms.trajectories import Trajectories

DOUBLE = torch.float64
Estimator = Callable[[Trajectories], Tensor]


def batch_of(
    rewards: Sequence[Sequence[float]],
    *,
    groups: Sequence[str] | None = None,
    sampled: Sequence[Sequence[int]] | None = None,
    valid: Sequence[bool] | None = None,
    penalties: Sequence[Sequence[float]] | None = None,
    rewarded: Sequence[Sequence[int]] | None = None,
    baselines: Sequence[float] | None = None,
) -> Trajectories:
    """Rewards of tokens, a list for each trajectory; all sampled, all valid and one group if nothing else is said."""
    number = len(rewards)
    is_sampled = _flat(sampled if sampled is not None else [[1] * len(row) for row in rewards], torch.bool)
    return Trajectories(
        lengths=[len(row) for row in rewards],
        sampled_T=is_sampled,
        trained_T=is_sampled.clone(),
        outcomes_N=torch.tensor([math.fsum(row) for row in rewards], dtype=DOUBLE),
        rewards_T=_flat(rewards, DOUBLE),
        group_ids=list(groups if groups is not None else ["a"] * number),
        valid_N=torch.tensor(valid if valid is not None else [True] * number, dtype=torch.bool),
        truncated_N=torch.zeros(number, dtype=torch.bool),
        rewarded_T=None if rewarded is None else _flat(rewarded, torch.bool),
        penalties_T=None if penalties is None else _flat(penalties, DOUBLE),
        baselines_N=None if baselines is None else torch.tensor(baselines, dtype=DOUBLE),
    )


def outcomes(rewards: Sequence[float], groups: Sequence[str] | None = None, **other: Sequence[bool]) -> Trajectories:
    """One token for each trajectory, with its whole reward."""
    return batch_of([[reward] for reward in rewards], groups=groups, **other)  # type: ignore[arg-type]


def random_batches(count: int = 15) -> Iterator[Trajectories]:
    """Ragged: empty and single-token trajectories, observations, untrained and unscored ones, NaN where not sampled."""
    for seed in range(count):
        rng = random.Random(seed)
        rows = [_random_row(rng) for _ in range(rng.randint(0, 12))]
        valid = [rng.random() < 0.8 and len(row) > 0 for row in rows]
        batch = batch_of(
            [
                [reward if ok else reward * math.nan for _, reward, _, _ in row]
                for row, ok in zip(rows, valid, strict=True)
            ],
            groups=[rng.choice("pqr") for _ in rows],
            sampled=[[is_sampled for is_sampled, _, _, _ in row] for row in rows],
            valid=valid,
            penalties=[[penalty for _, _, penalty, _ in row] for row in rows],
            rewarded=[[is_rewarded for _, _, _, is_rewarded in row] for row in rows],
            baselines=[rng.choice([0.0, 1.0, math.nan]) for _ in rows],
        )
        untrained = torch.tensor([rng.random() < 0.2 for _ in rows], dtype=torch.bool)[batch.trajectory_T]
        yield dataclasses.replace(batch, trained_T=batch.sampled_T & ~untrained)


def _random_row(rng: random.Random) -> list[tuple[int, float, float, int]]:
    """Of each token: sampled, reward, penalty, rewarded. Rewards fall at the last sampled token of a turn."""
    row: list[tuple[int, float, float, int]] = []
    for turn in range(rng.choice([0, 1, 1, 2, 3])):
        if turn:
            row += [(0, 0.0, math.nan, 0)] * rng.choice([1, 3])
        for _ in range(rng.choice([0, 0, 3, 9])):
            row.append((1, 0.0, rng.gauss(0, 0.1), 0))
        row.append((1, rng.choice([0.0, 1.0, rng.gauss(0, 1)]), rng.gauss(0, 0.1), 1))
    return row


def rearranged(batch: Trajectories, order: Sequence[int]) -> Trajectories:
    """The trajectories ``order`` of a batch: another order, or a part of it."""
    starts = [sum(batch.lengths[:i]) for i in range(len(batch.lengths))]
    places = torch.tensor([starts[i] + t for i in order for t in range(batch.lengths[i])], dtype=torch.int64)
    rows = torch.tensor(order, dtype=torch.int64)
    changes: dict[str, object] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = value[places if field.name.endswith("_T") else rows]
        elif value is not None:
            changes[field.name] = [value[i] for i in order]
    return dataclasses.replace(batch, **changes)  # type: ignore[arg-type]


def by_trajectory(batch: Trajectories, values_T: Tensor) -> list[list[float]]:
    values: list[float] = values_T.tolist()
    ends = list(itertools.accumulate(batch.lengths))
    return [values[end - length : end] for end, length in zip(ends, batch.lengths, strict=True)]


def _flat(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)
