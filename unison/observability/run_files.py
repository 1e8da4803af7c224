"""Files of a run folder that survive a kill at any moment: replaced whole, or grown line by line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from unison.core.errors import ConfigError

LOCK: Final = ".lock"


def write_whole(path: Path, data: bytes) -> None:
    """Replace the file in one move: a reader, or a kill, meets the old file or the new one."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_new(path: Path, data: bytes) -> None:
    """Make a file that is whole from the moment it is there. Raises FileExistsError where there is one, and OSError."""
    part = path.with_name(f".{path.name}.part")
    try:
        write_whole(part, data)
        try:
            os.link(part, path)
        except FileExistsError:
            raise
        except OSError:  # no hard links here: two that start at once are told apart by the lock alone
            os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def append_line(path: Path, line: bytes) -> None:
    """Append one line whole, or raise OSError with the file as it was."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        end = os.fstat(fd).st_size
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, end)
            raise
    finally:
        os.close(fd)


def keep_steps(path: Path, last_step: int) -> int:
    """Drop the lines of later steps, and what is left of a line that a kill cut short; the number dropped.

    Lines that are no JSON object with a ``step`` are dropped with them: they cannot belong to a step done.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    lines = data.split(b"\n")
    kept = [line for line in lines if line and _step_of(line) <= last_step]
    num_dropped = sum(1 for line in lines if line) - len(kept)
    if num_dropped or not data.endswith(b"\n"):
        write_whole(path, b"".join(line + b"\n" for line in kept))
    return num_dropped


def _step_of(line: bytes) -> float:
    try:
        record: Any = json.loads(line)
        step = record["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
    return step if isinstance(step, int) and not isinstance(step, bool) else float("inf")


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises ConfigError where another one holds it or it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a+b")  # noqa: SIM115 - closed below, after whoever runs in between
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot write the run folder {folder}: {reason}; choose another with --run.dir DIR"
        ) from None
    with file:
        _take(file.fileno(), folder)
        _check_same(file.fileno(), folder)
        # Who holds it is for people: a full disk must not keep a run from going on.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield


def _check_same(fd: int, folder: Path) -> None:
    """A run that did not begin removes its files, the lock among them: then ours is nobody's any more."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(fd), os.stat(folder / LOCK)):
            return
    raise ConfigError(f"the run folder {folder} was removed by another process just now; start again")


def _take(fd: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system: two runs in one folder are the user's to avoid
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        raise ConfigError(
            f"the run in {folder} is under way in process {holder or 'of another machine'}; wait for it, stop it, or "
            "choose another folder with --run.dir DIR"
        ) from None
