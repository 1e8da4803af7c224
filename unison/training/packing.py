"""Sequences into micro-batches by token budget."""

from __future__ import annotations

from collections.abc import Sequence

from unison.core.errors import DataError


def pack_micro_batches(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indices of ``lengths`` (tokens, 1 or more each) cut into micro-batches of at most ``budget_tokens``.

    First-fit decreasing decides how many are needed; then the sums are evened out. A sequence over the budget
    gets a micro-batch of its own. Inside one, sequences go from longest to shortest, so that those of
    similar length stand together; the micro-batches go from most to fewest tokens, so that what does not fit
    into memory shows at once. A pure function of the two arguments: ties go to the lower index.

    Raises DataError for an empty sequence or a budget below 1.
    """
    if budget_tokens < 1:
        raise DataError(f"budget_tokens={budget_tokens} holds no token; give at least 1")
    for index, length in enumerate(lengths):
        if length < 1:
            raise DataError(f"sequence {index} has length {length}; an empty sequence cannot be trained on")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    alone = [[index] for index in order if lengths[index] > budget_tokens]
    fitting = [index for index in order if lengths[index] <= budget_tokens]
    first_fit = _first_fit(fitting, lengths, budget_tokens)
    spread = _least_loaded_first(fitting, lengths, budget_tokens, len(first_fit)) or first_fit
    _even_out(spread, lengths)
    bins = [sorted(members, key=lambda index: (-lengths[index], index)) for members in alone + spread]
    return sorted(bins, key=lambda members: (-_total(members, lengths), members[0]))


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        target = next((number for number, free in enumerate(room) if free >= lengths[index]), None)
        if target is None:
            target = len(bins)
            bins.append([])
            room.append(budget_tokens)
        bins[target].append(index)
        room[target] -= lengths[index]
    return bins


def _least_loaded_first(
    order: Sequence[int], lengths: Sequence[int], budget_tokens: int, num_bins: int
) -> list[list[int]] | None:
    """Each sequence, longest first, into the emptiest bin; None where that needs more bins than given."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for index in order:
        target = min(range(num_bins), key=lambda number: (loads[number], number))
        if loads[target] + lengths[index] > budget_tokens:
            return None
        bins[target].append(index)
        loads[target] += lengths[index]
    return bins


def _even_out(bins: list[list[int]], lengths: Sequence[int]) -> None:
    """Move single sequences from the fullest bin to the emptiest while that lowers the larger of the two.

    Each move lowers the sum of squared loads, so it ends; afterwards the two differ by at most the shortest
    sequence of any fullest bin.
    """
    loads = [_total(members, lengths) for members in bins]
    while bins:
        most, empty = max(loads), min(range(len(bins)), key=lambda number: (loads[number], number))
        gap = most - loads[empty]
        movable = [
            (abs(gap - 2 * lengths[index]), index, number)
            for number, members in enumerate(bins)
            if loads[number] == most
            for index in members
            if lengths[index] < gap
        ]
        if not movable:
            return
        _, best, full = min(movable)
        bins[full].remove(best)
        bins[empty].append(best)
        loads[full] -= lengths[best]
        loads[empty] += lengths[best]


def _total(members: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in members)
