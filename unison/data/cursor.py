"""The order in which prompts are drawn, and the place reached in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from unison.core.errors import DataError
from unison.core.seeds import derive_seed
from unison.data.curriculum import SuccessRate
from unison.data.fingerprint import source_digest
from unison.data.source import PromptRow, PromptSource
from unison.observability.warn import Warn, warn_on_stderr


class Cursor(Protocol):
    """What the training loop draws from. Its state is plain JSON data."""

    @property
    def epoch(self) -> int:
        """The epoch of the row drawn next."""
        ...

    def next_batch(self, n: int) -> list[tuple[PromptRow, int]]:
        """The next ``n`` rows, each with its epoch (from 0)."""
        ...

    def record(self, row_id: str, reward: float) -> None:
        """Tell of one reward of a row that was drawn; without a curriculum it has no effect."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place. Raises DataError where it was saved over other data or settings."""
        ...


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

    Each epoch is a permutation derived from (seed, epoch), or the source's own order; with a curriculum,
    less the rows that rest when the epoch's first row is drawn. Nothing is dropped and nothing repeated
    within an epoch, so a resumed cursor goes on exactly where the saved one stood. ``order_of``
    (epoch -> order) replaces the permutations. Where every row rests, ``warn`` is told, and all are tried.
    """

    def __init__(
        self,
        source: PromptSource,
        seed: int,
        shuffle: bool,
        *,
        order_of: Callable[[int], Sequence[int]] | None = None,
        curriculum: SuccessRate | None = None,
        warn: Warn = warn_on_stderr,
    ) -> None:
        if len(source) == 0:
            raise DataError("there are no prompts to draw")
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._order_of = order_of or self._default_order
        self._curriculum = curriculum
        self._warn = warn
        self._resting: set[int] = set()
        self._epoch = 0
        self._position = 0
        self._order: Sequence[int] = self._order_of(0)

    @property
    def epoch(self) -> int:
        """The epoch of the row drawn next."""
        return self._epoch + (self._position == len(self._order))

    @property
    def num_resting(self) -> int:
        """Rows that the present epoch leaves out."""
        return len(self._resting)

    def next_batch(self, n: int) -> list[tuple[PromptRow, int]]:
        """The next ``n`` rows, each with its epoch (from 0)."""
        if n < 1:
            raise ValueError(f"next_batch({n}): at least one row must be drawn")
        return [self._next() for _ in range(n)]

    def record(self, row_id: str, reward: float) -> None:
        """Tell of one reward of a row, counted for the epoch it was last drawn in; see ``SuccessRate.record``."""
        if self._curriculum is not None:
            self._curriculum.record(row_id, reward)

    def state_dict(self) -> dict[str, Any]:
        """The place reached, as plain data. Orders are derived anew, so it stays small."""
        return {
            **self._identity(),
            "epoch": self._epoch,
            "position": self._position,
            "resting": sorted(self._resting),
            "curriculum": None if self._curriculum is None else self._curriculum.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place. Raises DataError where it was saved over other data or settings."""
        names = set(self.state_dict())
        if set(state) != names:
            raise DataError(f"the saved data position has the keys {sorted(state)}; expected {sorted(names)}")
        check_identity(state, self._identity())
        epoch, position, resting = state["epoch"], state["position"], state["resting"]
        if not _is_count(epoch) or not _is_count(position) or not self._may_rest(resting):
            raise _impossible(state)
        order = self._without(epoch, set(resting))
        if not order or position > len(order) or (state["curriculum"] is None) != (self._curriculum is None):
            raise _impossible(state)
        if self._curriculum is not None:
            self._curriculum.load_state_dict(state["curriculum"], len(self._source))
        self._epoch, self._position, self._resting, self._order = epoch, position, set(resting), order

    def _next(self) -> tuple[PromptRow, int]:
        if self._position == len(self._order):
            # Only now, not when the last row was drawn: rewards that came in between count.
            self._begin(self._epoch + 1)
        index = self._order[self._position]
        row = self._source[index]
        self._position += 1
        if self._curriculum is not None:
            self._curriculum.drawn(row.row_id, index, self._epoch)
        return row, self._epoch

    def _begin(self, epoch: int) -> None:
        resting = self._curriculum.resting(epoch) if self._curriculum is not None else set()
        if len(resting) == len(self._source):
            self._warn(
                f"all {len(resting)} prompts rest in epoch {epoch}: each was solved too often or too rarely "
                "(data.curriculum_low, data.curriculum_high); all of them are tried again"
            )
            resting = set()
        self._epoch, self._position, self._resting = epoch, 0, resting
        self._order = self._without(epoch, resting)

    def _without(self, epoch: int, resting: set[int]) -> Sequence[int]:
        order = self._order_of(epoch)
        return [index for index in order if index not in resting] if resting else order

    def _may_rest(self, resting: Any) -> bool:
        count = len(self._source)
        if not isinstance(resting, list) or (resting and self._curriculum is None):
            return False
        return all(_is_count(index) and index < count for index in resting) and len(set(resting)) == len(resting)

    def _default_order(self, epoch: int) -> Sequence[int]:
        count = len(self._source)
        return permutation(count, derive_seed(self._seed, "epoch", epoch)) if self._shuffle else range(count)

    def _identity(self) -> dict[str, Any]:
        return {
            "length": len(self._source),
            "digest": self._digest,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    @cached_property
    def _digest(self) -> str:
        return source_digest(self._source)


_WHAT = {"length": "{} prompts", "seed": "{} as seed", "shuffle": "{} as data.shuffle", "weights": "the parts {}"}


def check_identity(state: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise DataError where a saved position belongs to other data or settings."""
    for name, value in ours.items():
        if type(state[name]) is type(value) and state[name] == value:
            continue
        if name == "digest":
            raise DataError(
                f"the saved data position belongs to other prompts: there are {ours['length']} as then, but their "
                "texts, labels or order have changed; resume with the data of the saved run"
            )
        told = _WHAT[name]
        raise DataError(
            f"the saved data position belongs to a source with {told.format(state[name])}, this one has "
            f"{told.format(value)}; resume with the data and settings of the saved run"
        )


def _impossible(state: Mapping[str, Any]) -> DataError:
    return DataError(
        f"the saved data position (epoch {state['epoch']!r}, position {state['position']!r}, "
        f"{state['resting']!r:.40} at rest) is impossible here"
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
