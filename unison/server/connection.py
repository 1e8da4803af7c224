"""The front end's link to its engine process: it starts it, speaks to it, and starts it anew where it dies."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from unison.core.errors import ServerError, WorkerError
from unison.core.records import GenerationRequest
from unison.core.sampling import SamplingParams
from unison.engine.lifecycle import PauseMode
from unison.server.child import EngineChild
from unison.server.link import Answer, CommandFailed, LinkState, RequestFailed
from unison.server.messages import (
    Abort,
    Action,
    Beat,
    CheckIntegrity,
    Command,
    CommitUpdate,
    Ended,
    EngineInfo,
    Failed,
    NotStarted,
    Pause,
    Progress,
    Ready,
    Reply,
    Setup,
    Stop,
    StreamPiece,
    Submit,
)
from unison.server.tickets import PendingTicket

_MAX_RESTARTS: Final = 5
_RESTARTS_WITHIN_S: Final = 600.0
"""More restarts than these in so long, and the server gives up: whatever kills the engine kills it again."""
_WATCH_S: Final = 0.25
_RETRY_S: Final = 0.5


class _DiedStarting(ServerError):
    """An engine process that ended before it could serve, and did not say why."""


class EngineConnection:
    """Implements ``unison.server.link.EngineLink``. To be used from one event loop.

    ``setup`` says what the process is started with; where it dies, it is started anew with the version that was
    committed last, out of the shared memory that this process holds. ``start_s`` bounds a start, ``hang_s`` the
    silence of a process that is then killed. ``on_dead`` is called once no further start is tried.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        start_s: float,
        hang_s: float,
        on_dead: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._setup = setup
        self._start_s = start_s
        self._hang_s = hang_s
        self._on_dead = on_dead
        self._state: LinkState = "starting"
        self._info: EngineInfo | None = None
        self._checksum: str | None = None
        """Of the weights of the version that was committed last."""
        self._beat = Beat("running", setup.version)
        self._child: EngineChild | None = None
        self._tickets: dict[int, PendingTicket] = {}
        self._slots: dict[str, int] = {}
        self._commands: dict[int, tuple[Action, asyncio.Future[dict[str, Any]]]] = {}
        self._num_slots = self._num_commands = 0
        self._num_proofs = 0
        """Of a scheduler that works: steps that sampled, requests that it brought to their end."""
        self._changed = asyncio.Event()
        """For whoever waits for a proof: there is one, or none is to come in this way."""
        self._restarts: deque[float] = deque()
        self.num_restarts = 0
        self.last_death: str | None = None
        self._tending: asyncio.Task[None] | None = None

    # What is known --------------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise ServerError("the engine process has not started yet")
        return self._info

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def beat(self) -> Beat:
        return self._beat

    @property
    def version(self) -> int:
        return self._setup.version

    @property
    def silence_s(self) -> float:
        return self._child.silence_s if self._child is not None else float("inf")

    @property
    def num_active(self) -> int:
        """Requests that have not ended."""
        return len(self._tickets)

    # Life -----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process. Raises ServerError, with its reason, where it cannot serve."""
        await self._launch()
        self._tending = asyncio.create_task(self._tend())

    async def close(self) -> None:
        """End the process; what waits is answered with what it has."""
        self._state = "stopping"
        if self._tending is not None:
            self._tending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tending
        if self._child is not None:
            self._child.send([Stop()])
            await self._child.bury(patience_s=2.0)
        self._give_up_all("the server stops")

    async def _launch(self) -> None:
        started = time.monotonic()
        child = self._child = await EngineChild.start(self._setup)
        try:
            async with asyncio.timeout(self._start_s):
                first = await child.receive()
        except TimeoutError:
            await child.bury()
            raise ServerError(f"the engine process did not start within {self._start_s:g} s") from None
        message = first[0] if first else None
        if isinstance(message, Ready):
            if self._checksum is None:
                self._checksum = message.info.checksum
            elif message.info.checksum != self._checksum and not self._setup.weights_lost:
                # Given back or overwritten in the last moment of the process before, or a folder that has changed.
                print("the weights are not those of the version committed last: lost", file=sys.stderr, flush=True)
                await child.bury()
                self._setup = msgspec.structs.replace(self._setup, weights_lost=True)
                await self._launch()
                return
            self._info = message.info
            # From now on the choices that were automatic are made: a restart must not choose otherwise.
            self._setup = msgspec.structs.replace(
                self._setup,
                dtype=message.info.dtype,
                numerics=message.info.numerics,
                live=0 if self._setup.segments and self._setup.live is None else self._setup.live,
            )
            self._beat = Beat("weights_invalid" if self._setup.weights_lost else "running", message.version)
            self._state = self._beat.state
            print(f"engine process {child.pid} is ready after {time.monotonic() - started:.1f} s", file=sys.stderr)
            return
        how = await child.bury()
        if isinstance(message, NotStarted):
            raise ServerError(message.reason)
        raise _DiedStarting(f"the engine process {how}")

    async def _tend(self) -> None:
        """Read what the process says; where it ends, answer for it and start the next one."""
        while True:
            how = await self._serve()
            self.last_death = how
            print(f"engine process {how}", file=sys.stderr, flush=True)
            lost = self._weights_are_lost()
            self._setup = msgspec.structs.replace(self._setup, weights_lost=lost)
            self._state = "restarting"
            self._give_up_all(f"the engine process {how}")
            if not await self._restart():
                return

    def _weights_are_lost(self) -> bool:
        """Whether nothing is left of the version that was committed last: a shadow outlives the process, unless it
        was overwritten or given back; the folder's own weights can be loaded again."""
        if self._setup.staging == "in_place":
            return self.version > 0
        return self._beat.state == "weights_invalid" or "weights" in self._beat.released

    async def _restart(self) -> bool:
        """Start the next process. One that dies before it is ready counts like any other death; one that says why it
        cannot serve ends it."""
        pause_mode = self._beat.pause_mode
        while (reason := self._too_many_deaths()) is None:
            try:
                await self._launch()
            except (_DiedStarting, OSError) as error:
                self.last_death = str(error)
                print(f"{error}, before it was ready", file=sys.stderr, flush=True)
                await asyncio.sleep(_RETRY_S)
            except ServerError as error:
                reason = str(error)
                break
            else:
                self.num_restarts += 1
                self._pause_again(pause_mode)
                return True
        self._state = "dead"
        self._on_dead(reason)
        return False

    def _pause_again(self, mode: PauseMode | None) -> None:
        """Whoever paused the engine means to go on by himself, whatever died in between."""
        if mode is not None and self._child is not None:
            self._num_commands += 1
            self._child.send([Command(self._num_commands, Pause("retract"))])

    def _too_many_deaths(self) -> str | None:
        """Count one more; why no further start is tried, if there were too many."""
        now = time.monotonic()
        self._restarts.append(now)
        while self._restarts and now - self._restarts[0] > _RESTARTS_WITHIN_S:
            self._restarts.popleft()
        if len(self._restarts) <= _MAX_RESTARTS:
            return None
        return f"the engine process died {len(self._restarts)} times within {_RESTARTS_WITHIN_S / 60:.0f} minutes"

    async def _serve(self) -> str:
        """Dispatch messages until the process ends; how it ended."""
        child = self._child
        if child is None:
            raise ServerError("no engine process was started")
        watch = asyncio.create_task(self._watch(child))
        try:
            while (messages := await child.receive()) is not None:
                for message in messages:
                    self._take(message)
        except msgspec.MsgspecError as error:
            return f"wrote what is no message ({error}); {await child.bury()}"
        finally:
            watch.cancel()
        return await child.bury()

    async def _watch(self, child: EngineChild) -> None:
        """Kill a process that says nothing any more: it hangs, and nobody would ever be answered."""
        while child.silence_s < self._hang_s:
            await asyncio.sleep(min(_WATCH_S, self._hang_s / 4))
        child.kill(f"was silent for {self._hang_s:g} s and was killed")

    # Requests -------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> PendingTicket:
        child = self._child
        if child is None or self._state in ("starting", "restarting", "stopping", "dead"):
            raise RequestFailed("state", f"the engine process cannot take requests: it is {self._state}")
        if request.request_id in self._slots:
            raise RequestFailed(
                "request", f"request id {request.request_id!r} is in use; give each request an id of its own"
            )
        self._num_slots += 1
        ticket = PendingTicket(self._num_slots, request)
        self._tickets[ticket.slot] = ticket
        self._slots[request.request_id] = ticket.slot
        child.send([Submit(ticket.slot, request, streamed)])
        return ticket

    def abort(self, request_id: str | None = None) -> int:
        if request_id is not None and request_id not in self._slots:
            return 0
        slots = list(self._tickets) if request_id is None else [self._slots[request_id]]
        if slots and self._child is not None:
            self._child.send([Abort(slots)])
        return len(slots)

    def active_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._slots)

    async def command(self, action: Action, timeout_s: float = 60.0) -> dict[str, Any]:
        child = self._child
        if child is None or self._state in ("starting", "restarting", "stopping", "dead"):
            raise CommandFailed("unavailable", f"the engine process cannot take commands: it is {self._state}")
        self._num_commands += 1
        call_id = self._num_commands
        done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        try:
            child.send([Command(call_id, action)])
        except WorkerError as error:
            raise CommandFailed("request", f"{type(action).__name__} cannot be sent: {error}") from error
        self._commands[call_id] = (action, done)
        try:
            async with asyncio.timeout(timeout_s):
                return await done
        except TimeoutError:
            raise CommandFailed(
                "unavailable", f"the engine process did not answer {type(action).__name__} within {timeout_s:g} s"
            ) from None

    async def check_alive(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._prove_alive(timeout_s)
        except TimeoutError:
            raise CommandFailed("unavailable", f"the scheduler sampled nothing within {timeout_s:g} s") from None
        except RequestFailed as error:
            raise CommandFailed("unavailable", str(error)) from error

    async def _prove_alive(self, timeout_s: float) -> None:
        child, num_before = self._child, self._num_proofs
        own: PendingTicket | None = None
        try:
            while self._num_proofs == num_before:
                if self._child is not child or self._state == "restarting":
                    raise CommandFailed("unavailable", f"the engine process {self.last_death}")
                if self._state != "running":
                    # Nothing is sampled just now, perhaps since a moment ago: the loop's answer has to do.
                    await self.command(CheckIntegrity(), timeout_s)
                    return
                if own is not None and own.has_ended:
                    await own.answer()  # raises where it failed
                if not self._tickets:
                    own = self._submit_probe()
                # Others' tokens prove as much as one of our own, and need no place in a full queue.
                self._changed.clear()
                await self._changed.wait()
        finally:
            if own is not None and not own.has_ended:
                self.abort(own.request.request_id)

    def _submit_probe(self) -> PendingTicket:
        name = f"health-{self._num_slots}"
        return self.submit(
            GenerationRequest(request_id=name, prompt_ids=(0,), sampling=SamplingParams(max_new_tokens=1))
        )

    # Messages -------------------------------------------------------------------------------------------------------

    def _take(self, message: Any) -> None:
        match message:
            case Progress():
                self._progress(message)
            case StreamPiece(slot, delta):
                if slot in self._tickets:
                    self._tickets[slot].piece(delta)
            case Ended(slot, output, num_retractions, queue_s):
                self._end(slot, Answer(output, num_retractions, queue_s))
            case Failed(slot, kind, text, output):
                self._end(slot, RequestFailed(kind, text, output))
            case Reply():
                self._reply(message)
            case Beat():
                self._beat = message
                self._state = message.state
                self._changed.set()

    def _progress(self, message: Progress) -> None:
        for slot, token_id, logprob in zip(message.slots, message.token_ids, message.logprobs, strict=True):
            ticket = self._tickets.get(slot)
            if ticket is not None:
                ticket.progress(message.version, token_id, logprob)
        self._num_proofs += 1
        self._changed.set()

    def _end(self, slot: int, result: Answer | RequestFailed) -> None:
        ticket = self._tickets.pop(slot, None)
        if ticket is None:
            return
        del self._slots[ticket.request.request_id]
        if isinstance(result, Answer) and result.output.finish_reason != "abort":
            self._num_proofs += 1
        ticket.end(result)
        self._changed.set()

    def _reply(self, reply: Reply) -> None:
        action, done = self._commands.pop(reply.call_id, (None, None))
        if isinstance(action, CommitUpdate) and reply.error is None:
            # Before anybody hears of it: from here on this is the version a new process starts with.
            live = reply.result.get("live")
            self._checksum = reply.result.get("checksum", self._checksum)
            self._setup = msgspec.structs.replace(self._setup, version=action.version, live=live, weights_lost=False)
        if type(action).__name__ == "BumpVersion" and reply.error is None:
            self._setup = msgspec.structs.replace(self._setup, version=reply.result["version"])
        if done is None or done.done():
            return
        if reply.error is None:
            done.set_result(reply.result)
        else:
            done.set_exception(CommandFailed(reply.kind, reply.error))

    def _give_up_all(self, how: str) -> None:
        self._changed.set()
        tickets, self._tickets, self._slots = self._tickets, {}, {}
        for ticket in tickets.values():
            ticket.cut_short(how)
        commands, self._commands = self._commands, {}
        for _, done in commands.values():
            if not done.done():
                done.set_exception(CommandFailed("unavailable", how))
