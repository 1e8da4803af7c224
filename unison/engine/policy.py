"""In which order waiting sequences are looked at for admission.

fcfs            first come first served
longest_prefix  those with most of their tokens in the prefix cache first
priority        higher ``GenerationRequest.priority`` first, then first come first served

Under every policy a sequence that was pushed back comes first, for others wait on what it holds; and
one that was passed over MAX_PASSED_OVER times comes next, so that nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from unison.engine.sequence import Sequence

Policy = Literal["fcfs", "longest_prefix", "priority"]

MAX_PASSED_OVER = 64
MAX_MATCHED = 128
"""With more sequences waiting, looking each up costs more than it brings: they are taken as they come."""


def admission_order(
    waiting: Iterable[Sequence], policy: Policy, num_cached: Callable[[Sequence], int]
) -> list[Sequence]:
    """The waiting sequences, given in order of arrival, in the order of the policy (stable)."""
    sequences = list(waiting)
    if policy == "fcfs":
        return sequences
    if policy == "longest_prefix" and len(sequences) > MAX_MATCHED:
        return sequences

    def rank(sequence: Sequence) -> tuple[int, int]:
        if sequence.num_retractions:
            return 0, 0
        if sequence.num_passed_over >= MAX_PASSED_OVER:
            return 1, 0
        return 2, -(sequence.request.priority if policy == "priority" else num_cached(sequence))

    return sorted(sequences, key=rank)
