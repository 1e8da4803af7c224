"""The blocks of keys that attention sums over, and the order in which it adds them up.

A block holds the keys of positions [64 i, 64 (i + 1)) of one sequence. What is computed for a query
inside a block depends on the query and the block alone; across blocks, sums go in a tree whose shape
depends on the block's number alone. So a sum comes out the same whether the blocks were multiplied one
by one, together, in other company, or by another part of the program.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

KEY_BLOCK = 64
"""Keys in a block. Matrix products of so few terms add them in one order, whatever else is multiplied along."""
_FAN_IN = 8


def num_blocks(num_keys: int) -> int:
    """Blocks that hold ``num_keys`` keys."""
    return -(-num_keys // KEY_BLOCK)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def sum_in_order(parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Sum of block results given in order: eight neighbours one after the other, then eight such sums, and so on.

    Equal to ``sum_stacked`` to the bit. Raises ValueError where there are no parts.
    """
    sums: list[Tensor] = []
    counts: list[int] = []
    for part in parts:
        level, carried = 0, part
        while True:
            if level == len(sums):
                sums.append(carried.to(dtype, copy=True))
                counts.append(1)
            elif counts[level] == 0:
                sums[level] = carried.to(dtype, copy=True)
                counts[level] = 1
            else:
                sums[level].add_(carried)
                counts[level] += 1
            if counts[level] < _FAN_IN:
                break
            counts[level], carried, level = 0, sums[level], level + 1
    if not sums:
        raise ValueError("there is nothing to sum")
    total: Tensor | None = None
    for held, count in zip(sums, counts, strict=True):
        if count:
            total = held if total is None else held.add_(total)
    assert total is not None  # the last part ended in some level
    return total


def sum_stacked(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the first dimension in the tree of ``sum_in_order``; zeros at its end change nothing."""
    while True:
        count = parts.shape[0]
        if count > _FAN_IN:
            padding = -count % _FAN_IN
            if padding:
                parts = F.pad(parts, (*(0,) * (2 * parts.dim() - 1), padding))
            parts = parts.view(-1, _FAN_IN, *parts.shape[1:]).transpose(0, 1)
        total = parts[0].to(dtype, copy=True)
        for part in parts[1:]:
            total.add_(part)
        if count <= _FAN_IN:
            return total
        parts = total
