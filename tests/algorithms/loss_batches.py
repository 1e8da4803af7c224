"""Random ragged batches of whole sequences, and how to cut and compare them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.algorithms.ragged import all_close, gradient_list
from unison.algorithms.losses.base import LossBatch, PolicyLoss

Loss = Callable[[LossBatch], PolicyLoss]


@dataclass(frozen=True)
class TokenColumns:
    """The tokens of one sequence as plain lists."""

    new: list[float]
    old: list[float]
    advantages: list[float]
    rollout: list[float]


def sequence(
    new: Sequence[float],
    old: Sequence[float] | None = None,
    advantages: Sequence[float] | float = 1.0,
    rollout: Sequence[float] | None = None,
) -> TokenColumns:
    """Neutral where not given: the old and the rollout's policy are the new one."""
    of_old = list(new if old is None else old)
    of_tokens = [advantages] * len(new) if isinstance(advantages, float) else list(advantages)
    return TokenColumns(list(new), of_old, of_tokens, list(of_old if rollout is None else rollout))


def batch_of(sequences: Sequence[TokenColumns], dtype: torch.dtype = torch.float64) -> LossBatch:
    def column(name: str) -> Tensor:
        return torch.tensor([value for one in sequences for value in getattr(one, name)], dtype=dtype)

    lengths = torch.tensor([len(one.new) for one in sequences], dtype=torch.int64)
    return LossBatch(
        logprobs_N=column("new").requires_grad_(),
        old_logprobs_N=column("old"),
        advantages_N=column("advantages"),
        sequence_N=torch.repeat_interleave(torch.arange(len(sequences)), lengths),
        num_sequences=len(sequences),
        rollout_logprobs_N=column("rollout"),
    )


def random_sequences(count: int = 12, spread: float = 1.0) -> Iterator[list[TokenColumns]]:
    """Batches with empty and single-token sequences, advantages equal and differing within one, of either sign and 0.

    ``spread`` scales how far the policies are apart.
    """
    for seed in range(count):
        rng = random.Random(seed)
        yield [_random_sequence(rng, spread) for _ in range(rng.randint(0, 6))]


def _random_sequence(rng: random.Random, spread: float) -> TokenColumns:
    length = rng.choice([0, 1, 1, 2, 5, 17])
    old = [-rng.expovariate(0.5) for _ in range(length)]
    new = [min(0.0, value + rng.choice([0.0, rng.gauss(0, 0.05), rng.gauss(0, 1)]) * spread) for value in old]
    rollout = [min(0.0, value + rng.choice([0.0, rng.gauss(0, 0.02)])) for value in old]
    advantage = rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 1)])
    differing = [rng.choice([0.0, rng.gauss(0, 1)]) for _ in range(length)]
    return TokenColumns(new, old, differing if rng.random() < 0.3 else [advantage] * length, rollout)


def values_and_slopes(loss: Loss, sequences: Sequence[TokenColumns]) -> tuple[list[float], list[float]]:
    """Loss of each token and the gradient of their sum with respect to each log-prob."""
    batch = batch_of(sequences)
    out = loss(batch)
    return out.loss.tolist(), gradient_list(out.loss, batch.logprobs_N)


def assert_follows(
    loss: Loss, formula: Callable[[TokenColumns], tuple[list[float], list[float]]], spread: float = 1.0
) -> None:
    """``formula`` gives value and gradient of the tokens of one sequence, written out in plain Python."""
    for sequences in random_sequences(spread=spread):
        values, slopes = values_and_slopes(loss, sequences)
        expected = [formula(one) for one in sequences]
        assert all_close(values, [value for of_one, _ in expected for value in of_one], 1e-9)
        assert all_close(slopes, [slope for _, of_one in expected for slope in of_one], 1e-9)
