from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from unison.checks.exactness import AXES
from unison.checks.pairs import all_pairs


@pytest.mark.parametrize(
    "axes",
    [AXES, {"a": (1, 2, 3, 4), "b": (1, 2, 3, 4), "c": (1, 2, 3, 4)}, {"a": (1, 2), "b": (True, False)}],
    ids=["exactness", "even", "two"],
)
def test_every_pair_of_values_of_every_two_axes_occurs(axes: dict[str, Sequence[object]]) -> None:
    cells = all_pairs(axes)
    assert all(set(cell) == set(axes) for cell in cells)
    for (first, values), (second, others) in itertools.combinations(axes.items(), 2):
        found = {(cell[first], cell[second]) for cell in cells}
        assert found == set(itertools.product(values, others))
    assert cells == all_pairs(axes)


def test_cells_are_far_fewer_than_the_full_product() -> None:
    # No fewer than the product of the two longest axes.
    assert 9 <= len(all_pairs(AXES)) <= 15
