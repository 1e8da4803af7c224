"""``path@[a:b]``: a slice of a source's usable rows, by Python's rules."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

from unison.core.errors import ConfigError, DataError

T = TypeVar("T")

_SUFFIX: Final = re.compile(r"(.*)@\[([^\[\]]*)\]", re.DOTALL)
_BOUNDS: Final = re.compile(r"(-?[0-9]{1,18})?:(-?[0-9]{1,18})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows ``start`` to ``stop``, the latter not included; None is an open end, a negative one counts from the end."""

    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        ends = ["" if end is None else str(end) for end in (self.start, self.stop)]
        return f"[{':'.join(ends)}]"


ALL: Final = Cut()


def split_slice(name: str, key: str) -> tuple[str, Cut]:
    """The path and the slice of ``path@[a:b]``; ``key`` names the setting. Raises ConfigError for a malformed slice."""
    match = _SUFFIX.fullmatch(name)
    if match is None:
        return name, ALL
    bounds = _BOUNDS.fullmatch(match[2])
    if bounds is None or not match[1]:
        raise ConfigError(f"{key}={name!r} is no slice; it is written PATH@[START:STOP] with whole numbers or nothing")
    start, stop = (None if end is None else int(end) for end in bounds.groups())
    return match[1], Cut(start, stop)


def take(items: Iterable[T], cut: Cut, where: str) -> list[T]:
    """The items within the cut, reading no more and holding few more than these.

    Raises DataError where the slice is empty or reaches beyond the items: a slice that is quietly
    shorter than it says hides a wrong file.
    """
    begin, end = cut.start or 0, cut.stop
    if begin >= 0 and end is not None and end >= 0:
        items = islice(items, end)
    kept: deque[T] = deque(maxlen=-begin if begin < 0 else None)
    count = 0
    for item in items:
        if begin < 0 or count >= begin:
            kept.append(item)
        count += 1
    if cut == ALL:
        return list(kept)
    first = begin if begin >= 0 else count + begin
    last = count if end is None else end if end >= 0 else count + end
    if first < 0 or last < 0 or max(first, last) > count:
        raise DataError(
            f"{where} has {count} usable rows, so that the slice {cut} reaches beyond them; lower its ends, or leave "
            "one open"
        )
    if last <= first:
        raise DataError(f"{where} has no row in the slice {cut}; correct it")
    return list(islice(kept, last - first))
