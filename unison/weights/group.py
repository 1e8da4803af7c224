"""Weights over a process group of their own: a trainer as rank 0 broadcasts, engines receive.

The group is the one that SGLang's trainers make beside their default group: a TCPStore at address and port, seen
through the group's name, with the names torch gives the backend's keys below that. A trainer that calls plain
``init_process_group`` meets nobody, since its keys lie elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from unison.core.errors import UnisonError, WeightUpdateError
from unison.weights.buffers import check_memory
from unison.weights.handles import Received
from unison.weights.manifest import BufferLayout
from unison.weights.transaction import WeightTransaction

_DEVICES: Final = {"gloo": "cpu", "nccl": "cuda"}
_POLL_S: Final = 0.05
_GRACE_S: Final = 0.5
"""After a deadline, to find out who is missing."""
_TAIL_BYTES: Final = 2
_NO_BYTE: Final = 0xFF
"""Two of these at the end of a number make it NaN, in every dtype that weights have."""
_MAX_EXCESS: Final = 4
"""A buffer is at most so many times larger than the model: float32 for bfloat16 makes 2, gaps the rest."""


def listen(address: str, port: int = 0) -> socket.socket:
    """The socket at which rank 0 will be found; port 0 takes a free one. It listens at ``address`` alone."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        raise WeightUpdateError(f"no group can be opened at {address}:{port}: {error}") from error


class Group:
    """This process's membership of a group, made by ``join_group``. Not for several threads at once."""

    def __init__(self, name: str, rank: int, world_size: int, device: str, group: Any, store: Store) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._group: Any = group
        self._store: Store | None = store
        self._buffer: Tensor | None = None

    def send_bucket(self, tensors: Sequence[Tensor] | Tensor, timeout_s: float = 120.0) -> None:
        """Broadcast tensors one by one in their order, or one flat buffer. Rank 0 alone sends."""
        if self.rank:
            raise WeightUpdateError(f"rank {self.rank} of group {self.name!r} cannot send; rank 0 does")
        deadline = time.monotonic() + timeout_s
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
            self._broadcast(tensor.detach().contiguous(), deadline)

    def receive_bucket(
        self, layout: BufferLayout, memory: Tensor, *, flattened: bool = False, timeout_s: float = 120.0
    ) -> None:
        """Receive one broadcast of the whole buffer, or one per entry in list order, into flat uint8 ``memory``.

        Raises WeightUpdateError where the sender is gone, or is silent for ``timeout_s``: the group is of no use then.
        And where it sent less than the layout says. Sending more ends this process: gloo gives it no choice.
        """
        check_memory(memory, layout)
        deadline = time.monotonic() + timeout_s
        if flattened:
            last = max((entry.offset + entry.num_bytes for entry in layout.entries), default=0)
            whole = self._receive(memory[: layout.num_bytes], memory[:last], deadline)
        else:
            # Bytes, not values: what is on the way does not depend on the dtype, and offsets need no alignment.
            pieces = [memory[entry.offset : entry.offset + entry.num_bytes] for entry in layout.entries]
            # All of them, even after one that fell short: the sender waits until it has sent the last.
            whole = all([self._receive(piece, piece, deadline) for piece in pieces])
        if not whole:
            raise WeightUpdateError(
                f"group {self.name!r}: rank 0 sent fewer bytes than its layout says, or a tensor that ends with NaN"
            )

    def _receive(self, memory: Tensor, tensors: Tensor, deadline: float) -> bool:
        """Whether as many bytes came as ``memory`` has; ``tensors`` is the part of it that ends with a tensor."""
        tail = tensors[-_TAIL_BYTES:]
        tail.fill_(_NO_BYTE)
        self._broadcast(memory, deadline)
        # A message that is too short is taken without a word, and leaves the end as it was.
        return not len(tail) or bool((tail != _NO_BYTE).any())

    def buffer(self, num_bytes: int) -> Tensor:
        """Memory to receive into, kept for the next bucket."""
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self._buffer = None
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer

    def leave(self) -> None:
        """Close the connections. The name can be used anew afterwards; leaving twice does nothing."""
        self._group = None
        self._store = None
        self._buffer = None

    def _broadcast(self, tensor: Tensor, deadline: float) -> None:
        if self._group is None:
            raise WeightUpdateError(f"group {self.name!r} is closed, or was broken by an error; join it again")
        left_s = max(deadline - time.monotonic(), 0.001)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=left_s)
        try:
            self._group.broadcast([tensor], options).wait(timedelta(seconds=left_s + 1))
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
        except RuntimeError as error:
            self.leave()
            whom = "an engine" if self.rank == 0 else "rank 0 (the trainer)"
            raise WeightUpdateError(
                f"group {self.name!r}: {whom} is gone or silent: {_first_line(error)}; join the group again"
            ) from error


def join_group(
    name: str,
    address: str,
    port: int,
    rank: int,
    world_size: int,
    backend: str = "gloo",
    timeout_s: float = 60.0,
    listener: socket.socket | None = None,
) -> Group:
    """Meet the other ranks at address and port. Rank 0 may bring the socket of ``listen``, which passes to the group.

    Raises WeightUpdateError naming the ranks that did not come within ``timeout_s``.
    """
    _check(name, port, rank, world_size, backend, timeout_s)
    deadline = time.monotonic() + timeout_s
    where = f"group {name!r} at {address}:{port}"
    with _typed(f"{where} cannot be joined"):
        if rank == 0:
            listener = listener or listen(address, port)
            local = address
        else:
            local = _await_master(where, address, port, deadline)

    def meet() -> Group:
        with _typed(f"{where} cannot be joined"):
            if listener is not None:
                store = _open_store(listener, world_size, timeout_s)
            else:
                store = TCPStore(address, port, world_size, False, timeout=_left(deadline), multi_tenant=True)
        device = _DEVICES[backend]
        keys = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        keys.set_timeout(_left(deadline))
        try:
            group = _connect(keys, rank, world_size, backend, local, _left(deadline))
        except RuntimeError as error:
            missing = _who_is_missing(keys, rank, world_size, error)
            raise WeightUpdateError(f"{where} was not complete within {timeout_s:g} s: {missing}") from error
        return Group(name, rank, world_size, device, group, store)

    joined = _bounded(meet, deadline + _GRACE_S)
    if joined is None:
        raise WeightUpdateError(f"{where}: rank 0 does not answer; it has stopped, or something else listens there")
    return joined


class Groups:
    """The groups a process is in, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def join(
        self, name: str, address: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float
    ) -> Group:
        """As ``join_group``. A group of the same name is left first: its trainer has begun anew."""
        if name in self._groups:
            self.leave(name)
        self._groups[name] = join_group(name, address, port, rank, world_size, backend, timeout_s)
        return self._groups[name]

    def find(self, name: str) -> Group:
        """Raises WeightUpdateError for a group this process is not in."""
        if name not in self._groups:
            raise WeightUpdateError(f"group {name!r} was not joined here; joined are: {sorted(self._groups)}")
        return self._groups[name]

    def leave(self, name: str) -> None:
        """Raises WeightUpdateError for a group this process is not in."""
        self.find(name).leave()
        del self._groups[name]

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.leave(name)


def receive_group(
    transaction: WeightTransaction, group: Group, layout: BufferLayout, *, flattened: bool, timeout_s: float
) -> Received:
    """Receive one bucket and stage it: straight into the staging memory where its layout allows, else by a buffer.

    A bucket that is refused is received all the same, so that its sender is not left waiting; nothing of it is
    written. seconds: wait (until all bytes are here) and copy.
    """
    started = time.perf_counter()
    refusal: WeightUpdateError | None = None
    room: Tensor | None = None
    try:
        room = transaction.room_for(layout) if group.device == "cpu" else None
    except WeightUpdateError as error:
        refusal = error
    memory = group.buffer(_buffer_bytes(transaction, layout, refusal)) if room is None else room
    group.receive_bucket(layout, memory, flattened=flattened, timeout_s=timeout_s)
    waited = time.perf_counter()
    if refusal is not None:
        raise refusal
    num_tensors = transaction.stage_buffer(layout, memory) if room is None else transaction.received(layout)
    return Received(num_tensors, {"wait": waited - started, "copy": time.perf_counter() - waited})


def _buffer_bytes(transaction: WeightTransaction, layout: BufferLayout, refusal: WeightUpdateError | None) -> int:
    most = _MAX_EXCESS * sum(tensor.nbytes for tensor in transaction.targets.values()) + (1 << 20)
    sizes_known = all(entry.fits(layout.num_bytes) for entry in layout.entries)
    if refusal is not None and not sizes_known:
        raise refusal
    if layout.num_bytes > most:
        raise WeightUpdateError(f"a bucket of {layout.num_bytes} bytes is larger than this model can need ({most})")
    return layout.num_bytes


def _check(name: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float) -> None:
    if not name:
        raise WeightUpdateError("a group needs a name")
    if not 0 < port < 1 << 16:
        raise WeightUpdateError(f"port {port} is none; 1 to 65535 are")
    if world_size < 2 or not 0 <= rank < world_size:
        raise WeightUpdateError(
            f"rank {rank} of {world_size} is no place in group {name!r}; 0 sends, the others receive"
        )
    if backend not in _DEVICES:
        raise WeightUpdateError(f"backend={backend!r} is unknown; use one of {', '.join(_DEVICES)}")
    if backend == "nccl" and not torch.cuda.is_available():
        raise WeightUpdateError("backend='nccl' needs CUDA, which this process does not have; use gloo")
    if timeout_s <= 0:
        raise WeightUpdateError(f"timeout_s={timeout_s} must be above 0")


def _open_store(listener: socket.socket, world_size: int, timeout_s: float) -> Store:
    host, port = listener.getsockname()[:2]
    # Given a socket of ours, the store listens at our address instead of all there are.
    store: Store = TCPStore(
        host,
        port,
        world_size,
        True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store


def _await_master(where: str, address: str, port: int, deadline: float) -> str:
    """Wait until rank 0 listens; the address of this machine that it is reached from."""
    while True:
        try:
            with socket.create_connection((address, port), timeout=_left(deadline).total_seconds()) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() + _POLL_S >= deadline:
                raise WeightUpdateError(
                    f"{where}: rank 0 never listened there ({error}); the trainer must open the group at that address "
                    "while the engines join it"
                ) from error
            time.sleep(_POLL_S)


def _bounded(meet: Callable[[], Group], deadline: float) -> Group | None:
    """What ``meet`` returns or raises, None where it does not end in time.

    Torch waits for ever for a store that takes the connection and says nothing, so it waits in a thread of its own;
    that one ends with the connection, or with this process.
    """
    met: list[Group] = []
    errors: list[UnisonError] = []

    def run() -> None:
        try:
            met.append(meet())
        except UnisonError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="join-group", daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 0))
    if errors:
        raise errors[0]
    return met[0] if met else None


def _connect(keys: Store, rank: int, world_size: int, backend: str, local: str, timeout: timedelta) -> Any:
    if backend == "nccl":
        nccl: Any = dist.ProcessGroupNCCL
        return nccl(keys, rank, world_size, timeout)
    gloo: Any = dist.ProcessGroupGloo
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return gloo(keys, rank, world_size, timeout)
    options = gloo._Options()
    # By itself gloo listens at whatever the host's name stands for; the way to rank 0 is known to work.
    options._devices = [gloo.create_device(hostname=local)]
    options._timeout = timeout
    return gloo(keys, rank, world_size, options)


def _who_is_missing(keys: Store, rank: int, world_size: int, error: RuntimeError) -> str:
    missing: list[int] = []
    with contextlib.suppress(RuntimeError):
        # Each rank of gloo leaves its address under this key.
        missing = [other for other in range(world_size) if other != rank and not keys.check([f"0/{other}"])]
    if not missing:
        return f"not all of {world_size} ranks could connect: {_first_line(error)}"
    text = f"of {world_size} ranks these did not join: {', '.join(map(str, missing))}"
    if missing == [0]:
        # All others are there, and it listens: it looks for them elsewhere.
        return f"{text}; the trainer must make its group over PrefixStore(group name, store), not init_process_group"
    return text


@contextlib.contextmanager
def _typed(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WeightUpdateError):
            raise
        raise WeightUpdateError(f"{what}: {_first_line(error)}") from error


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
