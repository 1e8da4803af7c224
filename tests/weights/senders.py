"""Trainers in processes of their own, for tests of transports: ``python -m tests.weights.senders KIND ...``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.weights.arena import ArenaLayout
from unison.weights.outbox import Outbox


def values(num: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What a sender sends, made anew by the test that receives it."""
    return torch.randn(num, generator=torch.Generator().manual_seed(seed)).to(dtype)


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.weights.senders", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def foreign_group(name: str, port: int, world_size: int, timeout_s: float) -> Any:
    """A group as SGLang's trainers make it: torch's own rendezvous and helper, beside the default group."""
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend("gloo"),
        PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def send_foreign(name: str, port: str, sizes: str) -> None:
    """Broadcast tensors of these sizes, one by one and then as one buffer of bytes."""
    group = foreign_group(name, int(port), 2, 20)
    tensors = [values(int(size), seed) for seed, size in enumerate(sizes.split(","))]
    for tensor in [*tensors, torch.cat([tensor.view(torch.uint8) for tensor in tensors])]:
        dist.broadcast(tensor, 0, group=group)
    dist.destroy_process_group(group)


def die_foreign(name: str, port: str, size: str) -> None:
    """Killed in the middle of a broadcast."""
    group = foreign_group(name, int(port), 2, 20)
    dist.broadcast(values(8, 0), 0, group=group)
    work = dist.broadcast(torch.zeros(int(size), dtype=torch.uint8), 0, group=group, async_op=True)
    del work
    time.sleep(0.3)
    os.kill(os.getpid(), 9)


def stall_foreign(name: str, port: str) -> None:
    """In the group, but silent until told."""
    group = foreign_group(name, int(port), 2, 20)
    print("joined", flush=True)
    sys.stdin.readline()
    del group


def store_only() -> None:
    """A master that prints its port and does nothing more."""
    master = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    print(master.port, flush=True)
    sys.stdin.readline()


def outbox(folder: str) -> None:
    """For each number read, a filled buffer of weights made from it, as JSON."""
    model = load_model(Path(folder), torch.bfloat16)
    box = Outbox(ArenaLayout.of(model.spec, model.dtype))
    shapes = {name: tensor.shape for name, tensor in published_tensors(model).items()}
    for line in sys.stdin:
        parts = values(sum(shape.numel() for shape in shapes.values()), int(line), torch.float32).split(
            [shape.numel() for shape in shapes.values()]
        )
        new = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        print(msgspec.json.encode(box.fill(new)).decode(), flush=True)


KINDS: dict[str, Callable[..., None]] = {
    function.__name__: function for function in (send_foreign, die_foreign, stall_foreign, store_only, outbox)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    KINDS[sys.argv[1]](*sys.argv[2:])
