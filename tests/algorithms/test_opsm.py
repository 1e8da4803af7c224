from __future__ import annotations

import functools
import math

import pytest

from tests.algorithms.loss_batches import TokenColumns, assert_follows, batch_of, sequence
from tests.algorithms.ragged import gradient_list
from unison.algorithms.losses.clipped import clipped
from unison.algorithms.losses.opsm import opsm


def formula(one: TokenColumns, threshold: float) -> tuple[list[float], list[float]]:
    if not one.new:
        return [], []
    count = len(one.new)
    behind = math.fsum(rollout - new for rollout, new in zip(one.rollout, one.new, strict=True)) / count
    if math.fsum(one.advantages) / count < 0 and behind > threshold:
        return [0.0] * count, [0.0] * count
    values, slopes = [], []
    for new, old, advantage in zip(one.new, one.old, one.advantages, strict=True):
        free, bound = math.exp(new - old) * advantage, min(max(math.exp(new - old), 0.8), 1.2) * advantage
        values.append(-min(free, bound))
        slopes.append(-free if free <= bound else 0.0)
    return values, slopes


@pytest.mark.parametrize("threshold", [1e-4, 0.1])
@pytest.mark.parametrize("spread", [1.0, 0.1])
def test_random_ragged_batches_match_the_formula(threshold: float, spread: float) -> None:
    assert_follows(functools.partial(opsm, mask_threshold=threshold), lambda one: formula(one, threshold), spread)


def test_published_mask() -> None:
    sequences = [sequence([-1.0, -2.0], [-1.1, -1.8], -1.0), sequence([-0.2, -0.3], [-0.2, -0.6], 1.0)]
    batch = batch_of(sequences)
    out = opsm(batch)
    assert out.loss.tolist()[:2] == [0.0, 0.0] and out.loss.tolist()[2:] == clipped(batch).loss.tolist()[2:]
    assert out.clipped.tolist()[:2] == [True, True]
    assert gradient_list(out.loss, batch.logprobs_N)[:2] == [0.0, 0.0]
    assert 0 <= float(out.clipped.double().mean()) <= 1


def test_masking_is_measured_from_the_rollout() -> None:
    batch = batch_of([sequence([-1.0], [-1.0], -1.0, [-0.5]), sequence([-1.0], [-1.0], -1.0, [-1.5])])
    assert opsm(batch, mask_threshold=0.1).loss.tolist() == [0.0, 1.0]
