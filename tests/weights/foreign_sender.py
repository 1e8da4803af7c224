"""Plays a trainer that shares tensors as SGLang's clients do. Run as a script, by the tests of foreign tensors.

A line in names a form; out come base64 of the dump, and JSON of name -> [dtype, shape, bytes in hex]. ``drop`` lets go
of the tensors, and is answered with ``done``.
"""

from __future__ import annotations

import base64
import gc
import io
import json
import sys
from dataclasses import make_dataclass
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import torch
import torch.multiprocessing

NAMES = ["name", "shape", "dtype", "start_idx", "end_idx", "numel"]


def serialised(value: object, protocol: int | None = None) -> bytes:
    """What SGLang's MultiprocessingSerializer makes of a value."""
    buffer = io.BytesIO()
    ForkingPickler(buffer, protocol).dump(value)
    return buffer.getvalue()


def foreign_class(module: str, name: str, fields: list[str]) -> Any:
    """A dataclass that pickles under another package's name."""
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    made = make_dataclass(name, fields)
    made.__module__ = module
    setattr(sys.modules[module], name, made)
    return made


def bucket(tensors: dict[str, torch.Tensor], module: str) -> dict[str, Any]:
    """SGLang's flattened bucket of several dtypes: one tensor of bytes, with the places of each."""
    entry = foreign_class(module, "FlattenedTensorMetadata", NAMES)
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    metadata, start = [], 0
    for (name, tensor), data in zip(tensors.items(), flat, strict=True):
        metadata.append(entry(name, tensor.shape, tensor.dtype, start, start + len(data), tensor.numel()))
        start += len(data)
    return {"flattened_tensor": torch.cat(flat), "metadata": metadata}


def bucket_of_one_dtype(tensors: dict[str, torch.Tensor], module: str) -> dict[str, Any]:
    """The older form: places count values."""
    made = bucket(tensors, module)
    made["flattened_tensor"] = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    start = 0
    for entry in made["metadata"]:
        entry.start_idx, entry.end_idx = start, start + entry.numel
        start += entry.numel
    return made


def share(kind: str) -> dict[str, Any]:
    """Share tensors in the form ``kind`` and print what the tests expect; returns all that keeps them there."""
    torch.manual_seed(0)
    base = torch.randn(40, 24).bfloat16()
    tensors: dict[str, Any] = {
        "plain": base,
        "parameter": torch.nn.Parameter(torch.randn(7)),
        "half": torch.randn(3, 1, 5).half(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    module = "sglang.srt.weight_sync.tensor_bucket"
    value: Any
    if kind == "pairs":
        tensors |= {"transposed": base.t(), "part": base[7:9, 3:]}
        value = list(tensors.items())
    elif kind == "per rank":
        wrap = foreign_class("sglang.srt.model_executor.model_runner", "LocalSerializedTensor", ["values"])
        value = [(name, wrap([serialised(torch.zeros(2)), serialised(tensor)])) for name, tensor in tensors.items()]
    elif kind == "bucket of one dtype":
        tensors = {name: tensor.detach().bfloat16() for name, tensor in tensors.items()}
        value = bucket_of_one_dtype(tensors, module)
    else:
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        # A single byte before the others: not even a tensor's first value is aligned.
        value = bucket({"byte": torch.zeros(1, dtype=torch.uint8), **tensors}, module)
        value["metadata"].pop(0)
    print(base64.b64encode(serialised(value)).decode())
    told = {}
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
        told[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data]
    print(json.dumps(told), flush=True)
    return {"tensors": tensors, "value": value}


def main() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    kept: dict[str, Any] = {}
    for line in sys.stdin:
        if line.strip() == "drop":
            kept.clear()
            gc.collect()
            print("done", flush=True)
        else:
            kept = share(line.strip())


if __name__ == "__main__":
    main()
