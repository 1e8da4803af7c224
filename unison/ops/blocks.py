"""The blocks of keys that attention sums over, and the order in which it adds them up.

A block holds the keys of positions [64 i, 64 (i + 1)) of one sequence. What is computed for a query
inside a block depends on the query and the block alone; across blocks, sums go in a tree whose shape
depends on the block's number alone. So a sum comes out the same whether the blocks were multiplied one
by one, together, in other company, or by another part of the program.
"""

from __future__ import annotations

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


def sum_stacked(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of block results [B, blocks, X] over the blocks: eight neighbours in order, then eight such sums, and so on.

    Zeros at the end change nothing. Additions are spelt out: the order inside torch.sum depends on the shape.
    """
    while True:
        count = parts.shape[1]
        if count > _FAN_IN:
            padding = -count % _FAN_IN
            parts = F.pad(parts, (0, 0, 0, padding)) if padding else parts
            parts = parts.view(parts.shape[0], -1, _FAN_IN, parts.shape[2])
        total = parts[..., 0, :].to(dtype, copy=True)
        for i in range(1, parts.shape[-2]):
            total.add_(parts[..., i, :])
        if count <= _FAN_IN:
            return total
        parts = total


def sum_counted(sums: Tensor) -> Tensor:
    """Sum over the last dimension, one block after the other; zeros at its end change nothing."""
    return sums.cumsum(-1)[..., -1]


def softmax_weights_(scores: Tensor, maxima: Tensor) -> Tensor:
    """exp(scores - maxima), in place; 0 below e^-80, which no sum that holds the maximum's 1 can tell from 0.

    The kernel of exp is many times slower where results leave the normal range, as behind each mask.
    """
    scores.sub_(maxima).clamp_(min=-80.0).exp_()
    return torch.threshold_(scores, _LEAST_WEIGHT, 0.0)


_LEAST_WEIGHT = 2e-35
"""A little above e^-80."""
