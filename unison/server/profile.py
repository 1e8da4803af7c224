"""Profiles of the engine's steps, written under one folder and nowhere else."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from msgspec import Meta

from unison.server.control_body import Body, Empty, Refused, control
from unison.server.messages import StartProfile, StopProfile

if TYPE_CHECKING:
    from unison.server.front import Front

_PART: Final = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,99}")
_MOST_PARTS: Final = 4
_STOP_S: Final = 300.0
"""Writing a long profile takes its time."""


class ProfileBody(Body, frozen=True, kw_only=True):
    """``output_dir``: a folder below the server's ``profile_dir``; without it one by the present time."""

    INERT: ClassVar[frozenset[str]] = frozenset(("profile_prefix", "profile_id"))
    output_dir: Annotated[str, Meta(max_length=1000)] | None = None
    num_steps: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    start_step: int | None = None
    activities: list[str] | None = None
    profile_by_stage: bool = False
    with_stack: bool | None = None
    record_shapes: bool | None = None


@control(ProfileBody)
async def start_profile(front: Front, body: ProfileBody) -> dict[str, Any]:
    _check_supported(body)
    folder = profile_folder(front.config.profile_dir, body.output_dir)
    action = StartProfile(str(folder), body.num_steps, bool(body.with_stack), bool(body.record_shapes))
    result = await front.link.command(action)
    return {"success": True, "message": f"profiling into {folder}", "folder": str(folder), **result}


def _check_supported(body: ProfileBody) -> None:
    if body.start_step is not None:
        raise Refused(
            "unsupported", "start_step is not supported; start the profile when that step comes", "start_step"
        )
    if body.profile_by_stage:
        raise Refused("unsupported", "profile_by_stage is not supported; steps mix stages here", "profile_by_stage")
    other = next((name for name in body.activities or () if name != "CPU"), None)
    if other is not None:
        raise Refused("unsupported", f"activities: {other!r} is not supported; CPU is", "activities")


@control(Empty)
async def stop_profile(front: Front, body: Empty) -> dict[str, Any]:
    result = await front.link.command(StopProfile(), _STOP_S)
    return {"success": True, "message": "the profile is written", **result}


def profile_folder(root: str, name: str | None) -> Path:
    """The folder ``name`` below ``root``, whole; ``name`` may also be its absolute path.

    Raises Refused for a name that leads elsewhere: by dots, by a link, or by letters of other meaning.
    """
    top = Path(root).resolve()
    if name is None:
        return top / time.strftime("profile-%Y%m%d-%H%M%S")
    below = name
    if Path(name).is_absolute():
        if not Path(name).is_relative_to(top):
            raise _outside(name, root)
        below = str(Path(name).relative_to(top))
    parts = [part for part in below.split("/") if part]
    if len(parts) > _MOST_PARTS or not all(_PART.fullmatch(part) for part in parts):
        raise _outside(name, root)
    folder = top.joinpath(*parts)
    if folder.resolve() != folder:
        raise _outside(name, root)
    return folder


def _outside(name: str, root: str) -> Refused:
    text = (
        f"output_dir {name!r} is no folder below the server's profile_dir, {root!r}; give a plain name of letters, "
        "digits, . _ and -, or none"
    )
    return Refused("request", text, "output_dir")
