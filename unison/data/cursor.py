"""The order in which prompts are drawn, and the place reached in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unison.core.errors import DataError
from unison.core.seeds import derive_seed
from unison.data.source import PromptRow, PromptSource


def permutation(count: int, seed: int) -> list[int]:
    """0..count-1 shuffled: a pure function of its arguments, the same on every Python version."""
    # Only random() is promised to be stable between versions, shuffle() is not.
    draw = random.Random(seed).random
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        j = int(draw() * (i + 1))
        order[i], order[j] = order[j], order[i]
    return order


class PromptCursor:
    """Draws rows epoch after epoch; batches run across the border of epochs.

    Each epoch is a permutation derived from (seed, epoch), or the source's own order. Nothing is
    dropped and nothing repeated within an epoch, so a resumed cursor goes on exactly where the
    saved one stood. ``order_of`` (epoch -> order) replaces the permutations.
    """

    def __init__(
        self,
        source: PromptSource,
        seed: int,
        shuffle: bool,
        *,
        order_of: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        if len(source) == 0:
            raise DataError("there are no prompts to draw")
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._order_of = order_of or self._default_order
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """The epoch of the row drawn next."""
        return self._epoch

    def next_batch(self, n: int) -> list[tuple[PromptRow, int]]:
        """The next ``n`` rows, each with its epoch (from 0)."""
        if n < 1:
            raise ValueError(f"next_batch({n}): at least one row must be drawn")
        return [self._next() for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        """The place reached, as plain data. Orders are derived anew, so it stays small."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "length": len(self._source),
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place. Raises DataError where it was saved over other data or settings."""
        ours = self.state_dict()
        if set(state) != set(ours):
            raise DataError(f"the saved data position has the keys {sorted(state)}; expected {sorted(ours)}")
        for name, what in (("length", "prompts"), ("seed", "as seed"), ("shuffle", "as data.shuffle")):
            if state[name] != ours[name]:
                raise DataError(
                    f"the saved data position belongs to a source with {state[name]} {what}, this one has "
                    f"{ours[name]}; resume with the data and settings of the saved run"
                )
        epoch, position = state["epoch"], state["position"]
        if not _is_count(epoch) or not _is_count(position) or position >= len(self._source):
            raise DataError(f"the saved data position (epoch {epoch!r}, position {position!r}) is impossible")
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _next(self) -> tuple[PromptRow, int]:
        row, epoch = self._source[self._order[self._position]], self._epoch
        self._position += 1
        if self._position == len(self._source):
            self._epoch, self._position = epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return row, epoch

    def _default_order(self, epoch: int) -> Sequence[int]:
        count = len(self._source)
        return permutation(count, derive_seed(self._seed, "epoch", epoch)) if self._shuffle else range(count)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
