"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unison.checkpoint.disk import delete_folder
from unison.checkpoint.find import Found, scan
from unison.core.errors import ConfigError


@dataclass(frozen=True)
class Retention:
    """Checkpoints that stay: the ``keep_last`` newest, the ``keep_best`` of the highest scores (of equals the newer),
    and for good those of every ``keep_every``-th step (0: none). Raises ConfigError for what cannot be meant.
    """

    keep_last: int = 2
    keep_best: int = 0
    keep_every: int = 0

    def __post_init__(self) -> None:
        for name, low in (("keep_last", 1), ("keep_best", 0), ("keep_every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name}={value!r} must be a whole number from {low} on")


def expendable(found: Sequence[Found], retention: Retention, newest: Path) -> list[Found]:
    """Those that may go, oldest first; never ``newest``, the one just written.

    A damaged one goes when all that stay among the last are newer: until then somebody may want to look at it.
    """
    steps = [entry for entry in found if entry.step is not None]
    intact = [entry for entry in steps if entry.problem is None]
    last = intact[: retention.keep_last]
    scored = [(entry.score, entry) for entry in intact if entry.score is not None]
    # The sort is stable: of equal scores the newer stays.
    best = [entry for _, entry in sorted(scored, key=lambda pair: -pair[0])][: retention.keep_best]
    stay = {newest} | {entry.path for entry in (*last, *best)}
    # Of several saves of a step, the latest is that step's.
    latest = {entry.step: entry.path for entry in reversed(intact)}
    if retention.keep_every:
        stay |= {path for step, path in latest.items() if step is not None and step % retention.keep_every == 0}
    window = steps[: steps.index(last[-1])] if last else steps
    stay |= {entry.path for entry in window if entry.problem is not None}
    return [entry for entry in reversed(steps) if entry.path not in stay]


def apply_retention(root: Path, retention: Retention, newest: Path) -> list[str]:
    """Delete what may go, now that ``newest`` is complete and pointed to; says what was deleted or would not go."""
    notes = []
    for entry in expendable(scan(root), retention, newest):
        reason = f" (it was damaged: {entry.problem})" if entry.problem else ""
        try:
            delete_folder(entry.path)
        except FileNotFoundError:
            continue  # another process was faster
        except OSError as error:
            notes.append(f"{root.name}/{entry.path.name}: could not be deleted: {error.strerror}")
        else:
            notes.append(f"{root.name}/{entry.path.name}: deleted{reason}")
    return notes
