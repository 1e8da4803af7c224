"""One engine process: started with a channel to it, and buried with the reason of its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import unison
from unison.processes.channel import AsyncChannel
from unison.server.messages import Setup, ToFrontEnd

_BOOT: Final = "import sys; sys.path.append(sys.argv.pop()); from unison.server.engine_process import main; main()"
_PACKAGE_ROOT: Final = str(Path(unison.__file__).resolve().parents[1])


class EngineChild:
    def __init__(self, process: subprocess.Popen[bytes], channel: AsyncChannel[ToFrontEnd]) -> None:
        self._process = process
        self._channel = channel
        self._why_killed: str | None = None

    @classmethod
    async def start(cls, setup: Setup) -> EngineChild:
        """A process that is told ``setup``, and begins to load."""
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), str(os.getpid()), _PACKAGE_ROOT],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *setup.segments),
                # A Ctrl-C in the terminal is the front end's to handle.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        child = cls(process, await AsyncChannel.open(ours, ToFrontEnd))
        child.send([setup])
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self._channel.heard_at

    def send(self, messages: list[Any]) -> None:
        self._channel.send(messages)

    async def receive(self) -> Any:
        """The next messages; None when it has ended. Raises msgspec.MsgspecError for what is none of ours."""
        return await self._channel.receive()

    def kill(self, why: str | None = None) -> None:
        if self._process.poll() is None:
            self._why_killed = self._why_killed or why
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def bury(self, patience_s: float = 0.2) -> str:
        """Wait for its end for a moment, kill it then; how it ended, as the end of a sentence about it."""
        until = time.monotonic() + patience_s
        while self._process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.01)
        ended_by_itself = self._process.poll() is not None and self._why_killed is None
        self.kill()
        while self._process.poll() is None:
            await asyncio.sleep(0.005)
        self._channel.close()
        if not ended_by_itself:
            return self._why_killed or "closed its channel and was killed"
        return _how(self._process.returncode)


def _how(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was killed from outside (SIGKILL), perhaps for lack of memory"
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
