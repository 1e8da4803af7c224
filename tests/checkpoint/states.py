"""Small states of a run, each a function of its step, and folders of checkpoints to break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unison.checkpoint.load import Loaded
from unison.checkpoint.retention import Retention
from unison.checkpoint.save import Saver

SHARD_BYTES = 200


def tensors(step: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return {
        "masters": {
            "embed": torch.randn(6, 7, generator=generator),
            "norm": torch.randn(7, generator=generator).bfloat16(),
            "head": torch.randn(5, 7, generator=generator),
        },
        "moments": {"embed": torch.rand(4, 3, generator=generator), "count": torch.tensor(step)},
    }


def documents(step: int) -> dict[str, Any]:
    return {"loop": {"step": step, "rng": [2**127 + step, "état"], "lr": 0.1 + step, "best": float("-inf")}}


def blobs(step: int) -> dict[str, bytes]:
    return {"buffer": bytes(range(256)) + bytes([step])}


def saver(root: Path, retention: Retention | None = None) -> Saver:
    return Saver(root, retention, shard_bytes=SHARD_BYTES)


def save(root: Path, step: int, retention: Retention | None = None) -> Path:
    return saver(root, retention).save(step, tensors(step), documents(step), blobs(step)).path


def assert_same_tensors(actual: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert actual.keys() == expected.keys()
    for group, members in expected.items():
        assert actual[group].keys() == members.keys()
        for name, tensor in members.items():
            other = actual[group][name]
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
            assert bits(other) == bits(tensor), name


def assert_is_state_of(loaded: Loaded | None, step: int) -> None:
    assert loaded is not None
    assert loaded.step == step
    assert_same_tensors(loaded.tensors, tensors(step))
    assert loaded.documents == documents(step)
    assert loaded.blobs == blobs(step)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy())
