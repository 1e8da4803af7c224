"""How much to pad so that PyTorch's kernels take the same path for every batch: the numerics path.

GEMM kernels choose another summation order for 1, 2 or 3 rows, and split ragged row counts over
threads; so rows come in multiples of 8. Attention kernels split the keys in blocks and treat the
tail apart; so keys come in a few fixed lengths counted from position 0, and in multiples of 512
beyond. 256 is not among them: in float32 it changes the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unison.core.errors import NumericsError


@dataclass(frozen=True, slots=True)
class NumericsPath:
    """A padding rule shared by rollout and training. Same path, same bits."""

    name: Literal["exact", "fast"]
    row_multiple: int
    query_multiple: int
    key_rungs: tuple[int, ...]
    key_multiple: int

    def pad_rows(self, num_rows: int) -> int:
        """Rows of a packed batch, padding included."""
        return _round_up(num_rows, self.row_multiple)

    def pad_queries(self, num_queries: int) -> int:
        """Query rows of one attention call, padding included."""
        return _round_up(num_queries, self.query_multiple)

    def pad_keys(self, num_keys: int) -> int:
        """Keys read by one attention call, padding included."""
        for rung in self.key_rungs:
            if num_keys <= rung:
                return rung
        return _round_up(num_keys, self.key_multiple)


EXACT = NumericsPath("exact", row_multiple=8, query_multiple=4, key_rungs=(32, 64, 96, 128, 384), key_multiple=512)
FAST = NumericsPath("fast", row_multiple=1, query_multiple=1, key_rungs=(), key_multiple=1)
PATHS = {path.name: path for path in (EXACT, FAST)}


def numerics_path(name: str) -> NumericsPath:
    """The path called ``name``. Raises NumericsError for a name that is none."""
    if name not in PATHS:
        raise NumericsError(f"numerics={name!r} is unknown; use one of {', '.join(PATHS)}")
    return PATHS[name]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
