from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import pytest

from unison.core.errors import ConfigError
from unison.evaluation.pass_at_k import pass_at_k


@pytest.mark.parametrize("n", range(1, 9))
def test_it_is_the_share_of_the_k_subsets_that_hold_a_pass(n: int) -> None:
    for passed in range(n + 1):
        outcomes = [i < passed for i in range(n)]
        for k in range(1, n + 1):
            subsets = [any(chosen) for chosen in combinations(outcomes, k)]
            assert pass_at_k(n, passed, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


def test_known_values() -> None:
    values = [(pass_at_k(4, 1, k) + pass_at_k(4, 2, k)) / 2 for k in (1, 2, 4)]
    assert values == pytest.approx([0.375, 2 / 3, 1.0])


@pytest.mark.parametrize(("n", "passed", "k"), [(4096, 1, 2048), (4096, 4095, 4096), (4096, 3, 100), (1000, 0, 1000)])
def test_it_stays_exact_where_the_binomials_no_longer_fit_a_float(n: int, passed: int, k: int) -> None:
    exact = 1 - Fraction(math.comb(n - passed, k), math.comb(n, k))
    assert pass_at_k(n, passed, k) == pytest.approx(float(exact), rel=1e-12)


def test_it_lies_in_0_to_1_and_grows_with_k_and_with_passes() -> None:
    for passed in range(20):
        values = [pass_at_k(20, passed, k) for k in range(1, 21)]
        assert values == sorted(values) and values[0] >= 0 and values[-1] <= 1
        assert all(pass_at_k(20, passed + 1, k) >= values[k - 1] for k in range(1, 21))


@pytest.mark.parametrize("k", [0, 5, -1])
def test_a_k_that_the_samples_cannot_estimate_is_refused_by_name(k: int) -> None:
    with pytest.raises(ConfigError, match=f"pass@{k} cannot be estimated from 4 samples"):
        pass_at_k(4, 1, k)


def test_more_passes_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="5 of 4"):
        pass_at_k(4, 5, 1)
