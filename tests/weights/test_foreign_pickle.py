"""Tensors that other frameworks pickle: decoded as plain data, shared without a copy, and never run."""

from __future__ import annotations

import base64
import json
import pickletools
import random
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from tests.weights import foreign_sender
from tests.weights.foreign_sender import foreign_class, serialised
from unison.core.errors import WeightUpdateError
from unison.processes.shared_memory import open_handle
from unison.weights.buffers import tensor_at
from unison.weights.foreign_pickle import MAX_BYTES, MAX_OPCODES, read_pickle
from unison.weights.foreign_tensors import CudaTensor, ForeignTensor, as_buffers, decode_tensors, release, view
from unison.weights.handles import Mappings
from unison.weights.manifest import DTYPES

REPO = Path(__file__).parents[2]


class Sender:
    """A real other process that shares tensors."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.weights.foreign_sender"]
        self.process = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.process.communicate(timeout=20)


@pytest.fixture
def file_system() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.fixture(scope="module")
def real_dump() -> Iterator[bytes]:
    """A dump of three tensors of this process, which stay where they are."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    tensors = [("a", torch.ones(3, 4)), ("b", torch.nn.Parameter(torch.ones(5))), ("c", torch.ones(2).bfloat16())]
    data = serialised(tensors)
    torch.multiprocessing.set_sharing_strategy(before)
    yield data
    release(decode_tensors(data))


def bytes_of(tensor: torch.Tensor) -> str:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()


FORMATS = {
    "pairs": None,
    "per rank": "direct",
    "bucket": "flattened_bucket",
    "bucket of one dtype": "flattened_bucket",
}


@pytest.mark.parametrize("kind", FORMATS)
def test_tensors_of_another_process_are_seen_in_place(kind: str, sender: Sender) -> None:
    tensors = decode_tensors(sender.tell(kind), FORMATS[kind], rank=1 if kind == "per rank" else 0)
    told: dict[str, tuple[str, list[int], str]] = json.loads(sender.hear())
    assert [tensor.name for tensor in tensors] == list(told)
    for tensor in tensors:
        dtype, shape, data = told[tensor.name]
        seen = view(tensor)
        assert (tensor.dtype, list(seen.shape), seen.dtype) == (dtype, shape, DTYPES[dtype]), tensor.name
        assert bytes_of(seen) == data, tensor.name
    # The sender's memory goes when both sides have let it go.
    shared = {Path("/dev/shm") / tensor.handle.name for tensor in tensors if isinstance(tensor, ForeignTensor)}
    assert sender.tell("drop") == "done"
    assert all(path.exists() for path in shared)
    release(tensors)
    assert not any(path.exists() for path in shared)
    with pytest.raises(WeightUpdateError, match="cannot be opened"):
        view(tensors[0])


def test_what_the_sender_changes_later_is_seen_without_a_copy(file_system: None) -> None:
    tensor = torch.zeros(6)
    decoded = decode_tensors(serialised([("x", tensor)]))
    seen = view(decoded[0])
    tensor.copy_(torch.arange(6.0))
    assert torch.equal(seen, torch.arange(6.0))
    release(decoded)


def test_shared_tensors_become_handles_and_layouts(file_system: None) -> None:
    base = torch.arange(20.0)
    decoded = decode_tensors(serialised([("head", base[:8].view(2, 4)), ("tail", base[8:]), ("other", torch.ones(3))]))
    buffers = as_buffers(decoded)
    assert [[entry.name for entry in layout.entries] for _, layout in buffers] == [["head", "tail"], ["other"]]
    for handle, layout in buffers:
        memory = open_handle(handle)
        for entry in layout.entries:
            found = np.frombuffer(memory[entry.offset : entry.offset + entry.num_bytes], np.float32)
            expected = {"head": base[:8], "tail": base[8:], "other": torch.ones(3)}[entry.name]
            assert found.tolist() == expected.tolist()
    release(decoded)
    with pytest.raises(WeightUpdateError, match=r"'t' has strides \[1, 5\]; send .contiguous\(\) of it"):
        as_buffers(decode_tensors(serialised([("t", torch.zeros(4, 5).t())])))


@pytest.mark.parametrize("kind", ["bucket", "bucket of one dtype"])
def test_buckets_of_another_process_are_read_through_handles(kind: str, sender: Sender) -> None:
    """As the engine's process does it; in a bucket of several dtypes, tensors begin at odd bytes."""
    tensors = decode_tensors(sender.tell(kind), "flattened_bucket")
    told: dict[str, tuple[str, list[int], str]] = json.loads(sender.hear())
    mappings = Mappings()
    ((handle, layout),) = as_buffers(tensors)
    memory = mappings.memory(handle)
    assert {entry.name: bytes_of(tensor_at(memory, entry)) for entry in layout.entries} == {
        name: data for name, (_, _, data) in told.items()
    }
    assert kind == "bucket of one dtype" or any(entry.offset % 2 for entry in layout.entries)
    mappings.close()
    assert sender.tell("drop") == "done"
    release(tensors)


def test_descriptors_are_refused_with_what_to_do() -> None:
    with pytest.raises(WeightUpdateError, match=r'set_sharing_strategy\("file_system"\)'):
        decode_tensors(serialised([("x", torch.zeros(3))]))


class Calls:
    """Pickles as a call of ``function`` with ``arguments``."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.made = function, arguments

    def __reduce__(self) -> Any:
        return self.made


def cuda_arguments(**changed: object) -> tuple[object, ...]:
    arguments = {
        "cls": torch.Tensor,
        "size": torch.Size([4, 6]),
        "stride": (6, 1),
        "offset": 2,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.bfloat16,
        "device": 3,
        "handle": bytes(range(64)),
        "storage_bytes": 52,
        "storage_offset": 512,
        "requires_grad": False,
        "counter": b"counter",
        "counter_offset": 7,
        "event": b"event",
        "sync": True,
    }
    return tuple({**arguments, **changed}.values())


def test_cuda_tensors_become_records_and_are_refused_by_name() -> None:
    (tensor,) = decode_tensors(serialised([("w", Calls(reductions.rebuild_cuda_tensor, *cuda_arguments()))]))
    assert tensor == CudaTensor(
        "w", "bfloat16", (4, 6), (6, 1), 3, bytes(range(64)), 52, 512, 4, b"counter", 7, b"event", True
    )
    with pytest.raises(WeightUpdateError, match=r"'w' is on CUDA device 3; this engine (has no CUDA|takes weights)"):
        view(tensor)
    with pytest.raises(WeightUpdateError, match="'w' is on CUDA device 3"):
        as_buffers([tensor])


def test_cuda_buckets_keep_the_place_of_each_tensor() -> None:
    arguments = cuda_arguments(size=(24,), stride=(1,), device="GPU-1234")
    entry = foreign_class("sglang.srt.model_executor.model_runner", "FlattenedTensorMetadata", foreign_sender.NAMES)
    metadata = [
        entry("a", torch.Size([2, 5]), torch.bfloat16, 0, 10, 10),
        entry("b", (14,), torch.bfloat16, 10, 24, 14),
    ]
    content = {"flattened_tensor": Calls(reductions.rebuild_cuda_tensor, *arguments), "metadata": metadata}
    found = decode_tensors(serialised(content), "flattened_bucket")
    places = [(t.name, t.shape, t.offset_bytes, t.device) for t in found if isinstance(t, CudaTensor)]
    assert places == [("a", (2, 5), 4, "GPU-1234"), ("b", (14,), 24, "GPU-1234")]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": torch.Size([4, 7])}, "reaches beyond its storage of 52 bytes"),
        ({"stride": (6,)}, "2 dimensions and 1 strides"),
        ({"offset": -1}, "offset is to be a number of 0 or more"),
        ({"handle": bytes(1000)}, "at most 256 bytes"),
        ({"device": None}, "neither a number nor a UUID"),
        ({"dtype": "bfloat16"}, "a dtype of torch is missing"),
    ],
)
def test_impossible_tensors_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        decode_tensors(serialised([("w", Calls(reductions.rebuild_cuda_tensor, *cuda_arguments(**changed)))]))


def test_a_bucket_whose_places_do_not_fit_is_refused(file_system: None) -> None:
    made = foreign_sender.bucket({"a": torch.ones(3)}, "sglang.srt.weight_sync.tensor_bucket")
    for key, value in {"end_idx": 13, "start_idx": 1, "numel": 4, "shape": torch.Size([2])}.items():
        entry = made["metadata"][0]  # type: ignore[index]
        before = getattr(entry, key)
        setattr(entry, key, value)
        with pytest.raises(WeightUpdateError, match=r"'a' of float32 .* does not fill places"):
            decode_tensors(serialised(made), "flattened_bucket")
        setattr(entry, key, before)
    assert [tensor.name for tensor in decode_tensors(serialised(made), "flattened_bucket")] == ["a"]
    with pytest.raises(WeightUpdateError, match="send load_format flattened_bucket"):
        decode_tensors(serialised(made))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_newer_protocols_are_read_and_older_ones_refused_by_name(protocol: int, file_system: None) -> None:
    data = serialised([("x", torch.ones(2))], protocol)
    if protocol == 2:
        with pytest.raises(WeightUpdateError, match=r"_codecs\.encode"):
            decode_tensors(data)
    else:
        decoded = decode_tensors(data)
        assert view(decoded[0]).tolist() == [1, 1]
        release(decoded)


def text(value: str) -> bytes:
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def gadgets(canary: Path) -> dict[str, bytes]:
    """Dumps that would make the file ``canary`` if anything of them were run, or that are otherwise hostile."""
    touch = f"touch {canary}".encode()
    code = f"open({str(canary)!r}, 'w')".encode()
    allowed = named("torch.multiprocessing.reductions", "rebuild_tensor")
    found = {
        "system, text protocol": b"cposix\nsystem\n(S'" + touch + b"'\ntR.",
        "evaluation, text protocol": b"c__builtin__\neval\n(V" + code + b"\ntR.",
        "evaluation": b"\x80\x04" + named("builtins", "eval") + text(code.decode()) + b"\x85R.",
        "instance opcode": b"(S'" + touch + b"'\niposix\nsystem\n.",
        "object opcode": b"(cposix\nsystem\nS'" + touch + b"'\no.",
        "extension registry": b"\x80\x04\x82\x01.",
        "persistent id": b"Pabc\n.",
        "name through an attribute": b"\x80\x04" + named("torch", "hub.os.system") + text(touch.decode()) + b"\x85R.",
        "name from the memo": b"\x80\x04"
        + text("posix")
        + b"\x940"
        + text("system")
        + b"\x94h\x00h\x01\x93"
        + text(touch.decode())
        + b"\x85R.",
        "call of the result of a call": b"\x80\x04" + allowed + b")R" + text(touch.decode()) + b"\x85R.",
        "call of a class": b"\x80\x04" + named("torch", "Tensor") + b")R.",
        "new object of a function": b"\x80\x04" + allowed + b")\x81.",
        "new object with keywords": b"\x80\x04" + named("torch", "Tensor") + b")}\x92.",
        "fields of a function": b"\x80\x04" + allowed + b"}b.",
        "fields of a list": b"\x80\x04]}b.",
        "two values left over": b"\x80\x04]].",
        "pickle after the pickle": b"\x80\x04].cposix\nsystem\n(S'" + touch + b"'\ntR.",
        "protocol in the middle": b"\x80\x04]\x80\x04.",
        "bracket never closed": b"\x80\x04((((].",
        "bracket never opened": b"\x80\x04]e.",
        "value under a bracket": b"\x80\x04](a.",
        "empty": b"",
        "list that contains itself": b"\x80\x04]\x94h\x00h\x00\x86a.",
        "missing memo": b"\x80\x04h\x07.",
        "memo of four thousand million": b"\x80\x04]r\xff\xff\xff\xff.",
        "key that is no text": b"\x80\x04}K\x01K\x02s.",
        "long number": b"\x80\x04\x8b\x00\x00\x10\x00" + bytes(1 << 20) + b".",
        "number in decimal": b"L" + b"9" * 100_000 + b"L\n.",
        "text longer than the dump": b"\x80\x04X\xff\xff\xff\x7fabc.",
        "text of eight length bytes": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fabc.",
        "long text": b"\x80\x04X\x00\x00\x10\x00" + b"a" * (1 << 20) + b".",
        "many brackets": b"\x80\x04" + b"(" * 400_000 + b"t" * 400_000 + b".",
        "deep tuples": b"\x80\x04)" + b"\x85" * 100_000 + b".",
        "doubled again and again": b"\x80\x04)" + b"\x942\x86" * 3 + b".",
        "a thousand million laughs": b"\x80\x04]"
        + b"\x94"
        + b"".join(b"(h%c" % i + b"h%c" % i * 9 + b"t\x94" for i in range(60))
        + b".",
        "too many opcodes": b"\x80\x04" + b"]0" * MAX_OPCODES + b".",
        "too many bytes": b"\x80\x04" + b"N" * (MAX_BYTES + 1),
        "numpy": serialised([("x", np.arange(3.0))]),
        "sets": serialised([("x", {1, 2})]),
        "number as a tensor": serialised([("x", 1)]),
        "pairs of three": serialised([("x", 1, 2)]),
        "no text as a name": serialised([(1, 2)]),
    }
    for protocol in range(6):
        found[f"touch, protocol {protocol}"] = serialised([("x", Calls(Path.touch, canary))], protocol)
        found[f"command, protocol {protocol}"] = serialised(Calls(subprocess.call, ["touch", str(canary)]), protocol)
    return found


def refuse_all(canary: Path, load_formats: tuple[str | None, ...] = (None,)) -> None:
    """Raises AssertionError by hand, so that it checks under python -O, too."""
    for what, data in gadgets(canary).items():
        for load_format in load_formats:
            start_s = time.process_time()
            try:
                decode_tensors(data, load_format)
            except WeightUpdateError:
                pass
            else:
                raise AssertionError(f"{what} was taken for tensors")
            if time.process_time() - start_s > 5:
                raise AssertionError(f"{what} took {time.process_time() - start_s} s")
    if canary.exists():
        raise AssertionError("a dump was run")


def test_nothing_in_a_dump_is_ever_run(tmp_path: Path) -> None:
    refuse_all(tmp_path / "canary", (None, "flattened_bucket"))


def test_nothing_is_run_under_python_without_assertions(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\nfrom tests.weights.test_foreign_pickle import refuse_all\n"
        "refuse_all(pathlib.Path(sys.argv[1]))\nprint('refused', __debug__)"
    )
    command = [sys.executable, "-O", "-c", program, str(tmp_path / "canary")]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "refused False\n", result.stderr


def test_the_refusal_names_what_was_refused(tmp_path: Path) -> None:
    hostile = gadgets(tmp_path / "canary")
    for what, message in {
        "system, text protocol": "opcode STRING|'posix.system'",
        "evaluation": "'builtins.eval'",
        "name through an attribute": r"'torch\.hub\.os\.system'",
        "extension registry": "opcode EXT1",
        "persistent id": "opcode PERSID",
        "call of a class": r"call torch\.Tensor, which is to be named only",
        "numpy": r"'numpy\.",
        "touch, protocol 4": r"'pathlib\.Path\.touch|getattr'",
    }.items():
        with pytest.raises(WeightUpdateError, match=message):
            decode_tensors(hostile[what])


def test_hostile_dumps_take_memory_in_proportion_to_their_size(tmp_path: Path) -> None:
    hostile = gadgets(tmp_path / "canary")
    for what in ("many brackets", "deep tuples", "a thousand million laughs", "long text", "text longer than the dump"):
        data = hostile[what]
        tracemalloc.start()
        with pytest.raises(WeightUpdateError):
            decode_tensors(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < (64 << 20), f"{what} of {len(data)} bytes took {peak}"


def test_every_truncated_dump_is_refused(real_dump: bytes) -> None:
    assert [tensor.name for tensor in decode_tensors(real_dump)] == ["a", "b", "c"]
    for length in range(len(real_dump)):
        with pytest.raises(WeightUpdateError):
            decode_tensors(real_dump[:length])


def test_mutated_dumps_are_refused_or_are_still_only_tensors(real_dump: bytes, tmp_path: Path) -> None:
    rng = random.Random(0)
    opcodes = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_refused = num_seen = 0
    for _ in range(2_000):
        data = bytearray(real_dump)
        for _ in range(rng.choice((1, 1, 1, 3))):
            place = rng.randrange(len(data))
            kind = rng.choice((0, 0, 0, 1, 2, 3))
            if kind == 0:
                data[place] = rng.randrange(256)
            elif kind == 1:
                data[place : place + 1] = rng.choice(opcodes)
            elif kind == 2:
                del data[place : place + rng.randint(1, 9)]
            else:
                data[place:place] = rng.choice(opcodes) + rng.randbytes(rng.randint(0, 8))
        try:
            tensors = decode_tensors(bytes(data))
        except WeightUpdateError:
            num_refused += 1
            continue
        for tensor in tensors:
            with suppress(WeightUpdateError):
                num_seen += float(view(tensor).float().sum()) != 0
    assert num_refused > 1_000 and num_seen > 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "torch_1_2", "psm_12345678", "torch_1_2_3/../x", ""]
)
def test_only_names_of_torch_s_shared_memory_are_opened(name: str, real_dump: bytes) -> None:
    place = real_dump.index(b"/torch_")
    length = real_dump[place - 1]
    hostile = real_dump[: place - 1] + bytes([len(name)]) + name.encode() + real_dump[place + length :]
    with pytest.raises(WeightUpdateError, match="is no name of shared memory"):
        decode_tensors(hostile)


@pytest.mark.parametrize(
    ("payload", "load_format", "message"),
    [
        ("not base64!", None, "are no base64"),
        ("é", None, "are no base64"),
        (base64.b64encode(serialised([])).decode(), "npz", "load_format='npz' is unknown"),
        (base64.b64encode(serialised([])).decode(), "flattened_bucket", "a flattened bucket is a dictionary"),
    ],
)
def test_what_is_no_dump_is_refused(payload: str, load_format: str | None, message: str) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        decode_tensors(payload, load_format)


def test_a_rank_that_the_sender_did_not_serve_is_refused() -> None:
    wrap = foreign_class("sglang.srt.model_executor.model_runner", "LocalSerializedTensor", ["values"])
    with pytest.raises(WeightUpdateError, match="'w' has parts for 1 ranks; rank 1 is not among them"):
        decode_tensors(serialised([("w", wrap([b"x"]))]), rank=1)


def test_only_a_socket_of_this_user_is_told_of_the_release(real_dump: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "torch-shm-dir-x"
    folder.mkdir()
    (folder / "manager.sock").write_text("no socket")
    decoded = decode_tensors(real_dump)
    false = [replace(t, manager=str(folder / "manager.sock")) for t in decoded if isinstance(t, ForeignTensor)]
    release(false)
    release([replace(tensor, manager="/absent/torch-shm-dir-x/manager.sock") for tensor in false])
    assert view(decoded[0]).tolist() == torch.ones(3, 4).tolist()
    assert (folder / "manager.sock").read_text() == "no socket"


def test_a_name_given_twice_is_refused(file_system: None) -> None:
    with pytest.raises(WeightUpdateError, match="'x' twice"):
        decode_tensors(serialised([("x", torch.ones(1)), ("x", torch.ones(1))]))


def test_plain_data_is_read_as_it_is() -> None:
    value = [1, -5, "text", b"bytes", None, True, (1, (2,)), {"a": []}, 2**40]
    assert read_pickle(serialised(value)) == value
