"""The weight update that is open, as the front end sees it: one at a time, held by a lease, labelled when committed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from unison.server.link import CommandFailed, EngineLink
from unison.server.messages import AbortUpdate, Action, BeginUpdate, BumpVersion, CommitUpdate, PrepareUpdate
from unison.server.metrics import Metrics
from unison.server.versions import Versions

T = TypeVar("T")
Origin = Literal["own", "bracket", "bucket"]
"""own: /weights/begin. bracket: begin_weight_update. bucket: a lone bucket of tensors that no begin came before."""
_MARGIN_S: Final = 10.0
"""The engine's own deadline passes first: its message says what it waited for."""
_MOST_REASONS: Final = 64
_WITHOUT_ENGINE: Final = ("starting", "restarting", "stopping", "dead")


@dataclass(frozen=True, slots=True)
class Sender:
    """A process of this machine, known from others that may get its number after it."""

    pid: int
    started: str

    @classmethod
    def find(cls, pid: int) -> Sender | None:
        started = _start_of(pid)
        return None if started is None else cls(pid, started)

    @property
    def is_gone(self) -> bool:
        return _start_of(self.pid) != self.started


def _start_of(pid: int) -> str | None:
    """When a process began, in the kernel's clock ticks; None for one that is gone or has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


@dataclass(slots=True)
class OpenUpdate:
    """``label`` is given to the version when it is committed; ``note`` goes with a failure for incompleteness."""

    version: int
    label: str | None
    origin: Origin
    lease_s: float
    sender: Sender | None
    num_restarts: int
    note: str = ""
    num_staged: int = 0
    began: float = field(default_factory=time.monotonic)
    spoken: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Lapse:
    """An update given up before its sender was told."""

    origin: Origin
    reason: str


class Updates:
    """Every method but ``alone`` expects to be called within it: what concerns updates is done one after the other."""

    def __init__(self, link: EngineLink, versions: Versions, metrics: Metrics, *, lease_s: float) -> None:
        self._link = link
        self._versions = versions
        self._metrics = metrics
        self._lease_s = lease_s
        self._lock = asyncio.Lock()
        self._doing = ""
        self._open: OpenUpdate | None = None
        self._lapse: Lapse | None = None
        self._reasons: dict[int, str] = {}
        self._checksum: tuple[int, str] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def open(self) -> OpenUpdate | None:
        """The one that is open, if its engine process is still the same."""
        is_gone = self._open is not None and self._link.num_restarts != self._open.num_restarts
        if self._open is not None and (is_gone or self._link.state in _WITHOUT_ENGINE):
            self._give_up(self._open, "the engine process ended while it was open")
        return self._open

    @property
    def checksum(self) -> str:
        """Of the live weights."""
        if self._checksum is not None and self._checksum[0] == self._link.version:
            return self._checksum[1]
        return self._link.info.checksum

    async def alone(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run ``work`` while nothing else is done about updates; to its end even if whoever asked is gone."""
        task = asyncio.create_task(self._alone(what, work))
        # An event loop alone does not keep a task that nobody awaits any more.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _alone(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        try:
            await asyncio.wait_for(self._lock.acquire(), self._lease_s)
        except TimeoutError as error:
            text = f"{what} waited {self._lease_s:g} s for {self._doing or 'another call'}, which is still under way"
            raise CommandFailed("unavailable", text) from error
        self._doing = what
        try:
            return await work()
        finally:
            self._doing = ""
            self._lock.release()

    async def begin(
        self,
        version: int,
        label: str | None,
        origin: Origin,
        *,
        target: str = "base",
        sender: Sender | None = None,
        lease_s: float | None = None,
    ) -> OpenUpdate:
        if self.open is not None:
            raise CommandFailed("state", f"an update to version {self.open.version} is open; end or abort it first")
        if version <= self._link.version:
            raise CommandFailed("request", f"version {version} is not above the present one, {self._link.version}")
        try:
            await self._link.command(BeginUpdate(version, target), self._lease_s)
        except CommandFailed as error:
            if error.kind == "unavailable":
                # It may be opened yet, once the engine comes to it: nobody would ever close it.
                with contextlib.suppress(CommandFailed):
                    await self._link.command(AbortUpdate(version, "nobody waits for it"), self._lease_s)
            raise
        self._open = OpenUpdate(
            version, label, origin, lease_s or self._lease_s, sender, self._link.num_restarts, self._take_note(origin)
        )
        self._reasons.pop(version, None)
        self._watch = asyncio.create_task(self._watch_over(self._open))
        return self._open

    def current(self, version: int | None = None) -> OpenUpdate:
        """The open update. Raises CommandFailed where there is none, or another one, and says what became of it."""
        update = self.open
        if update is not None and version in (None, update.version):
            update.spoken = time.monotonic()
            return update
        reason = self._reasons.get(version) if version is not None else None
        if reason is not None:
            raise CommandFailed("state", reason)
        if update is not None:
            raise CommandFailed("state", f"the update that is open is to version {update.version}, not {version}")
        of = "" if version is None else f" to version {version}"
        raise CommandFailed("state", f"no update{of} is open; begin one first")

    async def stage(self, version: int | None, action: Action, timeout_s: float = 0.0) -> dict[str, Any]:
        """One piece. What is refused for its content gives the whole update up; a call out of place does not."""
        update = self.current(version)
        result = await self._guarded(update, action, max(self._lease_s, timeout_s + _MARGIN_S))
        update.num_staged += 1
        return result

    async def prepare(self, version: int | None, checksum: str | None = None) -> dict[str, Any]:
        update = self.current(version)
        return await self._guarded(update, PrepareUpdate(update.version, checksum), self._lease_s)

    async def commit(self, version: int | None) -> dict[str, Any]:
        """Publish the version under its label."""
        update = self.current(version)
        # Before the engine samples under it: no answer may meet a version without its name.
        label = self._versions.name(update.version, update.label)
        try:
            result = await self._guarded(update, CommitUpdate(update.version), self._lease_s)
        except CommandFailed as error:
            # One that did not answer may commit it yet.
            if error.kind != "unavailable":
                self._versions.forget(update.version)
            raise
        self._end(update)
        if result.get("checksum"):
            self._checksum = (update.version, result["checksum"])
        self._metrics.observe_update("committed", time.monotonic() - update.began)
        return {**result, "version": update.version, "label": label}

    async def abort(self, reason: str, *, is_told: bool = False) -> None:
        """Give up the one that is open, if any. The engine keeps what its staging promises. ``is_told``: by the
        answer to the call that this happens in."""
        update = self.open
        if update is None:
            return
        self._give_up(update, reason)
        if is_told and update.origin == "bucket":
            self._lapse = None
        # An engine that is gone, or has closed it by itself, has nothing open.
        with contextlib.suppress(CommandFailed):
            await self._link.command(AbortUpdate(update.version, reason), self._lease_s)

    async def relabel(self, label: str) -> int:
        """Call the present weights by another name from the next token on."""
        if self.open is not None:
            raise CommandFailed("state", f"an update to version {self.open.version} is open; end or abort it first")
        version, checksum = self._link.version + 1, self.checksum
        self._versions.name(version, label)
        try:
            await self._link.command(BumpVersion(version))
        except CommandFailed as error:
            if error.kind != "unavailable":
                self._versions.forget(version)
            raise
        self._checksum = (version, checksum)
        return version

    def take_lapse(self, *origins: Origin) -> str | None:
        """Why an update was given up that its sender still believes in; told once."""
        if self.open is not None or self._lapse is None or self._lapse.origin not in origins:
            return None
        reason, self._lapse = self._lapse.reason, None
        return reason

    @property
    def failed_bracket(self) -> str | None:
        """Why nothing more is taken between begin_weight_update and end_weight_update."""
        if self.open is not None or self._lapse is None or self._lapse.origin != "bracket":
            return None
        return self._lapse.reason

    async def _guarded(self, update: OpenUpdate, action: Action, timeout_s: float) -> dict[str, Any]:
        try:
            return await self._link.command(action, timeout_s)
        except CommandFailed as error:
            if error.kind not in ("request", "state"):
                await self.abort(str(error), is_told=True)
            raise
        finally:
            update.spoken = time.monotonic()

    def _take_note(self, origin: Origin) -> str:
        lapse, self._lapse = self._lapse, None
        return lapse.reason if lapse is not None and origin == "bucket" else ""

    def _give_up(self, update: OpenUpdate, reason: str) -> None:
        text = f"the update to version {update.version} was given up: {reason}"
        self._end(update)
        self._lapse = Lapse(update.origin, text)
        self._reasons[update.version] = text
        while len(self._reasons) > _MOST_REASONS:
            del self._reasons[next(iter(self._reasons))]
        self._metrics.observe_update("failed", time.monotonic() - update.began)

    def _end(self, update: OpenUpdate) -> None:
        if self._open is update:
            self._open = None

    async def _watch_over(self, update: OpenUpdate) -> None:
        """Give the update up when nobody speaks of it any more, or its sender is gone."""
        while self.open is update:
            await asyncio.sleep(min(1.0, update.lease_s / 4))
            reason = self._lapsed(update)
            if reason is None or self._lock.locked():
                continue
            # Where another call came first, there is a next time.
            with contextlib.suppress(CommandFailed):
                await self.alone("the watch over updates", lambda: self._abort_lapsed(update))

    async def _abort_lapsed(self, update: OpenUpdate) -> None:
        reason = self._lapsed(update)
        if reason is not None and self.open is update:
            await self.abort(reason)

    def _lapsed(self, update: OpenUpdate) -> str | None:
        if update.sender is not None and update.sender.is_gone:
            return f"its sender, process {update.sender.pid}, is gone"
        if time.monotonic() - update.spoken > update.lease_s:
            return f"nobody spoke of it for {update.lease_s:g} s"
        return None
