"""The servers of a training run: started or found, given weights and requests, looked after, and ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from unison.clients.background import BackgroundLoop
from unison.clients.cores import available, keep_to
from unison.clients.endpoint import BusyError, LostError, RefusedError
from unison.clients.http import abort_on, attempt
from unison.clients.keeper import Check, Keeper
from unison.clients.launch import ServerProcess
from unison.clients.member import Member
from unison.clients.publisher import Publisher
from unison.clients.resume import Call, Piece, draw_whole
from unison.clients.routing import Router
from unison.clients.transports import Transport
from unison.clients.update import Update
from unison.clients.wire import ForeignLabelError, check_carried
from unison.config.serving import ServersConfig
from unison.core.errors import RequestError, ServerError, UnisonError, WeightUpdateError
from unison.core.protocols import EngineClient
from unison.core.records import GenerationOutput, GenerationRequest

_NUM_TRIES: Final = 2
"""Of one weight update."""
_LOOK_S: Final = 0.05
_ATTACH_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a fleet is made of. ``key`` is that of servers which run already."""

    config: ServersConfig
    dtype: torch.dtype
    check: Check
    transport: Transport
    processes: tuple[ServerProcess, ...] = ()
    key: str | None = None
    trainer_cores: tuple[int, ...] = ()
    """Empty: the trainer keeps those it has."""
    notes: list[str] = field(default_factory=list)


class Fleet:
    """Servers that hold one version of weights. Opened by its constructor; ``close`` it, whatever happens.

    ``published`` are the tensors that a run begins with, as version 0. All methods may be called from any one thread;
    what they do takes place in an event loop of the fleet's own, which goes on while the caller trains.
    """

    def __init__(self, plan: Plan, published: Mapping[str, Tensor]) -> None:
        self._plan = plan
        self._config = plan.config
        self.notes: Sequence[str] = plan.notes
        self.members = [Member(f"server {i}", process) for i, process in enumerate(plan.processes)]
        self.members += [Member(f"server {url}") for url in plan.config.urls]
        self._router = Router()
        self._calls: dict[str, Call] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._watchers: list[asyncio.Task[None]] = []
        self._cores = available() if plan.trainer_cores else ()
        self._background = BackgroundLoop("fleet")
        present = Update(published, 0, plan.dtype)
        self._publisher = Publisher(
            plan.transport,
            update_s=self._config.update_s,
            silence_s=self._config.silence_s,
            fence=lambda member, reason: self._keeper.fence(member, reason),
        )
        self._keeper = Keeper(
            self._publisher, present, self.members, silence_s=self._config.silence_s, check=plan.check
        )
        self.client: EngineClient = FleetClient(self)
        try:
            if plan.trainer_cores:
                keep_to(plan.trainer_cores)
            self._background.run(self._open())
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Of the weights that servers are given requests with."""
        return self._keeper.present.version

    def events(self) -> list[str]:
        """What happened to servers since the last call."""
        found = list(self._keeper.events)
        del self._keeper.events[: len(found)]
        return found

    def placement(self) -> dict[str, Any]:
        config = self._config
        return {
            "servers": [member.link.endpoint.url for member in self.members if member.control is not None],
            "own": bool(self._plan.processes),
            "placement": config.placement if self._plan.processes else "elsewhere",
            "staging": config.staging,
            "transport": config.transport,
        }

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Give every server these tensors as ``version``, whole and at once.

        Raises WeightUpdateError where that cannot be done: the version before goes on. A server that fails where
        others do not is given no requests until it has caught up.
        """
        if version <= self.version:
            raise WeightUpdateError(f"version {version} is not above the present version {self.version}")
        update = Update(tensors, version, self._plan.dtype)
        try:
            self._background.run(self._publish(update))
        finally:
            if self._keeper.present is not update:
                update.close()

    def release_memory(self) -> None:
        """Servers on the trainer's cores give their memory up, as far as they get it back."""
        if self._plan.processes and self._config.placement == "colocated":
            self._background.run(self._release())

    def resume_memory(self) -> None:
        """They take it again."""
        if self._keeper.released:
            self._background.run(self._resume_alone())

    def close(self) -> None:
        """End every server that was started here."""
        try:
            with suppress(UnisonError):
                self._background.run(self._shut())
            for process in self._plan.processes:
                process.ask_to_stop()
        finally:
            for process in self._plan.processes:
                process.stop()
            self._background.stop()
            self._keeper.present.close()
            if self._cores:
                keep_to(self._cores)

    # Requests, which come from the caller's event loop.

    def open_call(self, request: GenerationRequest) -> Call:
        """Raises RequestError for what cannot be sent."""
        check_carried(request)
        if request.request_id in self._calls:
            raise RequestError(f"request id {request.request_id!r} is in use; give each request an id of its own")
        call = self._calls[request.request_id] = Call.of(request, self._config.request_s)
        return call

    async def draw(self, call: Call) -> GenerationOutput:
        """The whole answer, wherever its pieces come from."""
        future = self._background.begin(self._draw(call))
        return await asyncio.wrap_future(future)

    def abort(self, request_id: str | None) -> None:
        self._background.loop.call_soon_threadsafe(self._abort, request_id)

    async def _draw(self, call: Call) -> GenerationOutput:
        try:
            return await draw_whole(call, self._attempt)
        finally:
            call.is_open = False
            self._calls.pop(call.request.request_id, None)

    async def _attempt(self, call: Call) -> Piece:
        member = await self._choose(call)
        if member is None:
            return Piece(call.cut_off(), is_cut=True)
        oldest = self.version
        try:
            piece = await member.guarded(self._in_turn(member, call))
        except LostError as error:
            self._keeper.doubt(member, str(error))
            raise
        except BusyError:
            member.wake.set()
            raise
        except ForeignLabelError as error:
            # Somebody else has relabelled or replaced its weights meanwhile.
            self._keeper.fence(member, str(error))
            raise LostError(str(error)) from error
        wrong = {run.version for run in piece.output.weight_versions if not oldest <= run.version <= self.version}
        if wrong:
            # It was begun anew by somebody else: nothing that it says now is of the present policy.
            reason = f"it sampled under version {wrong.pop()}, and {self.version} is the present one"
            self._keeper.fence(member, reason)
            raise LostError(f"{member.name}: {reason}")
        return piece

    async def _in_turn(self, member: Member, call: Call) -> Piece:
        async with member.room:
            call.place = member
            return await attempt(member.endpoint, call)

    async def _choose(self, call: Call) -> Member | None:
        """A server that is ready, waited for; None where the request is aborted meanwhile."""
        while not call.aborted.is_set():
            member = self._router.choose(call.request, self.members)
            if member is not None:
                return member
            self._require_hope()
            if call.remaining_s <= 0:
                raise LostError(f"no server is ready ({self._reasons()})")
            await asyncio.sleep(_LOOK_S)
        return None

    def _require_hope(self) -> None:
        if all(member.state == "ended" for member in self.members):
            raise ServerError(f"no server is left: {self._reasons()}")

    def _reasons(self) -> str:
        return "; ".join(f"{member.name}: {member.reason or member.state}" for member in self.members)

    def _abort(self, request_id: str | None) -> None:
        calls = list(self._calls.values()) if request_id is None else [self._calls.get(request_id)]
        for call in calls:
            if call is None:
                continue
            call.aborted.set()
            member = call.place
            if isinstance(member, Member) and call.rid and member.control is not None:
                self._abort_at(member, call, call.rid)

    def _abort_at(self, member: Member, call: Call, rid: str) -> None:
        work = abort_on(member.endpoint, rid, lambda: call.is_open and call.rid == rid)
        task = self._background.loop.create_task(work)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    # What follows runs in the fleet's event loop.

    async def _open(self) -> None:
        starts = [asyncio.create_task(self._find(member)) for member in self.members]
        try:
            await asyncio.gather(*starts)
        finally:
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        self._watchers = [asyncio.create_task(self._keeper.watch(member)) for member in self.members]
        whose = "started for the run" if self._plan.processes else "that run already"
        urls = ", ".join(member.endpoint.url for member in self.members)
        self.notes = [*self.notes, f"samples come from {len(self.members)} servers {whose}: {urls}"]

    async def _find(self, member: Member) -> None:
        """Start or reach one server, and bring it to the run's first weights. Raises ConfigError, ServerError."""
        if member.process is not None:
            url = await member.process.start()
            await member.move_to(url, member.process.key, is_local=True)
        else:
            url = member.name.removeprefix("server ")
            await member.move_to(url, self._plan.key, is_local=_is_local(url))
            await self._reach(member)
        await self._plan.check(member)
        async with self._keeper.lock:
            await self._keeper.settle(member)

    async def _reach(self, member: Member) -> None:
        """A server that runs already may be just starting."""
        deadline = time.monotonic() + _ATTACH_S
        while True:
            try:
                await member.link.status(self._config.silence_s)
                return
            except (LostError, BusyError, RefusedError):
                if time.monotonic() > deadline:
                    raise
            except RequestError as error:
                raise ServerError(f"{member.name} is no server of ours: {error}") from error
            await asyncio.sleep(_LOOK_S)

    async def _publish(self, update: Update) -> None:
        deadline = time.monotonic() + self._config.update_s
        num_tries = 0
        while True:
            await self._some_usable(deadline)
            async with self._keeper.lock:
                await self._resume()
                members = [member for member in self.members if member.state in ("ready", "doubted")]
                if not members:
                    continue
                num_tries += 1
                try:
                    prepared = await self._publisher.prepare(members, update)
                except WeightUpdateError as error:
                    self._keeper.events.append(str(error))
                    if num_tries >= _NUM_TRIES:
                        self._doubt_all("a weight update failed")
                        raise
                    continue
                # Prepared everywhere, it is decided: whoever fails from here on has to catch up.
                before, self._keeper.present = self._keeper.present, update
                held = await self._publisher.commit(prepared, update)
                before.close()
            if not held:
                # Time of its own: this process may have been stopped until the first deadline was over.
                await self._some_usable(time.monotonic() + self._config.update_s)
            return

    def _doubt_all(self, reason: str) -> None:
        for member in self.members:
            self._keeper.doubt(member, reason)

    async def _some_usable(self, deadline: float) -> None:
        """Wait until a server can be given weights. Raises WeightUpdateError where none comes back in time."""
        while not any(member.state in ("ready", "doubted") for member in self.members):
            if time.monotonic() > deadline or all(member.state == "ended" for member in self.members):
                raise WeightUpdateError(f"no server can be given weights ({self._reasons()})")
            await asyncio.sleep(_LOOK_S)

    async def _release(self) -> None:
        tags = ("weights", "kv_cache") if self._config.staging == "in_place" else ("kv_cache",)
        async with self._keeper.lock:
            self._keeper.released = tags
            for member in [one for one in self.members if one.is_ready]:
                await self._tell(member, lambda one=member: one.link.release_memory(tags, self._config.silence_s))

    async def _resume_alone(self) -> None:
        async with self._keeper.lock:
            lost_weights = "weights" in self._keeper.released
            await self._resume()
        if lost_weights:
            # Nothing was published: what they held before is to be given to them again.
            self._doubt_all("its weights were released")

    async def _resume(self) -> None:
        tags, self._keeper.released = self._keeper.released, ()
        if tags:
            for member in [one for one in self.members if one.state in ("ready", "doubted")]:
                await self._tell(member, lambda one=member: one.link.resume_memory(tags, self._config.silence_s))

    async def _tell(self, member: Member, call: Any) -> None:
        """Say something about memory. A server that does not do it is looked at."""
        for _ in range(_NUM_TRIES):
            try:
                await member.guarded(call())
                return
            except (LostError, BusyError) as error:
                self._keeper.fence(member, str(error))
                return
            except (RefusedError, RequestError) as error:
                reason = str(error)
                # Aborted requests may take a step to end.
                await asyncio.sleep(_LOOK_S)
        self._keeper.events.append(f"{member.name}: {reason}")
        self._keeper.doubt(member, reason)

    async def _shut(self) -> None:
        for member in self.members:
            member.state, member.reason = "ended", "the fleet is closed"
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._plan.transport.close()
        for member in self.members:
            member.take_away()
            if member.control is not None:
                await member.control.endpoint.close()


class FleetClient:
    """Samples from a fleet. Usable in any event loop of the caller's."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Sample until the request ends, on whichever servers it takes. Cancelling the coroutine aborts it.

        Raises RequestError where it cannot be served, ServerError where no server serves it until its deadline.
        """
        call = self._fleet.open_call(request)
        try:
            return await self._fleet.draw(call)
        except asyncio.CancelledError:
            self._fleet.abort(request.request_id)
            raise

    def abort(self, request_id: str | None = None) -> None:
        self._fleet.abort(request_id)


def _is_local(url: str) -> bool:
    host = url.partition("://")[2].rpartition(":")[0] or url.partition("://")[2]
    return host.strip("[]/") in ("127.0.0.1", "localhost", "::1")
