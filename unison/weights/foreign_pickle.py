"""Reads what others pickle for `update_weights_from_tensor`, without unpickling: nothing is imported, called or made.

The opcodes are walked as text is parsed. A name of a class or function becomes a ``Symbol``, a call becomes a ``Call``
that says what would have been called with what; only the names listed here may occur at all. What comes out is plain
data; ``foreign_tensors`` says what it means.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from unison.core.errors import WeightUpdateError

MAX_BYTES: Final = 16 << 20
MAX_OPCODES: Final = 500_000
"""A tensor takes about 70."""
MAX_STRING_BYTES: Final = 1 << 16
MAX_MARKS: Final = 32
"""Open brackets, one in another; two or three are usual."""
MAX_INT_BYTES: Final = 8

_REDUCTIONS: Final = "torch.multiprocessing.reductions."
REBUILD_TENSOR: Final = f"{_REDUCTIONS}rebuild_tensor"
REBUILD_TYPED_STORAGE: Final = f"{_REDUCTIONS}rebuild_typed_storage"
REBUILD_STORAGE_FILENAME: Final = f"{_REDUCTIONS}rebuild_storage_filename"
REBUILD_CUDA: Final = frozenset(
    {
        f"{_REDUCTIONS}rebuild_cuda_tensor",
        "sglang.srt.utils.patch_torch._rebuild_cuda_tensor_modified",
        "sglang.srt.patch_torch._rebuild_cuda_tensor_modified",
    }
)
SIZE: Final = "torch.Size"
BUCKET_ENTRY: Final = frozenset(
    {
        "sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata",
        "sglang.srt.model_executor.model_runner.FlattenedTensorMetadata",
    }
)
PER_RANK: Final = frozenset(
    {
        "sglang.srt.model_executor.model_runner.LocalSerializedTensor",
        "sglang.srt.model_executor.weight_updater.LocalSerializedTensor",
        "sglang.srt.model_executor.model_runner_components.weight_updater.LocalSerializedTensor",
    }
)
_FLOATS: Final = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2")
_OTHERS: Final = ("uint8", "int8", "int16", "int32", "int64", "bool")
DTYPE_SYMBOLS: Final = {f"torch.{name}": name for name in (*_FLOATS, *_OTHERS)}
_CALLABLE: Final = {SIZE, REBUILD_TENSOR, REBUILD_TYPED_STORAGE, REBUILD_STORAGE_FILENAME, *REBUILD_CUDA}
_MADE_EMPTY: Final = BUCKET_ENTRY | PER_RANK
"""Classes whose instances are made without arguments and then filled with a dictionary of their fields."""
_NAMED_ONLY: Final = {
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.storage.UntypedStorage",
    "torch.storage.TypedStorage",
    "torch.UntypedStorage",
    "torch.TypedStorage",
    *DTYPE_SYMBOLS,
}
_ALLOWED: Final = _CALLABLE | _MADE_EMPTY | _NAMED_ONLY
_BY_DESCRIPTOR: Final = (
    "names a descriptor that only its sender's process can hand out; the sender is to call "
    'torch.multiprocessing.set_sharing_strategy("file_system")'
)
_REFUSED: Final = {
    f"{_REDUCTIONS}rebuild_storage_fd": _BY_DESCRIPTOR,
    "multiprocessing.resource_sharer.DupFd": _BY_DESCRIPTOR,
    "multiprocessing.reduction.DupFd": _BY_DESCRIPTOR,
    f"{_REDUCTIONS}rebuild_storage_empty": _BY_DESCRIPTOR,
    f"{_REDUCTIONS}rebuild_meta_tensor": "is a tensor without values",
    f"{_REDUCTIONS}rebuild_sparse_coo_tensor": "is a sparse tensor; send dense ones",
    f"{_REDUCTIONS}rebuild_sparse_compressed_tensor": "is a sparse tensor; send dense ones",
    f"{_REDUCTIONS}rebuild_nested_tensor": "is a nested tensor; send plain ones",
}


@dataclass(frozen=True, slots=True, eq=False)
class Symbol:
    """The qualified name of a class or function of the sender's."""

    name: str


@dataclass(slots=True, eq=False)
class Call:
    """``name`` would have been called with ``arguments``; ``fields`` are what was then put into the result."""

    name: str
    arguments: tuple[object, ...]
    fields: dict[str, object] | None = None


class _Mark:
    """Where a bracket was opened on the stack."""


_MARK: Final = _Mark()


@dataclass(slots=True)
class _Machine:
    """The pickle machine with its hands tied: a stack, a memo, and no way to the outside."""

    stack: list[object] = field(default_factory=list)
    memo: dict[int, object] = field(default_factory=dict)
    num_marks: int = 0

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> object:
        if not self.stack or self.stack[-1] is _MARK:
            raise WeightUpdateError("serialised tensors are damaged: an opcode finds nothing on the stack")
        return self.stack.pop()

    def top(self) -> object:
        value = self.pop()
        self.stack.append(value)
        return value

    def mark(self) -> None:
        self.num_marks += 1
        if self.num_marks > MAX_MARKS:
            raise WeightUpdateError(f"serialised tensors are nested more than {MAX_MARKS} deep")
        self.stack.append(_MARK)

    def pop_to_mark(self) -> list[object]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                items = self.stack[i + 1 :]
                del self.stack[i:]
                self.num_marks -= 1
                return items
        raise WeightUpdateError("serialised tensors are damaged: a bracket is closed that was never opened")

    def pop_many(self, count: int) -> tuple[object, ...]:
        return tuple(reversed([self.pop() for _ in range(count)]))

    def remember(self, key: int) -> None:
        self.memo[key] = self.top()

    def recall(self, key: int) -> None:
        if key not in self.memo:
            raise WeightUpdateError(f"serialised tensors are damaged: nothing was kept under {key}")
        self.push(self.memo[key])

    def append(self, items: list[object]) -> None:
        self._list_below().extend(items)

    def set_items(self, items: list[object]) -> None:
        target = self.top()
        if not isinstance(target, dict) or len(items) % 2:
            raise WeightUpdateError("serialised tensors are damaged: items are put into what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise WeightUpdateError(f"a dictionary of serialised tensors has a key of type {type(key).__name__}")
            target[key] = value

    def _list_below(self) -> list[object]:
        target = self.top()
        if not isinstance(target, list):
            raise WeightUpdateError("serialised tensors are damaged: items are appended to what is no list")
        return target

    def symbol(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise WeightUpdateError("serialised tensors are damaged: a class or function is named by no text")
        full = f"{module}.{name}"
        if full in _REFUSED:
            raise WeightUpdateError(f"serialised tensors: {full} {_REFUSED[full]}")
        if full not in _ALLOWED:
            raise WeightUpdateError(
                f"serialised tensors name {full[:200]!r}, which is not among the few that tensors need; "
                "it was not run. Send weights by shared memory, a process group, or a folder of safetensors instead"
            )
        self.push(Symbol(full))

    def call(self, allowed: frozenset[str] | set[str]) -> None:
        arguments, target = self.pop(), self.pop()
        if not isinstance(target, Symbol) or not isinstance(arguments, tuple):
            raise WeightUpdateError(
                "serialised tensors are damaged: what is called is no function, or not with a tuple"
            )
        if target.name not in allowed:
            raise WeightUpdateError(f"serialised tensors call {target.name}, which is to be named only")
        self.push(Call(target.name, arguments))

    def fill(self) -> None:
        state, target = self.pop(), self.top()
        if not isinstance(target, Call) or target.name not in _MADE_EMPTY or target.fields is not None:
            raise WeightUpdateError("serialised tensors set the fields of what has none")
        if not isinstance(state, dict):
            raise WeightUpdateError(f"serialised tensors: the fields of {target.name} are no dictionary")
        target.fields = state


def _text(machine: _Machine, value: object) -> None:
    if isinstance(value, (str, bytes)) and len(value) > MAX_STRING_BYTES:
        raise WeightUpdateError(f"serialised tensors hold a text of {len(value)} bytes; {MAX_STRING_BYTES} are allowed")
    machine.push(value)


def _integer(machine: _Machine, value: object) -> None:
    if not isinstance(value, int) or value.bit_length() > 8 * MAX_INT_BYTES - 1:
        raise WeightUpdateError(f"serialised tensors hold a number of more than {MAX_INT_BYTES} bytes")
    machine.push(value)


def _global(machine: _Machine, value: object) -> None:
    module, _, name = str(value).partition(" ")
    machine.symbol(module, name)


def _key(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= MAX_OPCODES:
        raise WeightUpdateError("serialised tensors are damaged: they keep values under keys that are too large")
    return value


def _stack_global(machine: _Machine) -> None:
    machine.symbol(*machine.pop_many(2))


_Action = Callable[[_Machine, object], None]
_ACTIONS: Final[dict[str, _Action]] = {
    "FRAME": lambda m, a: None,
    "MARK": lambda m, a: m.mark(),
    "NONE": lambda m, a: m.push(None),
    "NEWTRUE": lambda m, a: m.push(True),
    "NEWFALSE": lambda m, a: m.push(False),
    "BININT": _integer,
    "BININT1": _integer,
    "BININT2": _integer,
    "LONG1": _integer,
    "SHORT_BINUNICODE": _text,
    "BINUNICODE": _text,
    "SHORT_BINBYTES": _text,
    "BINBYTES": _text,
    "EMPTY_LIST": lambda m, a: m.push([]),
    "EMPTY_DICT": lambda m, a: m.push({}),
    "EMPTY_TUPLE": lambda m, a: m.push(()),
    "TUPLE": lambda m, a: m.push(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, a: m.push(m.pop_many(1)),
    "TUPLE2": lambda m, a: m.push(m.pop_many(2)),
    "TUPLE3": lambda m, a: m.push(m.pop_many(3)),
    "APPEND": lambda m, a: m.append([m.pop()]),
    "APPENDS": lambda m, a: m.append(m.pop_to_mark()),
    "SETITEM": lambda m, a: m.set_items(list(m.pop_many(2))),
    "SETITEMS": lambda m, a: m.set_items(m.pop_to_mark()),
    "MEMOIZE": lambda m, a: m.remember(len(m.memo)),
    "BINPUT": lambda m, a: m.remember(_key(a)),
    "LONG_BINPUT": lambda m, a: m.remember(_key(a)),
    "BINGET": lambda m, a: m.recall(_key(a)),
    "LONG_BINGET": lambda m, a: m.recall(_key(a)),
    "GLOBAL": _global,
    "STACK_GLOBAL": lambda m, a: _stack_global(m),
    "REDUCE": lambda m, a: m.call(_CALLABLE),
    "NEWOBJ": lambda m, a: m.call(_MADE_EMPTY),
    "BUILD": lambda m, a: m.fill(),
}
"""Every opcode that may occur, besides PROTO and STOP. All others are refused by name."""


def read_pickle(data: bytes) -> object:
    """The plain data of a pickle: numbers, texts, lists, tuples, dictionaries, ``Symbol`` and ``Call``.

    Runs nothing and takes memory in proportion to ``data``. The result may share parts and even contain itself: look
    into it to a fixed depth only. Raises WeightUpdateError that names what was refused.
    """
    if len(data) > MAX_BYTES:
        raise WeightUpdateError(
            f"serialised tensors of {len(data)} bytes; {MAX_BYTES} are allowed, send smaller buckets"
        )
    machine = _Machine()
    try:
        for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            if count >= MAX_OPCODES:
                raise WeightUpdateError(f"serialised tensors of more than {MAX_OPCODES} opcodes; send smaller buckets")
            if opcode.name == "STOP":
                return _result(machine, data, position)
            if opcode.name == "PROTO":
                _check_protocol(argument, count)
                continue
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise WeightUpdateError(
                    f"serialised tensors use the opcode {opcode.name} at byte {position}; tensors need none"
                )
            action(machine, argument)
    except (ValueError, struct.error, OverflowError, IndexError, EOFError) as error:
        raise WeightUpdateError(f"serialised tensors are no readable pickle: {str(error)[:200]}") from error
    raise WeightUpdateError("serialised tensors end too early")


def _check_protocol(argument: object, count: int) -> None:
    if count or argument not in (2, 3, 4, 5):
        raise WeightUpdateError(f"serialised tensors declare pickle protocol {argument}, or not at the start")


def _result(machine: _Machine, data: bytes, position: int | None) -> object:
    if position is None or position + 1 != len(data):
        raise WeightUpdateError(f"serialised tensors go on after their end, at byte {position}")
    result = machine.pop()
    if machine.stack:
        raise WeightUpdateError(f"serialised tensors leave {len(machine.stack)} values over at their end")
    return result
