"""How much to pad so that PyTorch's kernels take the same path for every batch: the numerics path.

GEMM kernels choose another summation order for 1, 2 or 3 rows, and split ragged row counts over
threads; so rows come in multiples of 8. Some choose by larger numbers too: to them rows are given in blocks (see
``isa``). What attention multiplies comes in blocks of keys (see ``blocks``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from unison.core.errors import NumericsError
from unison.ops.blocks import KEY_BLOCK
from unison.ops.isa import rows_at_once

_SMALL_PRODUCT = 16**3
"""Multiplications up to which PyTorch keeps a bfloat16 product from its faster kernel."""


@dataclass(frozen=True, slots=True)
class NumericsPath:
    """A padding rule shared by rollout and training. Same path, same bits."""

    name: Literal["exact", "fast"]
    row_multiple: int

    def pad_rows(self, num_rows: int) -> int:
        """Rows of a packed batch, padding included."""
        return _round_up(num_rows, self.row_multiple)

    def rows_at_once(self, dtype: torch.dtype) -> int | None:
        """Most rows of one product with a weight; None for any number."""
        return None if self.name == "fast" else rows_at_once(dtype)

    def pad_product_rows(self, num_rows: int, dtype: torch.dtype, head_dim: int) -> int:
        """Rows of one matrix that is multiplied with the keys or values of a block, padding included."""
        if self.name == "fast":
            return num_rows
        # With so few terms bfloat16 kernels treat all row counts but 1 alike, once a call is large enough for them.
        least = max(2, _SMALL_PRODUCT // (KEY_BLOCK * head_dim) + 1)
        return max(least, num_rows) if dtype == torch.bfloat16 else _round_up(num_rows, self.row_multiple)

    def pad_keys(self, num_keys: int) -> int:
        """Keys that attention reads where a query sees num_keys."""
        return _round_up(num_keys, KEY_BLOCK)


EXACT = NumericsPath("exact", row_multiple=8)
FAST = NumericsPath("fast", row_multiple=1)
PATHS = {path.name: path for path in (EXACT, FAST)}


def numerics_path(name: str) -> NumericsPath:
    """The path called ``name``. Raises NumericsError for a name that is none."""
    if name not in PATHS:
        raise NumericsError(f"numerics={name!r} is unknown; use one of {', '.join(PATHS)}")
    return PATHS[name]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
