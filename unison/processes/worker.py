"""The worker's side: opens a service, answers calls one after the other, and ends with the process that started it.

The service's code runs in the main thread (so that its own signal timers work). What it prints goes to the error pipe:
the channel lies on descriptors of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import random
import resource
import sys
from collections.abc import Callable
from typing import Final, Protocol

from unison.core.describe import describe
from unison.core.errors import UnisonError
from unison.processes.faults import OutOfMemoryError
from unison.processes.parent import end_with
from unison.processes.protocol import (
    MAX_CALL_BYTES,
    MAX_REPLY_BYTES,
    PREFIX,
    Answer,
    Call,
    NotStarted,
    Raised,
    Ready,
    Reply,
    Setup,
    frame,
    read_call,
)

_MAX_REASON_CHARS: Final = 2000
_PR_SET_CHILD_SUBREAPER: Final = 36
_MIN_CHANNEL_FD: Final = 3


class Service(Protocol):
    """What a pool's target opens: it answers payloads, and describes itself once."""

    description: bytes

    def __call__(self, payload: bytes) -> bytes: ...


class Channel:
    """Frames to and from the pool, on descriptors moved away from stdin and stdout."""

    def __init__(self) -> None:
        self._source = os.dup(0)
        self._sink = os.dup(1)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.dup2(2, 1)
        os.close(nowhere)
        self._owner = os.getpid()

    def read(self) -> Setup | Call | None:
        """The next frame; None when the other side is gone."""
        prefix = self._read(PREFIX.size)
        if len(prefix) < PREFIX.size:
            return None
        (size,) = PREFIX.unpack(prefix)
        if size > MAX_CALL_BYTES:
            return None
        body = self._read(size)
        return read_call(body) if len(body) == size else None

    def write(self, reply: Reply) -> None:
        if os.getpid() != self._owner:
            # The service's code forked and its child came back here: the channel is not the child's.
            os._exit(0)
        data = memoryview(frame(reply))
        while data:
            data = data[os.write(self._sink, data) :]

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            piece = os.read(self._source, min(size - len(found), 1 << 20))
            if not piece:
                break
            found += piece
        return bytes(found)


def main() -> None:
    """Serve until the pool closes the channel. ``sys.argv[1]`` is the pid of the pool's process."""
    _end_with_parent(int(sys.argv[1]))
    faulthandler.enable()
    channel = Channel()
    setup = channel.read()
    if not isinstance(setup, Setup):
        os._exit(1)
    sys.path[:] = setup.sys_path
    sys.argv[:] = [""]
    _limit(setup.memory_mb)
    try:
        service = _open(setup)
    except BaseException as error:  # whatever the user's module raised: the pool raises it there, as a typed error
        reason = str(error) if isinstance(error, UnisonError) else describe(error)
        channel.write(NotStarted(reason[:_MAX_REASON_CHARS]))
        os._exit(1)
    channel.write(Ready(service.description))
    while isinstance(call := channel.read(), Call):
        channel.write(_answer(service, call))
    # Not by falling off the end: threads and exit handlers of the service's could keep the process alive.
    os._exit(0)


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process with the pool's, and hand orphans of its children to it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not end_with(parent):
        os._exit(1)


def _limit(memory_mb: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where the system has no such limit (macOS), the deadline is what remains.
    with contextlib.suppress(ValueError, OSError):
        if memory_mb is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))


def _open(setup: Setup) -> Service:
    module, _, name = setup.target.partition(":")
    opener: Callable[[bytes], Service] = getattr(importlib.import_module(module), name)
    return opener(setup.argument)


def _answer(service: Service, call: Call) -> Reply:
    _seed(call.seed)
    try:
        payload = service(call.payload)
    except MemoryError as error:
        reason = str(error) if isinstance(error, OutOfMemoryError) else f"out of memory: {describe(error)}"
        return Raised(call.call_id, "memory", reason[:_MAX_REASON_CHARS])
    except BaseException as error:  # sys.exit and the like included: each becomes that call's outcome
        return Raised(call.call_id, "error", describe(error)[:_MAX_REASON_CHARS])
    if not isinstance(payload, bytes):
        return Raised(call.call_id, "error", f"TypeError: answered a {type(payload).__name__} in place of bytes")
    if len(payload) > MAX_REPLY_BYTES - (1 << 10):
        return Raised(call.call_id, "error", f"answered {len(payload)} bytes; at most {MAX_REPLY_BYTES} are taken")
    return Answer(call.call_id, payload)


def _seed(seed: int) -> None:
    """The same draws for the same call, whichever worker it comes to and whatever ran there before."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & 0xFFFFFFFF)
