"""Warnings of parts that must never stop a run: one line on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeAlias

from unison.core.describe import LAYOUT, printable

Warn: TypeAlias = Callable[[str], None]


def warn_on_stderr(message: str) -> None:
    """``warning: MESSAGE`` on stderr; a closed stderr is no reason to stop either."""
    try:
        print(f"warning: {printable(message, keep=LAYOUT)}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return
