"""What other systems call a setting, and what it is called here: one table for hints and for docs/coming_from.md.

Names stand as their users write them: dotted overrides, flags with dashes or not, fields of a configuration. A name
without a counterpart says what to do instead. The tables are in ``unison.config.systems``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final

from unison.config.systems.entries import Entries
from unison.config.systems.openrlhf import OPENRLHF
from unison.config.systems.slime import SLIME
from unison.config.systems.trl import TRL
from unison.config.systems.verl import VERL


@dataclass(frozen=True, slots=True)
class Foreign:
    """``ours`` holds dotted keys, none where there is no counterpart; ``note`` then says why, or what instead."""

    system: str
    name: str
    ours: tuple[str, ...]
    note: str

    @property
    def normalised(self) -> str:
        return normalised(self.name)


def normalised(name: str) -> str:
    """How names are compared: without leading dashes, in small letters, dashes as underscores."""
    return name.lstrip("-").lower().replace("-", "_")


SYSTEMS: Final[Mapping[str, Entries]] = {"verl": VERL, "slime": SLIME, "TRL": TRL, "OpenRLHF": OPENRLHF}

FOREIGN: Final = tuple(
    Foreign(system, name, tuple(ours.split()), note)
    for system, entries in SYSTEMS.items()
    for names, (ours, note) in entries.items()
    for name in names.split()
)


@cache
def by_name() -> Mapping[str, tuple[Foreign, ...]]:
    """Entries by normalised whole name; several where systems share a name."""
    found: dict[str, tuple[Foreign, ...]] = {}
    for entry in FOREIGN:
        found[entry.normalised] = (*found.get(entry.normalised, ()), entry)
    return MappingProxyType(found)


def find_foreign(name: str) -> tuple[Foreign, ...]:
    """What is known by exactly this name elsewhere; nothing for names of our own."""
    return by_name().get(normalised(name), ())
