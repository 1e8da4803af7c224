"""What all sections of the configuration are made of."""

from __future__ import annotations

from typing import Literal

import msgspec

Options = dict[str, int | float | str | bool]
Schedule = Literal["constant", "linear", "cosine"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, keywords only, unknown keys refused."""
