"""How long answers will become: the share of their limit that admission sets aside.

Few answers use up ``max_new_tokens``. Reserving all of it leaves memory idle; reserving nothing
pushes sequences back. The share starts cautious, falls while all goes well, and rises to what was
observed when a sequence had to be pushed back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import Protocol

_LEAST_SHARE_OF_INITIAL = 0.14
_NUM_DECAY_STEPS = 600
_LOOKAHEAD_TOKENS = 20


class Answer(Protocol):
    """What the estimate looks at in a sequence."""

    max_new_tokens: int

    @property
    def num_output(self) -> int: ...


class NewTokenRatio:
    """The expected share of the remaining ``max_new_tokens``; 1 reserves everything and never retracts."""

    def __init__(self, initial: float) -> None:
        self._initial = initial
        # Reserving everything is a promise never to retract, so it is not worn down.
        self._least = initial if initial == 1 else initial * _LEAST_SHARE_OF_INITIAL
        self.value = initial

    def tokens_to_come(self, answer: Answer) -> int:
        """New tokens to set room aside for; at least one while any is allowed."""
        remaining = answer.max_new_tokens - answer.num_output
        return min(remaining, max(1, math.ceil(self.value * remaining))) if remaining > 0 else 0

    def step(self) -> None:
        """A step went by without retraction."""
        self.value = max(self._least, self.value - (self._initial - self._least) / _NUM_DECAY_STEPS)

    def retracted(self, survivors: Items[Answer]) -> None:
        """Memory ran short: expect of everybody what the survivors have produced, and a little more."""
        limit = sum(answer.max_new_tokens for answer in survivors)
        if limit:
            seen = sum(answer.num_output + _LOOKAHEAD_TOKENS for answer in survivors)
            self.value = min(1.0, max(self.value, seen / limit))

    def reset(self) -> None:
        """Nothing runs: what was learnt of one workload does not bind the next."""
        self.value = self._initial
