"""The engine process's main loop: take messages, step, tell what came of it.

One thread steps the engine and answers quick commands between two steps; a second one, the update desk's, receives
weights, and asks the first one in for what must happen between two steps.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from unison.core.errors import CapacityError, EngineStateError, NonFiniteLogitsError, QueueFullError, RequestError
from unison.core.faults import fault_point
from unison.core.records import GenerationOutput
from unison.engine.engine import Engine
from unison.engine.sequence import Sequence
from unison.engine.streams import OutputStream
from unison.processes.channel import Channel
from unison.server.desk import DESK_ACTIONS, UpdateDesk
from unison.server.host_commands import COMMANDS
from unison.server.messages import (
    Abort,
    Beat,
    Command,
    Ended,
    Failed,
    Message,
    Progress,
    Reply,
    Stop,
    StreamPiece,
    Submit,
    ToEngine,
)
from unison.server.replies import answered
from unison.weights.checking import WeightsChecker

_BEAT_S: Final = 0.5
_MAX_FAILED_STEPS: Final = 3
"""In a row; then the process ends, and is started anew."""


@dataclass(slots=True)
class Held:
    """A request under way: what the front end calls it, and how much of it was told."""

    slot: int
    sequence: Sequence
    stream: OutputStream | None
    arrived: float = field(default_factory=time.monotonic)
    began: float | None = None
    num_told: int = 0


class Host:
    """Runs ``engine`` for the front end at the other end of ``channel`` until that one is gone or says stop."""

    def __init__(self, engine: Engine, channel: Channel[ToEngine], profile_dir: str) -> None:
        self.engine = engine
        self.profile_dir = profile_dir
        self.checker = WeightsChecker(engine.weights)
        self.profiler: Any = None
        self.desk = UpdateDesk(engine, self.between_steps, self._send_reply)
        self._channel = channel
        self._held: dict[str, Held] = {}
        self._by_slot: dict[int, str] = {}
        self._told: list[Message] = []
        self._closures: list[Callable[[], None]] = []
        self._beat_at = 0.0
        self._num_failed_steps = 0
        self._stopped = False

    def run(self) -> None:
        try:
            while not self._stopped and not self._channel.is_closed:
                self.turn()
        finally:
            self.desk.close()

    def turn(self) -> None:
        """One round: messages, what the desk asks for, a step, and the news of it."""
        for messages in self._channel.receive(0.0 if self._can_step else self._idle_s()):
            for message in messages:
                self._take(message)
        self._run_closures()
        if self._can_step:
            self._step()
        self._tell()

    def between_steps(self, action: Callable[[], None]) -> None:
        """Have the main thread run ``action`` between two steps. For other threads; it does not wait."""
        self._closures.append(action)
        self._channel.wake()

    def beat_now(self) -> None:
        """Let the front end hear of a change of state at once."""
        self._beat_at = 0.0

    @property
    def _can_step(self) -> bool:
        return not self.desk.holds_steps and self.engine.can_step

    def _idle_s(self) -> float:
        return max(0.0, self._beat_at + _BEAT_S - time.monotonic())

    def _run_closures(self) -> None:
        while self._closures:
            self._closures.pop(0)()
            self.beat_now()

    def _take(self, message: Message) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._abort(message)
        elif isinstance(message, Command):
            self._command(message)
        elif isinstance(message, Stop):
            self._stopped = True

    def _submit(self, message: Submit) -> None:
        request = message.request
        if self.engine.state == "weights_invalid" and not self.desk.holds_steps:
            self._told.append(Failed(message.slot, "state", "the weights are incomplete until an update is committed"))
            return
        try:
            sequence = self.engine.add_request(request)
            stream = self.engine.watch(request.request_id) if message.streamed else None
        except CapacityError as error:
            self._told.append(Failed(message.slot, "capacity", str(error)))
        except QueueFullError as error:
            self._told.append(Failed(message.slot, "queue_full", str(error)))
        except RequestError as error:
            self._told.append(Failed(message.slot, "request", str(error)))
        except EngineStateError as error:
            self._told.append(Failed(message.slot, "state", str(error)))
        else:
            self._held[request.request_id] = Held(message.slot, sequence, stream)
            self._by_slot[message.slot] = request.request_id

    def _abort(self, message: Abort) -> None:
        """Answer them at once: under an open in_place update there is no step that would. One that a pause has ended
        already, and no step has handed out, is answered just so."""
        slots = list(self._by_slot) if message.slots is None else message.slots
        for output in self.engine.discard([self._by_slot[slot] for slot in slots if slot in self._by_slot]):
            self._report_end(output)

    def _command(self, message: Command) -> None:
        if isinstance(message.action, DESK_ACTIONS):
            self.desk.put(message.call_id, message.action)
            return
        self._told.append(answered(message.call_id, lambda: COMMANDS[type(message.action)](self, message.action)))
        self.beat_now()

    def _send_reply(self, reply: Reply) -> None:
        """From the desk's thread: behind what was told before, so that no later token overtakes a commit."""
        self.between_steps(lambda: self._told.append(reply))

    def _step(self) -> None:
        try:
            fault_point("server.engine_step")
            outputs = self.engine.step()
        except NonFiniteLogitsError as error:
            for output in error.outputs:
                self._fail(output, "non_finite", str(error))
            return
        except Exception as error:  # counted: the requests fail by name, and a series of them ends the process
            self._survive(error)
            return
        self._num_failed_steps = 0
        self._report_running()
        for output in outputs:
            self._report_end(output)
        if self.profiler is not None:
            self.profiler.step(self)

    def _survive(self, error: Exception) -> None:
        traceback.print_exc()
        self._num_failed_steps += 1
        for output in self.engine.discard(list(self._held)):
            self._fail(output, "internal", f"a step of the engine failed: {type(error).__name__}: {error}")
        self._tell()
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise error
        # Where pages are no longer accounted for, only a new process will do.
        self.engine.check()

    def _report_running(self) -> None:
        """What the step sampled for requests that go on."""
        slots: list[int] = []
        token_ids: list[int] = []
        logprobs: list[float] = []
        for sequence in self.engine.scheduler.running:
            held = self._held[sequence.request_id]
            num_sampled = len(sequence.logprobs)
            if held.began is None:
                held.began = time.monotonic()
            if num_sampled == held.num_told:
                continue
            for i in range(held.num_told - num_sampled, 0):
                slots.append(held.slot)
                token_ids.append(sequence.token_ids[i])
                logprobs.append(sequence.logprobs[i])
            held.num_told = num_sampled
            if held.stream is not None and (delta := held.stream.take()) is not None:
                self._told.append(StreamPiece(held.slot, delta))
        if slots:
            self._told.append(Progress(self.engine.weights.version, slots, token_ids, logprobs))

    def _report_end(self, output: GenerationOutput) -> None:
        held = self._drop(output.request_id)
        if held is not None:
            began = held.began or time.monotonic()
            self._told.append(Ended(held.slot, output, output.num_retractions, began - held.arrived))

    def _fail(self, output: GenerationOutput, kind: Any, message: str) -> None:
        held = self._drop(output.request_id)
        if held is not None:
            self._told.append(Failed(held.slot, kind, message, output))

    def _drop(self, request_id: str) -> Held | None:
        held = self._held.pop(request_id, None)
        if held is not None:
            del self._by_slot[held.slot]
        return held

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= _BEAT_S:
            self._beat_at = now
            self._told.append(self.beat())
        if self._told:
            told, self._told = self._told, []
            self._channel.send(told)

    def beat(self) -> Beat:
        engine = self.engine
        pool = engine.pool
        counters = {k: v for k, v in asdict(engine.stats).items() if k.startswith("num_") and isinstance(v, int)}
        state = "updating" if self.desk.holds_steps else engine.state
        return Beat(
            state=state,
            version=engine.weights.version,
            pause_mode=engine.pause_mode,
            released=tuple(engine.released),
            open_update=self.desk.open_version,
            reason=engine.why_incomplete if state == "weights_invalid" else "",
            num_running=len(engine.scheduler.running),
            num_waiting=len(engine.scheduler.waiting),
            num_used_tokens=pool.num_owned_pages * pool.page_size,
            num_cached_tokens=pool.num_cached_pages * pool.page_size,
            kv_tokens=pool.num_tokens,
            counters=counters,
        )
