"""A pool of worker processes with a deadline for each call.

Each place in the pool has a thread of its own that does nothing but wait: it takes a call, hands it to its worker, and
where no answer comes in time kills the worker and goes on with the next one. A call that hangs costs its own place, for
its own deadline; it never costs another call.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from unison.core.errors import WorkerError
from unison.processes.process import GoneError, LateError, Launch, RefusedError, WorkerProcess
from unison.processes.protocol import MAX_CALL_BYTES, Answer, Call, FailureKind, Raised, Reply

DEFAULT_START_TIMEOUT_S: Final = 120.0
DEFAULT_MAX_WAIT_S: Final = 3600.0
_NUM_LATER_STARTS: Final = 3
_MAX_PAYLOAD_BYTES: Final = MAX_CALL_BYTES - (1 << 10)
_NOTICE_SHARE: Final = 0.25
"""A call that has used this share of its time has a successor to its worker started, so that none is waited for."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A call that got no answer: its kind, and the reason for people."""

    kind: FailureKind
    reason: str


Outcome = bytes | Failed


@dataclass(slots=True)
class _Job:
    payload: bytes
    seed: int
    timeout_s: float
    future: Future[Outcome] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)


class WorkerPool:
    """``size`` processes that answer calls to the service at ``target``.

    ``target`` is a ``module:object`` of trusted code, called in each worker with ``argument``; what it returns is
    called with each payload and has a ``description`` (``unison.processes.worker.Service``). ``memory_mb`` bounds a
    worker's address space. Raises WorkerError, with the worker's reason, where the first one cannot open its service.

    A pool that is closed, left as a context, garbage or of a process that ended, however it ended, leaves no process.
    """

    def __init__(
        self,
        target: str,
        argument: bytes = b"",
        *,
        size: int,
        memory_mb: int | None = None,
        start_timeout_s: float = DEFAULT_START_TIMEOUT_S,
        max_wait_s: float = DEFAULT_MAX_WAIT_S,
    ) -> None:
        if size < 1:
            raise WorkerError(f"a pool of {size} workers answers nothing; give at least 1")
        launch = Launch(target, argument, memory_mb)
        self._crew = _Crew(launch, size, start_timeout_s, max_wait_s)
        # The threads hold the crew alone, so that a pool nobody holds any more is closed.
        self._closer = weakref.finalize(self, self._crew.close)
        try:
            self.description = self._crew.first.result()
        except BaseException:
            self.close()
            raise

    def submit(self, payload: bytes, *, timeout_s: float, seed: int = 0) -> Future[Outcome]:
        """Hand over one call. ``timeout_s`` counts from when a worker begins it; ``seed`` seeds its random numbers.

        The future brings the answer or how the call failed; it raises WorkerError where the pool itself fails: closed,
        no worker can be started any more, or no worker was free within ``max_wait_s``.
        """
        job = _Job(payload, seed, timeout_s)
        if len(payload) > _MAX_PAYLOAD_BYTES:
            job.future.set_result(Failed("error", f"a call of {len(payload)} bytes; at most {_MAX_PAYLOAD_BYTES} go"))
        else:
            self._crew.put(job)
        return job.future

    async def call(self, payload: bytes, *, timeout_s: float, seed: int = 0) -> Outcome:
        """As ``submit``, awaited."""
        return await asyncio.wrap_future(self.submit(payload, timeout_s=timeout_s, seed=seed))

    @property
    def num_restarts(self) -> int:
        """Workers replaced so far."""
        return self._crew.num_restarts

    @property
    def pids(self) -> list[int]:
        """Processes of the workers there are."""
        return self._crew.pids()

    def close(self) -> None:
        """Kill the workers; calls under way and waiting raise WorkerError. A second close does nothing."""
        self._closer()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Crew:
    """What the threads of a pool share."""

    def __init__(self, launch: Launch, size: int, start_timeout_s: float, max_wait_s: float) -> None:
        self.first: Future[bytes] = Future()
        """The description of the first worker that is ready, or why it could not be."""
        self.start_timeout_s = start_timeout_s
        self.max_wait_s = max_wait_s
        self.num_restarts = 0
        self._launch = launch
        self._size = size
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers: set[WorkerProcess] = set()
        self._closed = False
        self._guard = _start_guard()
        self._threads = [
            threading.Thread(target=_Place(self).serve, name=f"worker-{i}", daemon=True) for i in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise WorkerError("the worker pool is closed")
            self._jobs.put(job)

    def take(self) -> _Job | None:
        """The next job; None when the pool closes."""
        return self._jobs.get()

    def hire(self) -> WorkerProcess:
        """A new worker, which is still starting. Raises WorkerError where there can be none."""
        with self._lock:
            if self._closed:
                raise WorkerError("the worker pool was closed")
            try:
                worker = WorkerProcess(self._launch)
            except OSError as error:
                raise WorkerError(f"a worker process cannot be started: {error}") from error
            self._workers.add(worker)
            self._tell_guard(b"+%d\n" % worker.pid)
        return worker

    def dismiss(self, worker: WorkerProcess, *, is_gone: bool = False) -> str:
        """End a worker; how it ended."""
        how = worker.bury(is_gone=is_gone)
        with self._lock:
            self._workers.discard(worker)
            self._tell_guard(b"-%d\n" % worker.pid)
        return how

    def count_restart(self) -> None:
        with self._lock:
            self.num_restarts += 1

    def pids(self) -> list[int]:
        with self._lock:
            return [worker.pid for worker in self._workers]

    @property
    def closed(self) -> bool:
        return self._closed

    def waiting(self) -> str:
        """What a call waits for, for people."""
        return f"one of {self._size} workers (processes {', '.join(map(str, self.pids()))})"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
            # Their threads see them end, and bury them.
            for worker in self._workers:
                worker.kill()
        for thread in self._threads:
            thread.join()
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None and job.future.set_running_or_notify_cancel():
                job.future.set_exception(WorkerError("the worker pool was closed before this call had its turn"))
        assert self._guard.stdin is not None  # asked for in _start_guard
        self._guard.stdin.close()
        self._guard.wait()

    def _tell_guard(self, line: bytes) -> None:
        assert self._guard.stdin is not None  # asked for in _start_guard
        try:
            self._guard.stdin.write(line)
        except BrokenPipeError:
            # Somebody killed it. Workers still end with this process; a new one would have to learn all groups.
            self._guard.wait()


class _Place:
    """One place of the pool: its worker, and the successor that is got ready while a call takes long."""

    def __init__(self, crew: _Crew) -> None:
        self._crew = crew
        self._worker: WorkerProcess | None = None
        self._successor: WorkerProcess | None = None
        self._num_calls = 0

    def serve(self) -> None:
        """The thread's whole life."""
        self._open_first()
        while (job := self._crew.take()) is not None and not self._crew.closed:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                job.future.set_result(self._run(job))
            except BaseException as error:  # the caller's to judge: the future raises it there
                job.future.set_exception(error)
        if job is not None and job.future.set_running_or_notify_cancel():
            job.future.set_exception(WorkerError("the worker pool was closed before this call had its turn"))
        for worker in (self._worker, self._successor):
            if worker is not None:
                self._crew.dismiss(worker)

    def _open_first(self) -> None:
        first = self._crew.first
        try:
            description = self._ready_worker(num_starts=1).greet(self._crew.start_timeout_s)
        except BaseException as error:  # raised by whoever opens the pool
            failure = error
            _settle(lambda: first.set_exception(failure))
        else:
            _settle(lambda: first.set_result(description))

    def _run(self, job: _Job) -> Outcome:
        waited_s = time.monotonic() - job.submitted
        if waited_s > self._crew.max_wait_s:
            raise WorkerError(f"a call waited {waited_s:.0f} s for {self._crew.waiting()}; start more workers")
        worker = self._ready_worker(_NUM_LATER_STARTS)
        self._num_calls += 1
        call = Call(self._num_calls, job.seed, job.payload)
        try:
            reply = worker.call(call, job.timeout_s, _NOTICE_SHARE * job.timeout_s, self._prepare_successor)
        except LateError:
            self._replace(worker)
            return Failed("timeout", f"ran past its limit of {job.timeout_s:g} s")
        except GoneError as error:
            how = self._replace(worker, is_gone=True)
            if self._crew.closed:
                raise WorkerError("the worker pool was closed during this call") from error
            return Failed("crash", how if how.startswith("its process") else str(error))
        return self._judge(worker, call, reply)

    def _judge(self, worker: WorkerProcess, call: Call, reply: Reply) -> Outcome:
        if isinstance(reply, (Answer, Raised)) and reply.call_id == call.call_id:
            if isinstance(reply, Answer):
                return reply.payload
            if reply.kind == "memory":
                # What filled it may still be held; the next call is not to pay for that.
                self._replace(worker)
            return Failed(reply.kind, reply.reason)
        self._replace(worker)
        return Failed("crash", "its process answered out of turn")

    def _replace(self, worker: WorkerProcess, *, is_gone: bool = False) -> str:
        self._worker, self._successor = self._successor, None
        self._crew.count_restart()
        return self._crew.dismiss(worker, is_gone=is_gone)

    def _prepare_successor(self) -> None:
        if self._successor is None and not self._crew.closed:
            self._successor = self._crew.hire()

    def _ready_worker(self, num_starts: int) -> WorkerProcess:
        """The place's worker, its service open. Raises WorkerError after so many failed starts."""
        reason = ""
        for _ in range(num_starts):
            worker = self._worker = self._worker or self._successor or self._crew.hire()
            if worker is self._successor:
                self._successor = None
            try:
                worker.greet(self._crew.start_timeout_s)
            except RefusedError as error:
                reason = str(error)
            except LateError:
                reason = f"a worker was not ready {self._crew.start_timeout_s:g} s after its start"
            except GoneError as error:
                reason = f"a worker ended while it started: {error}"
            else:
                return worker
            self._worker = None
            self._crew.count_restart()
            how = self._crew.dismiss(worker, is_gone=True)
            if how.startswith("its process") and "ended" in reason:
                reason = f"a worker could not start: {how}"
        raise WorkerError(reason)


def _settle(settle: Callable[[], None]) -> None:
    """Several places start at once; the first to know decides."""
    with contextlib.suppress(InvalidStateError):
        settle()


def _start_guard() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )
