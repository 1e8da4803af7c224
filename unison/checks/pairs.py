"""All pairs of axis values in few cells."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def all_pairs(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cells (one value per axis) that together hold every pair of values of every two axes.

    Greedy and deterministic: each cell is the one of the full product that covers most pairs still open.
    """
    names = list(axes)
    product = [dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())]
    open_pairs = {pair for cell in product for pair in _pairs(cell)}
    cells = []
    while open_pairs:
        best = max(product, key=lambda cell: len(open_pairs & _pairs(cell)))
        cells.append(best)
        open_pairs -= _pairs(best)
    return cells


def _pairs(cell: Mapping[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(cell.items(), 2))
