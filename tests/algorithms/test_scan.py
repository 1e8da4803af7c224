"""The scan against a recursion written out place by place, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unison.algorithms.scan import CHUNK, reverse_scan, whole_chunks
from unison.core.errors import ConfigError

DECAYS = [0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 1.0]


def recursion(x_BT: Tensor, decay: float) -> Tensor:
    rows = []
    for row in x_BT.tolist():
        out, running = [0.0] * len(row), 0.0
        for place in range(len(row) - 1, -1, -1):
            running = row[place] + decay * running
            out[place] = running
        rows.append(out)
    return torch.tensor(rows, dtype=torch.float64).view(x_BT.shape)


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest error of a row, in units of its largest value."""
    scale = expected.abs().amax(1).clamp(min=1e-300)
    return float(((actual.double() - expected).abs().amax(1) / scale).max())


@pytest.mark.parametrize(
    ("decay", "expected"),
    [(0.5, [3.5625, 5.125, 6.25, 6.5, 5]), (0, [1, 2, 3, 4, 5]), (1, [15, 14, 12, 9, 5])],
)
def test_discounted_returns(decay: float, expected: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        assert reverse_scan(torch.tensor([[1, 2, 3, 4, 5]], dtype=dtype), decay).tolist() == [expected]


@given(
    rows=st.integers(0, 4),
    places=st.integers(0, 3 * CHUNK) | st.integers(CHUNK * CHUNK - 2, CHUNK * CHUNK + CHUNK + 2),
    decay=st.sampled_from(DECAYS) | st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_any_width_and_decay(rows: int, places: int, decay: float, seed: int) -> None:
    x_BT = torch.randn(rows, places, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    before = x_BT.clone()
    result = reverse_scan(x_BT, decay)
    assert result.shape == x_BT.shape and result.dtype == torch.float64
    torch.testing.assert_close(result, recursion(x_BT, decay), rtol=0, atol=1e-9)
    assert torch.equal(x_BT, before), "the rows given are left as they were"


def test_long_rows_are_accurate() -> None:
    """Noise, a steady sum, one reward at the end, and terms that cancel: where plain float32 sums drift."""
    places = 131072
    generator = torch.Generator().manual_seed(0)
    levels = torch.randn(places + 1, generator=generator)
    last = torch.zeros(places)
    last[-1] = 1.0
    x_BT = torch.stack([torch.randn(places, generator=generator), torch.full((places,), 0.1), last, levels.diff()])
    for decay in (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 1.0):
        expected = recursion(x_BT, decay)
        assert error(reverse_scan(x_BT, decay), expected) < 2e-6
        assert error(reverse_scan(x_BT.double(), decay), expected) < 1e-12
        assert error(reverse_scan(x_BT.double(), decay, dtype=torch.float32), expected) < 2e-6


def test_what_is_far_away_is_forgotten_and_never_overflows() -> None:
    x_BT = torch.zeros(1, 100_000)
    x_BT[0, -1] = 1e30
    assert bool(reverse_scan(x_BT, 0.3).isfinite().all())
    assert reverse_scan(x_BT, 0.3)[0, 0] == 0
    assert reverse_scan(x_BT, 1.0)[0, 0] == x_BT[0, -1]


def test_rows_do_not_see_each_other() -> None:
    x_BT = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    spoilt = x_BT.clone()
    spoilt[1, 250] = torch.nan
    result, expected = reverse_scan(spoilt, 0.9), reverse_scan(x_BT, 0.9)
    torch.testing.assert_close(result[[0, 2]], expected[[0, 2]])
    assert bool(result[1, :251].isnan().all())


def test_narrow_types_give_float32_and_no_gradient() -> None:
    x_BT = torch.ones(1, 300, dtype=torch.bfloat16, requires_grad=True)
    result = reverse_scan(x_BT, 1.0)
    assert result.dtype == torch.float32 and not result.requires_grad
    assert result[0].tolist() == [float(300 - place) for place in range(300)]


def test_a_width_of_whole_chunks() -> None:
    assert [whole_chunks(places) for places in (0, 1, CHUNK, CHUNK + 1)] == [0, CHUNK, CHUNK, 2 * CHUNK]


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_decay_that_makes_no_sense_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match="decay"):
        reverse_scan(torch.zeros(1, 3), decay)
