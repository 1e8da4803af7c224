"""Hidden states that a request asks for, kept until its answer is handed out."""

from __future__ import annotations

from collections.abc import Mapping

from unison.core.records import GenerationRequest, HiddenRows


class TapRows:
    """Rows of consecutive positions from ``first_position`` on, for each tap the same ones.

    They outlive the keys and values: what was pushed back and is computed again keeps its rows.
    """

    def __init__(self, names: tuple[str, ...], *, first_position: int, size: int, dtype: str) -> None:
        self.names = names
        self.first_position = first_position
        self.num_rows = 0
        self.is_closed = False
        """Whether no further row is asked for."""
        self.is_broken = False
        """Whether a row that was kept holds NaN or infinity."""
        self._size = size
        self._dtype = dtype
        self._data: dict[str, bytearray] = {name: bytearray() for name in names}

    @property
    def next_position(self) -> int:
        return self.first_position + self.num_rows

    def missing(self, start: int, count: int) -> range:
        """Those of the positions [start, start + count) that are asked for and not kept yet."""
        first = max(start, self.next_position)
        return range(first, first if self.is_closed else max(first, start + count))

    def keep(self, rows: Mapping[str, bytes], num_rows: int, *, is_finite: bool) -> None:
        """Take the rows of the next ``num_rows`` positions."""
        for name in self.names:
            self._data[name] += rows[name]
        self.num_rows += num_rows
        self.is_broken |= not is_finite

    def states(self) -> dict[str, HiddenRows]:
        return {
            name: HiddenRows(
                first_position=self.first_position,
                num_rows=self.num_rows,
                size=self._size,
                dtype=self._dtype,
                data=bytes(data),
            )
            for name, data in self._data.items()
        }


def make_tap_rows(request: GenerationRequest, *, size: int, dtype: str) -> TapRows | None:
    """A place for the rows that a request asks for; None where it asks for none. dtype: as torch prints it."""
    sampling = request.sampling
    if not sampling.taps:
        return None
    drawing = len(request.prompt_ids) + len(request.output_ids) - 1
    first = drawing if sampling.taps_from is None else sampling.taps_from
    return TapRows(tuple(sampling.taps), first_position=first, size=size, dtype=dtype.removeprefix("torch."))
