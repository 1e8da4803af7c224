"""Random ragged batches: empty rows, single tokens, rows without any trained token."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class RaggedBatch:
    """Flat columns of the rows in order; the last value of ``row_ends`` is the number of tokens."""

    row_ends: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    other_logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.logprobs)


def ragged_batches(count: int = 12) -> Iterator[RaggedBatch]:
    for seed in range(count):
        rng = random.Random(seed)
        batch = RaggedBatch()
        for row in range(rng.randint(0, 6)):
            length = rng.choice([0, 1, 1, 2, 5, 17])
            advantage = rng.choice([0.0, rng.gauss(0, 1)])
            masked = row % 3 == 2
            for _ in range(length):
                policy = -rng.expovariate(0.5)
                batch.logprobs.append(policy)
                batch.other_logprobs.append(policy + rng.choice([0.0, rng.gauss(0, 0.05), rng.gauss(0, 1)]))
                batch.advantages.append(advantage)
                batch.weights.append(0.0 if masked else rng.choice([0.0, 1.0, 1.0, 0.5]))
            batch.row_ends.append(len(batch.logprobs))
        yield batch


def close(actual: float, expected: float, tolerance: float = 1e-5) -> bool:
    """Relative, absolute below 1."""
    return math.isfinite(actual) and abs(actual - expected) <= tolerance * max(1.0, abs(expected))


def all_close(actual: Sequence[float], expected: Sequence[float], tolerance: float = 1e-5) -> bool:
    return len(actual) == len(expected) and all(
        close(one, other, tolerance) for one, other in zip(actual, expected, strict=True)
    )


def gradient(result: Tensor, source: Tensor) -> Tensor | None:
    """d sum(result) / d source; None where source was not used."""
    return torch.autograd.grad(result.sum(), source, allow_unused=True, retain_graph=True)[0]


def gradient_list(result: Tensor, source: Tensor) -> list[float]:
    slope = gradient(result, source)
    assert slope is not None
    values: list[float] = slope.tolist()
    return values
