"""What a look at the machine found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """``fix`` says what to do, and is there whenever the status is not ok."""

    status: Status
    name: str
    text: str
    fix: str = ""
