"""Weights through shared memory: from a trainer's outbox into an engine's store, in one process and in two."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from tests.conftest import TinyModelDir
from tests.weights import senders
from tests.weights.test_buffers import EMBED, HEAD, NORM, arena_store, changed
from unison.core.errors import WeightUpdateError
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.processes.shared_memory import MemfdHandle, Segment, ShmHandle
from unison.weights.arena import ArenaLayout
from unison.weights.buffers import readable
from unison.weights.checksum import buffer_checksum, weights_checksum
from unison.weights.cuda_ipc import CudaIpcHandle, open_cuda, share_cuda
from unison.weights.handles import Mappings, receive_handle
from unison.weights.manifest import BufferLayout, TensorEntry
from unison.weights.outbox import Filled, Outbox


@pytest.fixture
def model(tiny_model_dir: TinyModelDir) -> Decoder:
    return load_model(tiny_model_dir("qwen3"), torch.bfloat16)


def masters(model: Decoder, seed: int) -> dict[str, Tensor]:
    """Float32 weights whose cast rounds."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in published_tensors(model).items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def cast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def bytes_of(filled: Filled, mappings: Mappings) -> Tensor:
    return mappings.memory(filled.handle)[: filled.layout.num_bytes]


@pytest.mark.parametrize("staging", ["shadow", "in_place"])
@pytest.mark.parametrize("max_bytes", [0, 1, 20_000, 1 << 30])
@pytest.mark.parametrize("num_copies", [1, 2])
def test_masters_arrive_as_their_cast(model: Decoder, staging: str, max_bytes: int, num_copies: int) -> None:
    store = arena_store(model, "shadow" if staging == "shadow" else "in_place")
    outbox = Outbox(store.layout, num_copies, max_bytes=max_bytes)
    mappings = Mappings()
    assert len(outbox.pieces) == {0: 1, 1: 25, 20_000: len(outbox.pieces), 1 << 30: 1}[max_bytes]
    assert (
        all(piece.num_bytes <= 20_000 or len(piece.entries) == 1 for piece in outbox.pieces) or len(outbox.pieces) == 1
    )
    for version in (1, 2, 3):
        new = masters(model, version)
        expected = weights_checksum(cast(new))
        transaction = store.begin(version)
        if len(outbox.pieces) == 1:
            filled = outbox.fill(new)
            assert filled.checksum == expected and filled.seconds.keys() == {"cast", "checksum"}
            received = receive_handle(transaction, filled.handle, filled.layout, None, mappings)
            assert received.num_tensors == len(new) and received.seconds.keys() == {"map", "checksum", "copy"}
        else:
            for filled in outbox.fill_pieces(new):
                assert len(store.layouts.plan(filled.layout).runs) == 1
                checksum = buffer_checksum(bytes_of(filled, mappings))
                receive_handle(transaction, filled.handle, filled.layout, checksum, mappings)
        assert outbox.checksum(new) == expected
        transaction.prepare(expected)
        transaction.commit()
        assert all(torch.equal(t, new[name].bfloat16()) for name, t in published_tensors(model).items())
    assert len(mappings) == min(num_copies, 3 if max_bytes in (0, 1 << 30) else num_copies)
    outbox.close()


def test_weights_of_the_models_dtype_are_copied_as_they_are(model: Decoder) -> None:
    outbox = Outbox(ArenaLayout.of(model.spec, model.dtype))
    new = changed(model)
    strided = {**new, EMBED: new[EMBED].t().contiguous().t()}
    assert outbox.fill(strided).checksum == weights_checksum(new)


def test_an_outbox_refuses_what_is_not_the_model(model: Decoder, tiny_model_dir: TinyModelDir) -> None:
    outbox = Outbox(ArenaLayout.of(model.spec, model.dtype))
    new = masters(model, 0)
    without = {name: tensor for name, tensor in new.items() if name != NORM}
    with pytest.raises(WeightUpdateError, match=f"'{NORM}' is missing"):
        outbox.fill(without)
    with pytest.raises(WeightUpdateError, match="'foreign' has no place"):
        outbox.fill({**new, "foreign": new[NORM]})
    with pytest.raises(WeightUpdateError, match=r"shape \[63\]; \[64\] is needed"):
        outbox.fill({**new, NORM: new[NORM][:-1]})
    with pytest.raises(WeightUpdateError, match="sends 25 pieces; use fill_pieces"):
        Outbox(outbox.layout, max_bytes=1).fill(new)
    with pytest.raises(WeightUpdateError, match="an outbox of 0 buffers"):
        Outbox(outbox.layout, 0)
    tied = load_model(tiny_model_dir("llama", tie_word_embeddings=True), torch.bfloat16)
    own = masters(tied, 0)
    box = Outbox(ArenaLayout.of(tied.spec, tied.dtype))
    assert box.fill({**own, HEAD: own[EMBED]}).checksum == weights_checksum(cast(own))
    with pytest.raises(WeightUpdateError, match=f"'{HEAD}' differs from the one it is tied to"):
        box.fill({**own, HEAD: own[EMBED] * 2})


def test_a_changed_byte_is_caught_before_anything_is_copied(model: Decoder) -> None:
    store = arena_store(model, "in_place")
    outbox, mappings = Outbox(store.layout), Mappings()
    filled = outbox.fill(masters(model, 0))
    memory = torch.frombuffer(outbox._segments[0].memory, dtype=torch.uint8)
    checksum = buffer_checksum(memory[: filled.layout.num_bytes])
    memory[77] ^= 4
    transaction = store.begin(1)
    with pytest.raises(WeightUpdateError, match=f"not {checksum[:16]} as its sender says"):
        receive_handle(transaction, filled.handle, filled.layout, checksum, mappings)
    assert store.complete
    memory[77] ^= 4
    receive_handle(transaction, filled.handle, filled.layout, checksum, mappings)
    transaction.prepare(filled.checksum)
    transaction.commit()


def test_handles_that_name_nothing_of_use_are_refused(model: Decoder) -> None:
    store = arena_store(model)
    layout = store.layout.published
    segment, mappings = Segment(layout.num_bytes), Mappings()
    own = segment.handle
    short = Segment(layout.num_bytes - 64)
    with open(os.devnull) as file:
        bad = {
            "has no descriptor 9999": MemfdHandle(own.pid, 9999, own.num_bytes),
            "no shared memory": MemfdHandle(own.pid, file.fileno(), own.num_bytes),
            "holds .* bytes, not": MemfdHandle(own.pid, own.fd, own.num_bytes + 1),
            "its layout needs": short.handle,
            "cannot be found": ShmHandle("unison-no-such-memory", own.num_bytes),
            "is no name of shared memory": ShmHandle("../etc/passwd", own.num_bytes),
        }
        transaction = store.begin(1)
        for message, handle in bad.items():
            with pytest.raises(WeightUpdateError, match=message):
                receive_handle(transaction, handle, layout, None, mappings)
    assert receive_handle(transaction, own, layout, None, mappings).num_tensors == 25


def test_a_handle_that_names_other_memory_now_is_mapped_anew() -> None:
    mappings = Mappings()
    first = Segment(64)
    first.memory[:3] = b"one"
    handle = first.handle
    kept = mappings.memory(handle)
    assert mappings.memory(handle) is kept
    second = Segment(64)
    second.memory[:3] = b"two"
    os.dup2(second.fd, first.fd)
    assert bytes(mappings.memory(handle)[:3].tolist()) == b"two"
    assert len(mappings) == 1


def test_shared_memory_of_ours_cannot_become_shorter() -> None:
    segment = Segment(8192)
    mappings = Mappings()
    memory = mappings.memory(segment.handle)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    assert int(memory.sum()) == 0


def test_foreign_memory_that_became_shorter_is_refused() -> None:
    path = Path(f"/dev/shm/unison-test-{os.getpid()}")
    path.write_bytes(bytes(8192))
    try:
        mappings = Mappings()
        handle = ShmHandle(path.name, 8192)
        assert mappings.memory(handle).numel() == 8192
        os.truncate(path, 4096)
        with pytest.raises(WeightUpdateError, match="holds 4096 bytes, not 8192"):
            mappings.memory(handle)
    finally:
        path.unlink()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("new_memory_each_time", [False, True])
def test_memory_stays_flat_over_a_hundred_updates(tiny_model_dir: TinyModelDir, new_memory_each_time: bool) -> None:
    model = load_model(tiny_model_dir("qwen3", vocab_size=16384), torch.bfloat16)
    store = arena_store(model)
    outbox, mappings = Outbox(store.layout), Mappings()
    new = masters(model, 0)
    sizes, descriptors = [], []
    for version in range(1, 111):
        if new_memory_each_time:
            outbox.close()
            outbox = Outbox(store.layout)
        filled = outbox.fill(new)
        transaction = store.begin(version)
        receive_handle(transaction, filled.handle, filled.layout, None, mappings)
        transaction.prepare(filled.checksum)
        transaction.commit()
        if version in (10, 110):
            gc.collect()
            sizes.append(resident_bytes())
            descriptors.append(len(os.listdir("/proc/self/fd")))
    assert len(mappings) == 1, "a descriptor given again names other memory"
    assert descriptors[0] == descriptors[1]
    # One buffer is 4 MiB: a leak of one in ten updates would show.
    assert sizes[1] - sizes[0] < 8 << 20, sizes


@pytest.fixture
def trainer(tiny_model_dir: TinyModelDir) -> Iterator[subprocess.Popen[str]]:
    process = senders.start("outbox", tiny_model_dir("qwen3"))
    yield process
    process.kill()
    process.communicate()


def test_a_trainer_in_another_process_is_followed_until_it_is_killed(
    model: Decoder, trainer: subprocess.Popen[str]
) -> None:
    store, mappings = arena_store(model), Mappings()
    assert trainer.stdin is not None and trainer.stdout is not None
    for version in (1, 2, 3):
        trainer.stdin.write(f"{version}\n")
        trainer.stdin.flush()
        filled = msgspec.json.decode(trainer.stdout.readline(), type=Filled)
        transaction = store.begin(version)
        receive_handle(transaction, filled.handle, filled.layout, None, mappings)
        transaction.prepare(filled.checksum)
        transaction.commit()
        new = senders.values(sum(t.numel() for t in model.parameters()), version, torch.float32).bfloat16()
        assert torch.equal(torch.cat([t.reshape(-1) for t in published_tensors(model).values()]), new)
    live = store.weights_checksum()
    trainer.kill()
    trainer.wait()
    transaction = store.begin(4)
    with pytest.raises(WeightUpdateError, match=f"process {filled.handle.pid} has no descriptor"):
        receive_handle(transaction, filled.handle, filled.layout, None, mappings)
    transaction.abort()
    assert (store.version, store.complete, store.weights_checksum()) == (3, True, live)


def test_updates_are_staged_while_the_live_weights_are_in_use(model: Decoder) -> None:
    store = arena_store(model)
    outbox, mappings = Outbox(store.layout), Mappings()
    filled = outbox.fill(masters(model, 1))
    old = store.weights_checksum()
    with store.lock:
        transaction = store.begin(1)
        thread = threading.Thread(
            target=lambda: (
                receive_handle(transaction, filled.handle, filled.layout, None, mappings),
                transaction.prepare(filled.checksum),
            )
        )
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "staging must not wait for a step"
        assert store.weights_checksum() == old
    transaction.commit()
    assert store.weights_checksum() == filled.checksum


def test_bytes_of_a_message_and_maps_live_as_long_as_their_tensors() -> None:
    tensor = readable(bytes(bytearray(range(200)) * 1000))
    segment = Segment(4096)
    segment.memory[:4] = b"here"
    mappings = Mappings()
    mapped = mappings.memory(segment.handle)
    mappings.close()
    segment.close()
    del segment
    gc.collect()
    assert tensor.tolist() == list(range(200)) * 1000
    assert bytes(mapped[:4].tolist()) == b"here"


CUDA = CudaIpcHandle("uuid", "00" * 66, 4096, 512, "2f746f726368", 8, "11" * 64, True, 64, 1024)


def test_a_handle_of_gpu_memory_is_plain_data() -> None:
    coded = msgspec.json.encode(CUDA)
    assert msgspec.json.decode(coded, type=CudaIpcHandle | MemfdHandle | ShmHandle) == CUDA
    assert msgspec.json.decode(coded)["type"] == "cuda_ipc"
    for change in ({"memory_handle": "zz"}, {"memory_handle": "0"}, {"storage_bytes": -1}, {"num_bytes": 1 << 62}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**msgspec.to_builtins(CUDA), **change}, CudaIpcHandle)


def test_gpu_memory_is_refused_where_there_is_no_gpu(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    layout = BufferLayout((TensorEntry(NORM, "bfloat16", (64,), 0),), 128)
    with pytest.raises(WeightUpdateError, match="need CUDA"):
        receive_handle(arena_store(model).begin(1), CUDA, layout, None, Mappings())
    with pytest.raises(WeightUpdateError, match="need CUDA"):
        open_cuda(CUDA)
    with pytest.raises(WeightUpdateError, match="need CUDA"):
        share_cuda(torch.zeros(8, dtype=torch.uint8))
