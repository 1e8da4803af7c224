from __future__ import annotations

import math

import pytest

from unison.algorithms.kl_control import doubling, proportional
from unison.core.errors import ConfigError


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.1, 0.2), (0.11, 0.2 * (1 + 0.1 * 256 / 10_000)), (0.09, 0.2 * (1 - 0.1 * 256 / 10_000)), (0.0, 0.2 * 0.99488)],
)
def test_the_coefficient_follows_the_error_in_proportion(kl: float, expected: float) -> None:
    assert math.isclose(proportional(0.2, kl, target=0.1, num_samples=256, horizon=10_000), expected, rel_tol=1e-12)


@pytest.mark.parametrize("kl", [0.12, 0.5, 1e9, math.inf])
def test_an_error_counts_for_a_fifth_at_most(kl: float) -> None:
    assert math.isclose(proportional(1.0, kl, target=0.1, num_samples=100, horizon=1000), 1.02)
    assert math.isclose(proportional(1.0, -kl, target=0.1, num_samples=100, horizon=1000), 0.98)


def test_over_the_horizon_a_steady_error_compounds() -> None:
    coef = 1.0
    for _ in range(100):
        coef = proportional(coef, 1.0, target=0.1, num_samples=10, horizon=1000)
    assert math.isclose(coef, 1.002**100)


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.0, 0.5), (0.0199, 0.5), (0.0201, 1), (0.03, 1), (0.0449, 1), (0.0451, 2), (math.inf, 2)]
)
def test_the_coefficient_doubles_above_the_band_and_halves_below(kl: float, factor: float) -> None:
    assert doubling(0.3, kl, target=0.03) == 0.3 * factor


def test_a_kl_that_is_no_number_changes_nothing() -> None:
    assert proportional(0.3, math.nan, target=0.1, num_samples=8, horizon=1000) == 0.3
    assert doubling(0.3, math.nan, target=0.1) == 0.3


def test_a_coefficient_of_zero_stays_off() -> None:
    assert proportional(0.0, 1.0, target=0.1, num_samples=8, horizon=1000) == doubling(0.0, 1.0, target=0.1) == 0.0


@pytest.mark.parametrize("target", [0.0, -0.1, math.nan, math.inf])
def test_a_target_that_cannot_be_met_is_refused(target: float) -> None:
    with pytest.raises(ConfigError, match=f"kl_target={target}"):
        proportional(0.1, 0.1, target=target, num_samples=8, horizon=1000)
    with pytest.raises(ConfigError, match=f"kl_target={target}"):
        doubling(0.1, 0.1, target=target)


@pytest.mark.parametrize(("num_samples", "horizon"), [(8, 0), (8, -5), (5000, 1000), (0, 0)])
def test_a_horizon_that_could_end_the_penalty_in_one_step_is_refused(num_samples: int, horizon: int) -> None:
    with pytest.raises(ConfigError, match=f"kl_horizon={horizon} with {num_samples} samples"):
        proportional(0.1, 0.1, target=0.1, num_samples=num_samples, horizon=horizon)
