"""Which rows rest: those that were solved too often or too rarely when they were last drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unison.core.errors import ConfigError, DataError


@dataclass(slots=True)
class _Row:
    """A row since it was last drawn: its place in the source, that epoch, and the rewards of it so far."""

    index: int
    epoch: int
    count: int = 0
    total: float = 0.0


class SuccessRate:
    """Mean rewards of rows, each over the epoch it was last drawn in.

    A row whose mean is below ``low`` or above ``high`` rests for ``rest`` epochs after that one, and is
    then drawn again. A row without rewards never rests.
    """

    def __init__(self, low: float, high: float, rest: int) -> None:
        if low > high:
            raise ConfigError(
                f"data.curriculum_low={low} is above data.curriculum_high={high}, so that every prompt would rest"
            )
        self._low, self._high, self._rest = low, high, rest
        self._rows: dict[str, _Row] = {}

    def drawn(self, row_id: str, index: int, epoch: int) -> None:
        """A row was drawn: what it had before counts no more."""
        self._rows[row_id] = _Row(index, epoch)

    def record(self, row_id: str, reward: float) -> None:
        """One reward of a row that was drawn. Raises DataError for another row, or no finite number."""
        row = self._rows.get(row_id)
        if row is None:
            raise DataError(f"a reward was recorded for the prompt {row_id!r}, which was never drawn")
        if not math.isfinite(reward):
            raise DataError(f"the reward {reward} of the prompt {row_id!r} is no finite number")
        row.count += 1
        row.total += reward

    def resting(self, epoch: int) -> set[int]:
        """Indices of the rows that an epoch leaves out."""
        return {row.index for row in self._rows.values() if epoch <= row.epoch + self._rest and self._outside(row)}

    def mean(self, row_id: str) -> float | None:
        """Mean reward since the row was last drawn; None where there is none."""
        row = self._rows.get(row_id)
        return row.total / row.count if row is not None and row.count else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": [self._low, self._high, self._rest],
            "rows": {row_id: [row.index, row.epoch, row.count, row.total] for row_id, row in self._rows.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], num_rows: int) -> None:
        """Raises DataError for a state of other settings or an impossible one; nothing is changed then."""
        ours = self.state_dict()["settings"]
        if not isinstance(state, Mapping) or set(state) != {"settings", "rows"}:
            raise DataError("the saved data position holds no state of data.curriculum")
        if state["settings"] != ours:
            raise DataError(
                f"the saved data position was made with data.curriculum_low, _high and _rest {state['settings']}, now "
                f"they are {ours}; resume with the settings of the saved run"
            )
        rows = state["rows"] if isinstance(state["rows"], Mapping) else {"": None}
        self._rows = {row_id: _read_row(row_id, value, num_rows) for row_id, value in rows.items()}

    def _outside(self, row: _Row) -> bool:
        return row.count > 0 and not self._low <= row.total / row.count <= self._high


def _read_row(row_id: str, value: Any, num_rows: int) -> _Row:
    if isinstance(value, (list, tuple)) and len(value) == 4:
        index, epoch, count, total = value
        numbers = all(type(number) is int and number >= 0 for number in (index, epoch, count))
        if numbers and index < num_rows and type(total) in (int, float) and math.isfinite(total):
            return _Row(index, epoch, count, float(total))
    raise DataError(f"the saved data position is impossible: the curriculum's row {row_id!r} is {value!r:.80}")
