from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import all_close, close, gradient, gradient_list
from unison.algorithms.aggregation import select, token_sum
from unison.algorithms.value_loss import explained_variance, value_loss
from unison.core.errors import ConfigError

DOUBLE = torch.float64
Columns = tuple[list[float], list[float], list[float]]


def random_columns(seed: int) -> Columns:
    """Values, old values and returns of a batch, empty and single ones among them."""
    rng = random.Random(seed)
    old = [rng.gauss(0, 1) for _ in range(rng.choice([0, 1, 2, 9, 40]))]
    return (
        [was + rng.choice([0.0, rng.gauss(0, 0.1), rng.gauss(0, 1)]) for was in old],
        old,
        [rng.choice([0.0, rng.gauss(0, 1)]) for _ in old],
    )


def tensors(columns: Columns, dtype: torch.dtype = DOUBLE) -> tuple[Tensor, Tensor, Tensor]:
    values, old, returns = (torch.tensor(column, dtype=dtype) for column in columns)
    return values.requires_grad_(), old, returns


def test_table_of_values() -> None:
    # Moved too far towards the return, too far beyond it, back towards it, within the bound, not at all.
    columns = ([0.5, 1.5, -0.5, 0.1, 0.0], [0.0] * 5, [1.0, 1.0, 1.0, 1.0, 1.0])
    values, old, returns = tensors(columns)
    out = value_loss(values, old, returns, clip=0.2)
    assert all_close(out.loss.tolist(), [0.32, 0.32, 1.125, 0.405, 0.5], 1e-12)
    assert out.clipped.tolist() == [True, True, False, False, False]
    assert all_close(gradient_list(out.loss, values), [0, 0, -1.5, -0.9, -1.0], 1e-12)


@pytest.mark.parametrize("clip", [0.0, 0.05, 0.2, 1.5])
def test_random_batches_match_the_formula(clip: float) -> None:
    for seed in range(20):
        columns = random_columns(seed)
        values, old, returns = tensors(columns)
        out = value_loss(values, old, returns, clip=clip)
        expected, slopes, stopped = [], [], []
        for v, was, r in zip(*columns, strict=True):
            plain = 0.5 * (v - r) ** 2
            held = 0.5 * (min(max(v, was - clip), was + clip) - r) ** 2 if clip else plain
            expected.append(max(plain, held))
            slopes.append(0.0 if held > plain else v - r)
            stopped.append(held > plain)
        assert all_close(out.loss.tolist(), expected, 1e-12)
        assert all_close(gradient_list(out.loss, values), slopes, 1e-12)
        assert out.clipped.tolist() == stopped


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_gradient_agrees_with_finite_differences(clip: float) -> None:
    values, old, returns = tensors(([0.5, 1.5, -0.5, 0.1, 0.0, 3.0], [0.0] * 6, [1.0, 1.0, 1.0, 1.0, 1.0, -2.0]))
    function: Callable[[Tensor], Tensor] = lambda x: value_loss(x, old, returns, clip=clip).loss  # noqa: E731
    assert torch.autograd.gradcheck(function, (values,))


def test_old_values_and_returns_get_no_gradient() -> None:
    columns = [torch.tensor([value], requires_grad=True) for value in (0.1, 0.0, 1.0)]
    out = value_loss(*columns, clip=0.2)
    assert [gradient(out.loss, column) is None for column in columns] == [False, True, True]
    assert not out.clipped.requires_grad


@pytest.mark.parametrize(
    ("dtype", "returned"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_float32_at_least_is_returned(dtype: torch.dtype, returned: torch.dtype) -> None:
    values, old, returns = tensors(([0.5], [0.0], [1.0]), dtype)
    assert value_loss(values, old, returns, clip=0.2).loss.dtype == returned
    assert value_loss(values, old, returns.double(), clip=0.2).loss.dtype == DOUBLE


def test_rubbish_in_masked_places_does_not_reach_value_or_gradient() -> None:
    rubbish = [math.nan, math.inf, -math.inf]
    values, old, returns = tensors(([*rubbish, 0.5, 2.0, 0.1], [0.0, *rubbish, 0.0, 0.0], [0.0, 0, 0, 1, *rubbish[:2]]))
    weights = torch.tensor([0.0, 0, 0, 0, 0, 0])
    weights_of_one = torch.tensor([0.0, 0, 0, 1, 0, 0])
    old = old.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).index_fill(0, torch.tensor([1, 2]), math.nan)
    for chosen, loss, slopes in ((weights, 0.0, [0.0] * 6), (weights_of_one, 0.32, [0.0] * 6)):
        kept = select(chosen, values, old, returns, chosen)
        out = value_loss(*kept[:3], clip=0.2)
        total = token_sum(out.loss, kept[3])
        assert close(total.item(), loss, 1e-12) and gradient_list(total, values) == slopes


def test_a_lost_old_value_clips_nothing_and_large_errors_are_finite() -> None:
    values, old, returns = tensors(([0.5, 1e6, -1e6], [math.nan, 0.0, 0.0], [1.0, -1e6, 1e6]), torch.float32)
    out = value_loss(values, old, returns, clip=0.2)
    assert all_close(out.loss.tolist(), [0.125, 2e12, 2e12]) and out.clipped.tolist() == [False, False, False]
    assert gradient_list(out.loss, values) == [-0.5, 2e6, -2e6]


@pytest.mark.parametrize("clip", [-0.1, math.nan, math.inf])
def test_a_clip_that_makes_no_sense_is_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match=rf"clip={clip} must be 0 \(off\) or a positive number"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip=clip)


def test_columns_that_would_be_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes \[3\], \[3, 1\], \[3\]"):
        value_loss(torch.zeros(3), torch.zeros(3, 1), torch.zeros(3), clip=0.2)


def test_order_and_cut_of_a_batch_do_not_matter() -> None:
    values, old, returns = (column.detach() for column in tensors(random_columns(3), torch.float32))
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    whole = value_loss(values, old, returns, clip=0.2)
    assert torch.equal(value_loss(values[order], old[order], returns[order], clip=0.2).loss, whole.loss[order])
    pieces = [value_loss(values[at], old[at], returns[at], clip=0.2).loss for at in (slice(0, 1), slice(1, None))]
    assert torch.equal(torch.cat(pieces), whole.loss)


def test_explained_variance_matches_its_formula() -> None:
    for seed in range(20):
        values, _, returns = random_columns(seed)
        rng = random.Random(seed)
        weights = [rng.choice([0.0, 1.0, 0.5]) for _ in values]
        kept = [(v, r) for v, r, w in zip(values, returns, weights, strict=True) if w]
        expected = 0.0
        if len({r for _, r in kept}) > 1:
            mean, gap = (math.fsum(x) / len(kept) for x in ([r for _, r in kept], [r - v for v, r in kept]))
            spread = math.fsum((r - mean) ** 2 for _, r in kept)
            expected = 1 - math.fsum((r - v - gap) ** 2 for v, r in kept) / spread
        columns = torch.tensor(values, dtype=DOUBLE), torch.tensor(returns, dtype=DOUBLE), torch.tensor(weights)
        assert close(explained_variance(*columns), expected, 1e-9)


def test_explained_variance_of_plain_cases() -> None:
    returns, all_of_them = torch.tensor([1.0, 2.0, 4.0]), torch.ones(3, dtype=torch.bool)
    assert explained_variance(returns, returns, all_of_them) == 1.0
    assert explained_variance(returns + 5, returns, all_of_them) == 1.0
    assert explained_variance(torch.full((3,), 7.0), returns, all_of_them) == pytest.approx(0.0, abs=1e-12)
    assert explained_variance(-returns, returns, all_of_them) == pytest.approx(-3.0)


def test_explained_variance_is_zero_where_there_is_nothing_to_explain() -> None:
    values, equal = torch.tensor([0.3, 0.1, math.nan]), torch.tensor([0.1, 0.1, math.inf])
    assert explained_variance(values, equal, torch.tensor([1.0, 0.5, 0.0])) == 0.0
    assert explained_variance(values, equal, torch.tensor([0, 1, 0])) == 0.0
    assert explained_variance(values, equal, torch.zeros(3)) == 0.0
    assert explained_variance(values[:0], equal[:0], torch.zeros(0)) == 0.0


def test_explained_variance_sees_selected_places_alone_and_shows_a_nan_there() -> None:
    values, returns = torch.tensor([1.0, 2.5, math.nan]), torch.tensor([1.0, 2.0, math.inf])
    assert explained_variance(values, returns, torch.tensor([1.0, 1.0, 0.0])) == pytest.approx(0.75)
    assert math.isnan(explained_variance(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), torch.ones(2)))
