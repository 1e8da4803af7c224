"""What the table of another system is made of."""

from __future__ import annotations

from collections.abc import Mapping

Entries = Mapping[str, tuple[str, str]]
"""Names of one setting, split by blanks -> (our keys, split by blanks; note)."""
