"""How the tensors of a flat buffer get to their places: worked out once for a layout, used by each update.

Everything that can be wrong with a layout is refused here, before the first byte is written.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from unison.core.errors import WeightUpdateError
from unison.models.names import canonical_name
from unison.weights.arena import DTYPE_NAMES, ArenaLayout
from unison.weights.manifest import DTYPES, BufferLayout, TensorEntry

_MAX_ENTRIES: Final = 1 << 17
"""Bound of what a LayoutBook keeps, counted in tensors of all layouts: many small layouts, or few large ones."""


@dataclass(frozen=True, slots=True)
class Run:
    """``num_bytes`` bytes from ``source`` of the buffer on belong at ``destination`` of the arena."""

    source: int
    destination: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor of the buffer, and the published tensor of the model that it is."""

    entry: TensorEntry
    target: str


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What staging a buffer does. Dtypes are the model's in ``same``, others in ``casts``.

    ``runs`` are the moves of ``same`` in as few pieces as there are between arena and buffer.
    ``twins`` write nothing: they must equal a tied tensor, of this buffer or (None) of one that is staged already.
    """

    names: frozenset[str]
    same: tuple[Move, ...]
    casts: tuple[Move, ...]
    twins: tuple[tuple[Move, Move | None], ...]
    runs: tuple[Run, ...]
    span: int | None
    """Where in the arena the whole buffer may be received as it is; None where it may not."""


def make_plan(layout: BufferLayout, arena: ArenaLayout, staged: frozenset[str] = frozenset()) -> CopyPlan:
    """The plan of a layout, given the tied tensors that are ``staged`` already.

    Raises WeightUpdateError where a tensor has no place in the model, another shape, a dtype that is no float, comes
    twice, or does not lie in the buffer by itself.
    """
    _check_places(layout)
    first: dict[str, Move] = {}
    twins: list[tuple[Move, Move | None]] = []
    for entry in layout.entries:
        move = Move(entry, canonical_name(arena.spec, entry.name))
        _check_tensor(move, arena)
        if move.target in staged:
            twins.append((move, None))
        elif move.target in first:
            twins.append((move, first[move.target]))
        else:
            first[move.target] = move
    own = DTYPE_NAMES[arena.dtype]
    same = tuple(move for move in first.values() if move.entry.dtype == own)
    casts = tuple(move for move in first.values() if move.entry.dtype != own)
    runs = _runs(same, arena)
    span = None if casts or twins else _span(runs, layout, same, arena)
    return CopyPlan(frozenset(entry.name for entry in layout.entries), same, casts, tuple(twins), runs, span)


def _check_places(layout: BufferLayout) -> None:
    if not layout.entries:
        raise WeightUpdateError("the layout names no tensor")
    seen: set[str] = set()
    for entry in layout.entries:
        if entry.name in seen:
            raise WeightUpdateError(f"tensor {entry.name!r} was given twice")
        seen.add(entry.name)
        if entry.dtype not in DTYPES:
            raise WeightUpdateError(
                f"tensor {entry.name!r} has dtype {entry.dtype}; float32, bfloat16 or float16 is needed"
            )
        if min(entry.shape, default=0) < 0 or entry.offset < 0:
            raise WeightUpdateError(
                f"tensor {entry.name!r} cannot have shape {list(entry.shape)} at offset {entry.offset}"
            )
        if entry.offset + entry.num_bytes > layout.num_bytes:
            raise WeightUpdateError(
                f"tensor {entry.name!r} ends at byte {entry.offset + entry.num_bytes} of a buffer of {layout.num_bytes}"
            )
    ordered = sorted(layout.entries, key=lambda entry: entry.offset)
    for one, other in itertools.pairwise(ordered):
        if one.offset + one.num_bytes > other.offset:
            raise WeightUpdateError(f"tensors {one.name!r} and {other.name!r} overlap in the buffer")


def _check_tensor(move: Move, arena: ArenaLayout) -> None:
    place = arena.entries.get(move.target)
    if place is None:
        raise WeightUpdateError(f"tensor {move.entry.name!r} has no place in this model")
    if move.entry.shape != place.shape:
        raise WeightUpdateError(
            f"tensor {move.entry.name!r} has shape {list(move.entry.shape)}; {list(place.shape)} is needed"
        )


def _runs(moves: Sequence[Move], arena: ArenaLayout) -> tuple[Run, ...]:
    """Neighbours at one distance make one run. What lies between them is padding on both sides, so it may go along."""
    runs: list[Run] = []
    room_end = -1
    for move in sorted(moves, key=lambda move: move.entry.offset):
        start = arena.entries[move.target].offset
        source, size = move.entry.offset, move.entry.num_bytes
        last = runs[-1] if runs else None
        if last is not None and start == room_end and source - start == last.source - last.destination:
            runs[-1] = Run(last.source, last.destination, source + size - last.source)
        else:
            runs.append(Run(source, start, size))
        room_end = arena.room_ends[move.target]
    return tuple(runs)


def _span(runs: Sequence[Run], layout: BufferLayout, moves: Sequence[Move], arena: ArenaLayout) -> int | None:
    """A buffer that is one run can be received in place, if its end leaves the next tensor of the arena alone."""
    if len(runs) != 1 or runs[0].source:
        return None
    last = max(moves, key=lambda move: move.entry.offset)
    fits = runs[0].destination + layout.num_bytes <= arena.room_ends[last.target]
    return runs[0].destination if fits else None


@dataclass(slots=True)
class _Known:
    layout: BufferLayout
    plans: dict[frozenset[str], CopyPlan] = field(default_factory=dict)


class LayoutBook:
    """The layouts and plans used last. Any thread may use it."""

    def __init__(self, arena: ArenaLayout, max_entries: int = _MAX_ENTRIES) -> None:
        self._arena = arena
        self._max_entries = max_entries
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._num_entries = 0
        self._lock = threading.Lock()
        # Only these can be in a buffer although they are staged already.
        self._tied = frozenset((canonical_name(arena.spec, "lm_head.weight"),) * arena.spec.tied_embeddings)

    def register(self, layout: BufferLayout) -> str:
        """Keep a layout under its id, which is returned. Raises WeightUpdateError where it is refused."""
        self.plan(layout)
        return layout.layout_id

    def find(self, layout_id: str) -> BufferLayout:
        """Raises WeightUpdateError where it was never registered, or has been pushed out by others."""
        with self._lock:
            known = self._known.get(layout_id)
            if known is None:
                raise WeightUpdateError(f"unknown layout {layout_id!r}; register it and stage again")
            self._known.move_to_end(layout_id)
            return known.layout

    def plan(self, layout: BufferLayout, staged: Set[str] = frozenset()) -> CopyPlan:
        """The plan of a layout in an update in which ``staged`` (names that tensors are kept under) came already."""
        tied = frozenset(self._tied & staged)
        with self._lock:
            known = self._known.get(layout.layout_id)
            if known is None:
                known = _Known(layout, {tied: make_plan(layout, self._arena, tied)})
                self._known[layout.layout_id] = known
                self._num_entries += len(layout.entries)
                self._make_room()
            elif tied not in known.plans:
                known.plans[tied] = make_plan(known.layout, self._arena, tied)
            self._known.move_to_end(layout.layout_id)
            return known.plans[tied]

    def _make_room(self) -> None:
        while self._num_entries > self._max_entries and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._num_entries -= len(oldest.layout.entries)
