"""Names of weight versions: integers inside, whatever text the trainer gave outside."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_MAX_KEPT: Final = 4096
DEFAULT_LABEL: Final = "default"


class Versions:
    """Labels by version. A version that nobody named is known by its number; the first one is ``default``."""

    def __init__(self, version: int = 0, label: str | None = None) -> None:
        self._labels: OrderedDict[int, str] = OrderedDict()
        self.name(version, DEFAULT_LABEL if label is None else label)

    def name(self, version: int, label: str | None) -> str:
        """Give a version its label, from now on; old ones are forgotten after thousands."""
        text = str(version) if label is None else label
        self._labels[version] = text
        while len(self._labels) > _MAX_KEPT:
            self._labels.popitem(last=False)
        return text

    def forget(self, version: int) -> None:
        """Of a version that never came to be."""
        self._labels.pop(version, None)

    def label(self, version: int) -> str:
        return self._labels.get(version, str(version))
