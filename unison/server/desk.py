"""Weight updates on the engine's side: a thread of its own receives them, one command after the other.

Under ``shadow`` what is received goes to the copy that nobody reads, while the engine steps on; only the swap happens
between two steps. Under ``in_place`` no step is taken from the beginning of an update to its end.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from unison.core.errors import WeightUpdateError
from unison.core.faults import fault_point
from unison.engine.engine import Engine
from unison.models.names import published_tensors
from unison.server.messages import (
    AbortUpdate,
    Action,
    BeginUpdate,
    CommitUpdate,
    JoinGroup,
    LeaveGroup,
    PrepareUpdate,
    RegisterLayout,
    Reply,
    StageBytes,
    StageDisk,
    StageGroup,
    StageHandle,
)
from unison.server.replies import answered
from unison.weights.disk import stage_from_disk
from unison.weights.group import Groups, receive_group
from unison.weights.handles import Mappings, Received, receive_handle
from unison.weights.manifest import BufferLayout
from unison.weights.transaction import WeightTransaction

Result = dict[str, Any]
T = TypeVar("T")
_EXIT_FAILED: Final = 1
DESK_ACTIONS: Final = (
    BeginUpdate,
    RegisterLayout,
    StageHandle,
    StageBytes,
    StageGroup,
    StageDisk,
    JoinGroup,
    LeaveGroup,
    PrepareUpdate,
    CommitUpdate,
    AbortUpdate,
)


class UpdateDesk:
    """At most one update is open; its commands are done in the order in which they came."""

    def __init__(
        self, engine: Engine, between_steps: Callable[[Callable[[], None]], None], reply: Callable[[Reply], None]
    ) -> None:
        """``between_steps`` has the main thread run something; ``reply`` takes answers from any thread."""
        self._engine = engine
        self._between_steps = between_steps
        self._reply = reply
        self._open: WeightTransaction | None = None
        self._groups = Groups()
        self._mappings = Mappings()
        self._commands: queue.SimpleQueue[tuple[int, Action] | None] = queue.SimpleQueue()
        self._told = 0
        """The command that was answered before it was done with."""
        self.holds_steps = False
        """Whether an in_place update is open. Written by the main thread alone."""
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    @property
    def open_version(self) -> int | None:
        return None if self._open is None else self._open.version

    def put(self, call_id: int, action: Action) -> None:
        self._commands.put((call_id, action))

    def close(self) -> None:
        """No further command is begun. One that waits for a sender goes down with the process."""
        self._commands.put(None)

    def _serve(self) -> None:
        while (item := self._commands.get()) is not None:
            call_id, _ = item
            reply = answered(call_id, lambda item=item: self._handle(*item))  # type: ignore[misc]
            if call_id != self._told:
                self._reply(reply)

    def _handle(self, call_id: int, action: Action) -> Result:
        match action:
            case BeginUpdate():
                return self._begin(action)
            case RegisterLayout(layout):
                return {"layout_id": self._engine.weights.layouts.register(layout)}
            case StageHandle() | StageBytes() | StageGroup() | StageDisk():
                return self._stage(action)
            case JoinGroup() | LeaveGroup():
                return self._change_groups(action)
            case PrepareUpdate(version, checksum):
                prepared = self._transaction(version).prepare(checksum)
                fault_point("server.prepared")
                return {
                    "checksum": prepared.checksum,
                    "num_tensors": prepared.num_tensors,
                    "seconds": dict(prepared.seconds),
                }
            case CommitUpdate(version):
                return self._commit(call_id, version)
            case AbortUpdate():
                return self._abort(action)
        raise WeightUpdateError(f"{type(action).__name__} is no command of an update")

    def _on_main(self, action: Callable[[], T]) -> T:
        """Have ``action`` run between two steps, and wait for it."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(action())
            except BaseException as error:  # raised in the thread that waits for it
                done.set_exception(error)

        self._between_steps(run)
        return done.result()

    def _begin(self, action: BeginUpdate) -> Result:
        if action.target != "base":
            raise WeightUpdateError(f"target={action.target!r} is not supported by this engine; only base is")

        def begin() -> WeightTransaction:
            transaction = self._engine.begin_update(action.version)
            self.holds_steps = self._engine.weights.staging == "in_place"
            return transaction

        self._open = self._on_main(begin)
        return {"version": action.version, "staging": self._engine.weights.staging}

    def _transaction(self, version: int) -> WeightTransaction:
        if self._open is None:
            raise WeightUpdateError(f"no update to version {version} is open; begin one first")
        if self._open.version != version:
            raise WeightUpdateError(f"the open update is to version {self._open.version}, not {version}")
        return self._open

    def _layout(self, layout_id: str, layout: BufferLayout | None) -> BufferLayout:
        return self._engine.weights.layouts.find(layout_id) if layout is None else layout

    def _stage(self, action: StageHandle | StageBytes | StageGroup | StageDisk) -> Result:
        transaction = self._transaction(action.version)
        started = time.perf_counter()
        received = self._receive(transaction, action)
        fault_point("server.staged")
        return {
            "num_tensors": received.num_tensors,
            "seconds": {**received.seconds, "all": time.perf_counter() - started},
        }

    def _receive(
        self, transaction: WeightTransaction, action: StageHandle | StageBytes | StageGroup | StageDisk
    ) -> Received:
        match action:
            case StageHandle(_, handle, layout_id, layout, checksum):
                return receive_handle(transaction, handle, self._layout(layout_id, layout), checksum, self._mappings)
            case StageBytes(_, layout, data):
                memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                return Received(transaction.stage_buffer(layout, memory), {})
            case StageGroup(_, name, layout, layout_id, flattened, timeout_s):
                group, found = self._groups.find(name), self._layout(layout_id, layout)
                return receive_group(transaction, group, found, flattened=flattened, timeout_s=timeout_s)
            case StageDisk(_, path):
                weights = self._engine.weights
                live = published_tensors(weights.model) if weights.complete else {}
                staged = stage_from_disk(transaction, Path(path), live, weights.version, None, spec=weights.model.spec)
                return Received(staged.num_tensors, {})

    def _change_groups(self, action: JoinGroup | LeaveGroup) -> Result:
        if isinstance(action, JoinGroup):
            self._groups.join(
                action.name,
                action.address,
                action.port,
                action.rank,
                action.world_size,
                action.backend,
                action.timeout_s,
            )
        else:
            self._groups.leave(action.name)
        return {}

    def _commit(self, call_id: int, version: int) -> Result:
        transaction = self._transaction(version)
        if not transaction.is_prepared:
            transaction.prepare()

        def commit() -> Result:
            commit = self._engine.commit_update(transaction)
            self._open, self.holds_steps = None, False
            result = {
                "version": commit.version,
                "num_tensors": commit.num_tensors,
                "checksum": commit.checksum,
                "live": self._engine.weights.live_index,
                "seconds": dict(commit.seconds),
            }
            # Told before any token of this version, and with the beat that calls the weights whole: should the process
            # die in the next moment, the front end knows what was live, or that nothing has come of it.
            self._reply(Reply(call_id, result))
            self._told = call_id
            return result

        try:
            result = self._on_main(commit)
            fault_point("server.committed")
        except Exception:
            if self._engine.weights.version != version:
                raise
            # It is live, and the front end would take it for refused: only a new process serves what that one knows.
            traceback.print_exc()
            os._exit(_EXIT_FAILED)
        return result

    def _abort(self, action: AbortUpdate) -> Result:
        transaction = self._open
        if transaction is None or (action.version is not None and action.version != transaction.version):
            return {"aborted": None}

        def abort() -> None:
            transaction.abort()
            self._open, self.holds_steps = None, False
            if not self._engine.weights.complete:
                self._engine.invalidate_weights(
                    f"the update to version {transaction.version} was given up"
                    + (f" ({action.reason})" if action.reason else "")
                )

        self._on_main(abort)
        return {"aborted": transaction.version}
