"""Named places where a test may strike a process down, to see that what is left behind can be gone on from.

``fault_point("checkpoint.after_file")`` costs one comparison unless the environment variable UNISON_FAULT arms it:

    UNISON_FAULT=NAME:PASS:ACTION[,NAME:PASS:ACTION ...]

NAME is a key of FAULT_POINTS, PASS counts from 1 within a process, and ACTION is one of

    kill            SIGKILL of this process
    stop            SIGSTOP of this process: it hangs until somebody continues or kills it
    exit            the process ends at once with code 70, without clean-up
    raise           FaultError is raised
    sleep=SECONDS   the thread sleeps

The variable is read at the first point that is passed. A process that is started inherits it and counts for itself.
"""

from __future__ import annotations

import difflib
import math
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from unison.core.errors import ConfigError, FaultError

VARIABLE: Final = "UNISON_FAULT"
EXIT_CODE: Final = 70

FAULT_POINTS: Final[dict[str, str]] = {
    "checkpoint.after_claim": "the temporary folder exists and is locked; nothing is in it",
    "checkpoint.before_file": "before a file (manifest and pointer included) is created",
    "checkpoint.within_file": "a piece of a file is written",
    "checkpoint.before_sync": "a file is written, not yet synced",
    "checkpoint.after_file": "a file is written and synced",
    "checkpoint.before_manifest": "all files but the manifest are synced",
    "checkpoint.after_manifest": "the manifest is synced",
    "checkpoint.after_folder_sync": "the temporary folder is synced",
    "checkpoint.before_rename": "before the folder gets its name",
    "checkpoint.after_rename": "the folder has its name, its parent is not synced",
    "checkpoint.before_pointer": "the new checkpoint is complete and synced; the pointer names the old one",
    "checkpoint.before_pointer_rename": "the new pointer is written beside the old one",
    "checkpoint.after_pointer_rename": "the pointer names the new checkpoint, not synced",
    "checkpoint.after_pointer": "the pointer is synced; nothing is deleted yet",
    "checkpoint.before_delete": "before an expendable checkpoint loses its name",
    "checkpoint.after_delete_rename": "it has lost its name, its files are all there",
    "checkpoint.within_delete": "one of its files is gone",
    "checkpoint.after_delete": "it is gone",
    "checkpoint.before_sweep": "before something left by a dead save is removed",
    "checkpoint.after_sweep": "it is removed",
    "loop.sample": "a sample of the rollout has ended",
    "loop.scored": "samples are scored",
    "loop.micro_batch": "a micro-batch of the training step is done",
    "loop.updated": "the weights are those of the next step, of which nothing is written",
    "loop.samples_written": "the step's samples are kept, its ledger entry is not",
    "loop.recorded": "the step is in the ledger, not yet logged",
    "server.engine_step": "the engine process is about to take a step",
    "server.staged": "a piece of a weight update is staged",
    "server.prepared": "a weight update is complete and checked, not committed",
    "server.committed": "a weight update is committed, the front end has not heard of it",
    "loop.concluded": "the step is logged, and a save has begun if it was due",
}
"""Every fault point there is -> the moment it stands for. A point is added here before it is used."""


@dataclass(frozen=True)
class Fault:
    """What happens at the ``at_pass``-th passing (from 1) of the point ``name``."""

    name: str
    at_pass: int
    action: str
    sleep_s: float = 0.0


_OFF: Final[tuple[Fault, ...]] = ()
_armed: tuple[Fault, ...] | None = None
"""None: the environment has not been read yet."""
_passes: Counter[str] = Counter()
_lock = threading.Lock()


def fault_point(name: str) -> None:
    """Pass the point ``name``; does nothing unless a fault is armed.

    Raises FaultError where the armed action is ``raise``, ConfigError for an environment variable that cannot be meant.
    """
    if _armed is not _OFF:
        _pass(name)


def arm_faults(text: str | None) -> None:
    """Arm the faults of ``text`` (the form of the variable) in place of all others, and count from 0 again.

    None or an empty text disarms. Raises ConfigError for a malformed text or an unknown point.
    """
    global _armed
    faults = tuple(_parse(part) for part in text.split(",")) if text else _OFF
    with _lock:
        _passes.clear()
        _armed = faults


def _pass(name: str) -> None:
    if _armed is None:
        arm_faults(os.environ.get(VARIABLE))
    if name not in FAULT_POINTS:
        raise ConfigError(f"fault point {name!r} is not in unison.core.faults.FAULT_POINTS; add it there")
    with _lock:
        _passes[name] += 1
        due = [fault for fault in _armed or () if fault.name == name and fault.at_pass == _passes[name]]
    for fault in due:
        _strike(fault)


def _strike(fault: Fault) -> None:
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            # To this thread: sent to the process, it may be another that takes it, while this one runs on for a while.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "exit":
            os._exit(EXIT_CODE)
        case "sleep":
            time.sleep(fault.sleep_s)
        case _:
            raise FaultError(f"{VARIABLE} asked for an error at pass {fault.at_pass} of {fault.name}")


def _parse(text: str) -> Fault:
    fields = text.strip().split(":")
    if len(fields) != 3:
        raise _malformed(text, "write NAME:PASS:ACTION")
    name, at_pass, action = fields
    if name not in FAULT_POINTS:
        near = difflib.get_close_matches(name, FAULT_POINTS, n=1)
        raise _malformed(text, f"there is no point {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if not (at_pass.isascii() and at_pass.isdecimal() and len(at_pass) < 10 and int(at_pass) >= 1):
        raise _malformed(text, f"the pass {at_pass!r} must be a whole number from 1 on")
    kind, equals, value = action.partition("=")
    if kind == "sleep":
        return Fault(name, int(at_pass), kind, _seconds(text, value))
    if equals or kind not in ("kill", "stop", "exit", "raise"):
        raise _malformed(text, f"the action {action!r} must be kill, stop, exit, raise or sleep=SECONDS")
    return Fault(name, int(at_pass), kind)


def _seconds(text: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise _malformed(text, f"{value!r} is no number of seconds")
    return seconds


def _malformed(text: str, reason: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}={text!r}: {reason}")
