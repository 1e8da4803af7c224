"""Weights over a process group: trainers made for SGLang meet us, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from tests.conftest import TinyModelDir
from tests.weights import senders
from tests.weights.test_buffers import arena_store, changed, layout_of, written
from unison.core.errors import WeightUpdateError
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.weights.checksum import weights_checksum
from unison.weights.group import Group, Groups, join_group, listen, receive_group
from unison.weights.manifest import BufferLayout, TensorEntry


@pytest.fixture
def model(tiny_model_dir: TinyModelDir) -> Decoder:
    return load_model(tiny_model_dir("qwen3"), torch.bfloat16)


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts senders, and ends those that still run."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        processes.append(senders.start(*arguments))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def pair(name: str = "weights", timeout_s: float = 10.0) -> tuple[Group, Group]:
    """Sender and receiver in two threads of this process."""
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    found: list[Group] = []
    thread = threading.Thread(
        target=lambda: found.append(join_group(name, "127.0.0.1", port, 1, 2, timeout_s=timeout_s))
    )
    thread.start()
    sender = join_group(name, "127.0.0.1", port, 0, 2, timeout_s=timeout_s, listener=listener)
    thread.join()
    return sender, found[0]


@contextlib.contextmanager
def sending(action: Callable[[], None]) -> Iterator[None]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except WeightUpdateError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_a_trainer_made_for_sglang_meets_us(started: Callable[..., subprocess.Popen[str]]) -> None:
    port, sizes = free_port(), [7, 1000, 300_000]
    trainer = started("send_foreign", "slime", port, ",".join(map(str, sizes)))
    group = join_group("slime", "127.0.0.1", port, 1, 2, timeout_s=20)
    entries, end = [], 0
    for i, size in enumerate(sizes):
        entries.append(TensorEntry(str(i), "bfloat16", (size,), end))
        end += 2 * size
    for flattened in (False, True):
        memory = torch.zeros(end, dtype=torch.uint8)
        group.receive_bucket(BufferLayout(tuple(entries), end), memory, flattened=flattened, timeout_s=20)
        for i, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
            part = memory[entry.offset : entry.offset + 2 * size]
            assert torch.equal(part.view(torch.bfloat16), senders.values(size, i))
    group.leave()
    assert trainer.wait(20) == 0


@pytest.mark.parametrize("flattened", [True, False])
@pytest.mark.parametrize("staging", ["shadow", "in_place"])
def test_buckets_over_a_group_are_an_update(model: Decoder, staging: str, flattened: bool) -> None:
    store = arena_store(model, "shadow" if staging == "shadow" else "in_place")
    sender, receiver = pair()
    for version in (1, 2, 3):
        new = changed(model, 1.0 + version)
        names = list(new)
        transaction = store.begin(version)
        for part in (names[:9], names[9:]):
            tensors = {name: new[name] for name in part}
            layout = layout_of(tensors)
            memory = written(layout, tensors)
            what: Tensor | list[Tensor] = memory if flattened else list(tensors.values())
            with sending(lambda what=what: sender.send_bucket(what)):
                received = receive_group(transaction, receiver, layout, flattened=flattened, timeout_s=10)
            assert received.num_tensors == len(part)
        assert transaction.prepare(weights_checksum(new)).num_tensors == len(names)
        transaction.commit()
        assert all(torch.equal(tensor, new[name]) for name, tensor in published_tensors(model).items())
    sender.leave(), receiver.leave()


def test_a_bucket_of_the_own_layout_needs_no_other_memory(model: Decoder) -> None:
    store = arena_store(model)
    sender, receiver = pair()
    new = changed(model)
    layout = store.layout.published
    memory = written(layout, new)
    transaction = store.begin(1)
    with sending(lambda: sender.send_bucket(memory)):
        receive_group(transaction, receiver, layout, flattened=True, timeout_s=10)
    assert receiver._buffer is None
    transaction.prepare(weights_checksum(new))
    transaction.commit()
    sender.leave(), receiver.leave()


def test_a_refused_bucket_does_not_leave_its_sender_waiting(model: Decoder) -> None:
    store = arena_store(model)
    sender, receiver = pair()
    new = changed(model)
    foreign = BufferLayout((TensorEntry("foreign", "bfloat16", (1000, 1000), 0),), 2_000_000)
    transaction = store.begin(1)
    with (
        sending(lambda: sender.send_bucket(torch.zeros(2_000_000, dtype=torch.uint8))),
        pytest.raises(WeightUpdateError, match="'foreign' has no place"),
    ):
        receive_group(transaction, receiver, foreign, flattened=True, timeout_s=10)
    layout = layout_of(new)
    with sending(lambda: sender.send_bucket(list(new.values()))):
        receive_group(transaction, receiver, layout, flattened=False, timeout_s=10)
    transaction.prepare(weights_checksum(new))
    transaction.commit()
    sender.leave(), receiver.leave()


@pytest.mark.parametrize("flattened", [True, False])
def test_a_sender_that_sends_too_little_is_found_out(model: Decoder, flattened: bool) -> None:
    transaction = arena_store(model).begin(1)
    sender, receiver = pair()
    new = changed(model)
    layout = layout_of(new)
    short = written(layout, new)[:-2] if flattened else [tensor[:-1] for tensor in new.values()]
    with (
        sending(lambda: sender.send_bucket(short)),
        pytest.raises(WeightUpdateError, match="rank 0 sent fewer bytes"),
    ):
        receive_group(transaction, receiver, layout, flattened=flattened, timeout_s=10)
    with pytest.raises(WeightUpdateError, match="25 of 25 tensors were never written"):
        transaction.prepare()
    sender.leave(), receiver.leave()


def test_a_bucket_without_bounds_is_not_received(model: Decoder) -> None:
    transaction = arena_store(model).begin(1)
    sender, receiver = pair()
    huge = BufferLayout((TensorEntry("foreign", "float32", (1 << 40,), 0),), 1 << 42)
    with pytest.raises(WeightUpdateError, match="larger than this model can need"):
        receive_group(transaction, receiver, huge, flattened=True, timeout_s=10)
    senseless = BufferLayout((TensorEntry("foreign", "float32", (8,), -1),), 64)
    with pytest.raises(WeightUpdateError, match="cannot have shape"):
        receive_group(transaction, receiver, senseless, flattened=True, timeout_s=10)
    sender.leave(), receiver.leave()


def test_a_sender_killed_in_the_middle_is_an_error_and_the_old_version_serves(
    started: Callable[..., subprocess.Popen[str]], model: Decoder
) -> None:
    store = arena_store(model)
    old = weights_checksum(published_tensors(model))
    port, layout = free_port(), store.layout.published
    started("die_foreign", "g", port, layout.num_bytes)
    group = join_group("g", "127.0.0.1", port, 1, 2, timeout_s=20)
    group.receive_bucket(BufferLayout((TensorEntry("x", "bfloat16", (8,), 0),), 16), group.buffer(16))
    transaction = store.begin(1)
    begun = time.monotonic()
    time.sleep(1)
    with pytest.raises(WeightUpdateError, match=r"group 'g': rank 0 \(the trainer\) is gone or silent"):
        for _ in range(2):
            # What was in flight may still arrive whole.
            group.receive_bucket(layout, group.buffer(layout.num_bytes), flattened=True, timeout_s=15)
    assert time.monotonic() - begun < 10
    with pytest.raises(WeightUpdateError, match="join it again"):
        receive_group(transaction, group, layout, flattened=True, timeout_s=5)
    transaction.abort()
    assert (store.version, store.complete, store.weights_checksum()) == (0, True, old)


def test_a_silent_sender_is_waited_for_no_longer_than_said(started: Callable[..., subprocess.Popen[str]]) -> None:
    port = free_port()
    trainer = started("stall_foreign", "g", port)
    group = join_group("g", "127.0.0.1", port, 1, 2, timeout_s=20)
    begun = time.monotonic()
    with pytest.raises(WeightUpdateError, match="gone or silent"):
        group.receive_bucket(BufferLayout((), 64), group.buffer(64), flattened=True, timeout_s=0.5)
    assert 0.4 < time.monotonic() - begun < 3
    trainer.communicate("\n", 20)


def test_without_a_master_joining_ends_in_time_and_says_so() -> None:
    port = free_port()
    begun = time.monotonic()
    with pytest.raises(WeightUpdateError, match=rf"group 'g' at 127.0.0.1:{port}: rank 0 never listened there"):
        join_group("g", "127.0.0.1", port, 1, 2, timeout_s=0.5)
    assert time.monotonic() - begun < 2


def silent_master() -> TCPStore:
    """A master whose rank 0 goes no further, or meets its ranks elsewhere."""
    return TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(WeightUpdateError, match=r"within 0.5 s: of 3 ranks these did not join: 1, 2$"):
        join_group("g", "127.0.0.1", free_port(), 0, 3, timeout_s=0.5)
    master = silent_master()
    with pytest.raises(WeightUpdateError, match=r"of 3 ranks these did not join: 0, 1$"):
        join_group("g", "127.0.0.1", master.port, 2, 3, timeout_s=0.5)


def test_a_trainer_with_a_default_group_is_told_what_to_do() -> None:
    master = silent_master()
    with pytest.raises(WeightUpdateError, match="did not join: 0; the trainer must make its group over PrefixStore"):
        join_group("g", "127.0.0.1", master.port, 1, 2, timeout_s=0.5)


def test_a_name_can_be_used_again_left_or_not() -> None:
    groups = Groups()
    with pytest.raises(WeightUpdateError, match="'w' was not joined here"):
        groups.leave("w")
    for round_ in range(3):
        listener = listen("127.0.0.1")
        port = listener.getsockname()[1]
        thread = threading.Thread(target=lambda port=port: groups.join("w", "127.0.0.1", port, 1, 2, "gloo", 10))
        thread.start()
        sender = join_group("w", "127.0.0.1", port, 0, 2, timeout_s=10, listener=listener)
        thread.join()
        memory = torch.zeros(8, dtype=torch.uint8)
        with sending(lambda sender=sender, round_=round_: sender.send_bucket(torch.full((8,), round_).byte())):
            groups.find("w").receive_bucket(BufferLayout((), 8), memory, flattened=True)
        assert memory.tolist() == [round_] * 8
        if round_ == 0:
            groups.leave("w")
        sender.leave()


def test_three_engines_receive_the_same() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    layout, seen = BufferLayout((TensorEntry("x", "float32", (50_000,), 0),), 200_000), [torch.zeros(0)] * 3

    def engine(rank: int) -> None:
        group = join_group("g", "127.0.0.1", port, rank, 4, timeout_s=10)
        for flattened in (True, False):
            memory = torch.zeros(200_000, dtype=torch.uint8)
            group.receive_bucket(layout, memory, flattened=flattened, timeout_s=10)
            seen[rank - 1] = torch.cat([seen[rank - 1], memory.view(torch.float32)])
        group.leave()

    threads = [threading.Thread(target=engine, args=(rank,)) for rank in (1, 2, 3)]
    for thread in threads:
        thread.start()
    sender = join_group("g", "127.0.0.1", port, 0, 4, timeout_s=10, listener=listener)
    sent = torch.randn(50_000)
    sender.send_bucket(sent)
    sender.send_bucket([sent])
    for thread in threads:
        thread.join(20)
    sender.leave()
    assert all(torch.equal(received, torch.cat([sent, sent])) for received in seen)


def test_a_trainer_learns_that_an_engine_is_gone() -> None:
    sender, receiver = pair()
    receiver.leave()
    begun = time.monotonic()
    with pytest.raises(WeightUpdateError, match="an engine is gone or silent"):
        for _ in range(3):
            sender.send_bucket(torch.zeros(4 << 20), timeout_s=5)
    assert time.monotonic() - begun < 10


def listening() -> list[str]:
    """Addresses at which this process listens, as the kernel prints them."""
    own = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(path))
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{kind}").read_text().split("\n")]
    return [row[1].split(":")[0] for row in rows if row and row[3] == "0A" and f"socket:[{row[9]}]" in own]


def test_a_group_on_loopback_listens_nowhere_else() -> None:
    before = Counter(listening())
    sender, receiver = pair()
    assert (Counter(listening()) - before).keys() == {"0100007F"}
    sender.leave(), receiver.leave()


def test_a_trainer_that_stops_while_it_is_joined_is_an_error_in_time(
    started: Callable[..., subprocess.Popen[str]],
) -> None:
    master = started("store_only")
    assert master.stdout is not None
    port = int(master.stdout.readline())
    os.kill(master.pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(WeightUpdateError, match=f"group 'g' at 127.0.0.1:{port}: rank 0 does not answer"):
        join_group("g", "127.0.0.1", port, 1, 2, timeout_s=1)
    assert time.monotonic() - begun < 5


def test_a_port_where_something_else_listens_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        begun = time.monotonic()
        with pytest.raises(WeightUpdateError, match="rank 0 does not answer"):
            join_group("g", "127.0.0.1", server.getsockname()[1], 1, 2, timeout_s=1)
        assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "needs a name"),
        ({"port": 0}, "port 0"),
        ({"port": 70000}, "port 70000"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank -1 of 2"),
        ({"world_size": 1}, "rank 1 of 1"),
        ({"backend": "mpi"}, "backend='mpi' is unknown; use one of gloo, nccl"),
        ({"backend": "nccl"}, "needs CUDA"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(change: dict[str, object], message: str) -> None:
    if change == {"backend": "nccl"} and torch.cuda.is_available():
        message = "rank 0 never listened"
    settings = {"name": "g", "address": "127.0.0.1", "port": 9, "rank": 1, "world_size": 2, "timeout_s": 0.1} | change
    with pytest.raises(WeightUpdateError, match=message):
        join_group(**settings)  # type: ignore[arg-type]


def test_a_receiver_does_not_send() -> None:
    sender, receiver = pair()
    with pytest.raises(WeightUpdateError, match="rank 0 does"):
        receiver.send_bucket(torch.zeros(1))
    sender.leave(), receiver.leave()
