"""Looks after the servers of a fleet: who is silent is fenced, who died is started anew, who lags catches up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from unison.clients.control import WeightsStatus
from unison.clients.endpoint import BusyError, LostError, RefusedError
from unison.clients.member import Member
from unison.clients.publisher import Publisher
from unison.clients.update import Update
from unison.core.errors import ConfigError, RequestError, ServerError, WeightUpdateError

_BEAT_S: Final = 1.0
_HURRY_S: Final = 0.1
_MOST_FAILED_STARTS: Final = 3
_FEW_SILENCES: Final = 3
_MANY_SILENCES: Final = 15
"""Deadlines of silence after which a server of our own is killed: few where the run waits for it, many where others
do its work meanwhile."""

Check = Callable[[Member], Awaitable[None]]


class Keeper:
    """Shared by the tasks that look after one server each. All in one event loop."""

    def __init__(
        self, publisher: Publisher, present: Update, members: Sequence[Member], *, silence_s: float, check: Check
    ) -> None:
        """``check`` raises ConfigError for a server that is not as the run needs it."""
        self.present = present
        """The weights that every server which is given requests holds."""
        self.lock = asyncio.Lock()
        """Held while weights or memory of servers change."""
        self.released: tuple[str, ...] = ()
        """What servers have been told to give up."""
        self.changed = asyncio.Event()
        """Set when a server may have become ready, or ended."""
        self.events: list[str] = []
        self._publisher = publisher
        self._members = members
        self._silence_s = silence_s
        self._check = check

    def fence(self, member: Member, reason: str) -> None:
        """Take a server's requests away, and give it none until it has proved that it holds the present weights."""
        if member.state == "ended":
            return
        if member.state != "fenced":
            self.events.append(f"{member.name} is given no requests: {reason}")
        member.state, member.reason = "fenced", reason
        member.take_away()
        member.wake.set()

    def doubt(self, member: Member, reason: str) -> None:
        """Give a server no new requests until it has been looked at."""
        if member.state == "ready":
            member.state, member.reason = "doubted", reason
        member.wake.set()

    def end(self, member: Member, reason: str) -> None:
        """Give it up for good."""
        self.events.append(f"{member.name} is given up: {reason}")
        member.state, member.reason = "ended", reason
        member.take_away()
        self.changed.set()

    async def watch(self, member: Member) -> None:
        """Look after one server until cancelled."""
        while member.state != "ended":
            wait_s = _BEAT_S if member.is_ready else _HURRY_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(member.wake.wait(), wait_s)
            member.wake.clear()
            await self.look_after(member)
            if not member.is_ready:
                await asyncio.sleep(_HURRY_S)

    async def look_after(self, member: Member) -> None:
        """One look, and what it calls for."""
        if member.process is not None and member.process.has_ended:
            self.fence(member, f"its process {member.process.how_it_ended}; it is started anew")
            await self._start_anew(member)
            return
        try:
            await member.link.status(self._silence_s)
        except LostError as error:
            self._unheard(member, str(error))
            return
        except (BusyError, RefusedError, ServerError) as error:
            self.doubt(member, str(error))
            return
        member.silent_since = None
        if self.lock.locked():
            return  # what is served while an update is under way is the update's business
        async with self.lock:
            await self._guarded_settle(member)

    async def _guarded_settle(self, member: Member) -> None:
        try:
            await self.settle(member)
        except LostError as error:
            self._unheard(member, str(error))
        except ConfigError as error:
            self.end(member, str(error))
        except (ServerError, WeightUpdateError, RequestError) as error:
            self.fence(member, f"it cannot be brought to version {self.present.version}: {error}")

    async def settle(self, member: Member) -> None:
        """Make a server that answers ready, if it can be. To be called with the lock."""
        status = await member.link.status(self._silence_s)
        if status.num_restarts > member.num_restarts and member.was_ready:
            self.events.append(f"{member.name}: its engine process died, and was started anew by the server")
        member.num_restarts = status.num_restarts
        if status.state == "released" and not self.released:
            await member.link.resume_memory(("weights", "kv_cache"), self._silence_s)
            status = await member.link.status(self._silence_s)
        if status.state in ("dead", "stopping"):
            self.fence(member, f"its engine is {status.state}")
            if member.process is not None:
                member.process.kill()
            return
        if status.state in ("starting", "restarting"):
            self.doubt(member, f"its engine is {status.state}")
            return
        if status.state != "released" and not self.holds_present(status):
            was = f"it holds version {status.label}" if status.state != "weights_invalid" else "its weights are invalid"
            self.fence(member, f"{was}, and version {self.present.version} is the present one")
            await self._while_heard(member, self._publisher.catch_up(member, self.present))
        if member.state == "fenced" and member.was_ready:
            self.events.append(f"{member.name} is given requests again, with version {self.present.version}")
        member.state, member.reason, member.was_ready = "ready", "", True
        self.changed.set()

    async def _while_heard(self, member: Member, work: Coroutine[Any, Any, None]) -> None:
        """Do something long with one server. Raises LostError where it falls silent: others wait for the lock."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=_BEAT_S))[0]:
                with suppress(BusyError):
                    await member.link.status(self._silence_s)
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def holds_present(self, status: WeightsStatus) -> bool:
        labels = (self.present.label, "default") if self.present.version == 0 else (self.present.label,)
        return status.state != "weights_invalid" and status.checksum == self.present.checksum and status.label in labels

    def _unheard(self, member: Member, reason: str) -> None:
        self.fence(member, reason)
        now = time.monotonic()
        member.silent_since = member.silent_since or now
        most = _MANY_SILENCES if any(other.is_ready for other in self._members) else _FEW_SILENCES
        if member.process is not None and now - member.silent_since > most * self._silence_s:
            member.process.kill()

    async def _start_anew(self, member: Member) -> None:
        process = member.process
        if process is None:
            return
        if member.num_failed_starts >= _MOST_FAILED_STARTS:
            self.end(member, member.reason)
            return
        if member.control is not None:
            await self._publisher.transport.forget(member.control)
        try:
            url = await process.start()
            await member.move_to(url, process.key, is_local=True)
            await self._check(member)
        except ConfigError as error:
            self.end(member, str(error))
            return
        except ServerError as error:
            member.num_failed_starts += 1
            member.reason = str(error)
            return
        member.num_failed_starts = 0
        member.silent_since = None
        member.wake.set()
