"""What a weight update costs, each part beside a plain copy of the same bytes or one plain broadcast of them.

usage: weight_update.py [--model M] [--rounds N]

All parts are measured in turn, round by round, in one run. Weights are those of the model in bfloat16, laid out as an
engine holds them. The group's rows have a sender in a process of its own; their yardstick is torch's own broadcast of
one flat tensor between the same two processes. The rows of 10, 300 and 3,000 tensors are made-up models of about the
same size.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.models.numerics import choose_packing
from unison.models.rollout_decoder import RolloutDecoder
from unison.models.sources import resolve_model
from unison.models.spec import DecoderSpec
from unison.weights.arena import Arena, ArenaLayout, model_over, move_into
from unison.weights.checksum import buffer_checksum, tensors_digest, weights_checksum
from unison.weights.finite import first_non_finite
from unison.weights.group import Group, join_group, listen, receive_group
from unison.weights.handles import Mappings, receive_handle
from unison.weights.outbox import Outbox
from unison.weights.transaction import WeightStore

Rows = dict[str, list[float]]
DEPTHS = {"10": (1, 2880), "300": (33, 512), "3,000": (333, 160)}
"""Tensors -> layers and hidden size of a model with about 135 million parameters in so many tensors."""
WAIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--send", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        send(options.model, *map(int, options.send))
        return
    model = load_model(resolve_model(options.model), torch.bfloat16)
    print(f"{options.rounds} rounds, medians; {torch.get_num_threads()} threads of {os.cpu_count()} cores")
    report(f"{options.model}: parts of an update", *parts(model, options.rounds))
    report(f"{options.model}: a process group", *over_group(options.model, model, options.rounds))
    for name, (layers, hidden) in DEPTHS.items():
        report(f"about {name} tensors", *staging(deep(model.spec, layers, hidden), options.rounds))


def report(title: str, num_bytes: int, rows: Rows) -> None:
    """The first row is the yardstick."""
    print(f"\n{title}: {num_bytes / 1e6:.1f} MB")
    yardstick = statistics.median(next(iter(rows.values())))
    for name, times in rows.items():
        seconds = statistics.median(times)
        spread = f"{min(times) * 1e3:.1f}..{max(times) * 1e3:.1f}"
        print(
            f"  {name:<46} {seconds * 1e3:>8.1f} ms {spread:>16} {seconds / yardstick:>6.2f} x "
            f"{num_bytes / seconds / 1e9:>6.2f} GB/s"
        )


def parts(model: Decoder, rounds: int) -> tuple[int, Rows]:
    masters = {name: tensor.float() for name, tensor in published_tensors(model).items()}
    derived = RolloutDecoder(model, choose_packing(model.spec, model.dtype)[0])
    store, arenas = make_store(model, derived)
    outbox, mappings = Outbox(store.layout), Mappings()
    source = Arena(store.layout).flat.zero_()
    rows: Rows = {}

    def one_round(version: int) -> None:
        spare = arenas[1 - store.live_index]

        def measure(name: str, action: Callable[[], object]) -> None:
            rows.setdefault(name, []).append(timed(action))

        measure("a copy of the bytes", lambda: np.copyto(spare.flat.numpy(), source.numpy()))
        filled = outbox.fill(masters)
        rows.setdefault("sender: cast of float32 masters", []).append(filled.seconds["cast"])
        rows.setdefault("sender: checksum", []).append(filled.seconds["checksum"])
        transaction = store.begin(version)
        handle, layout = filled.handle, filled.layout
        measure("handle: map and stage", lambda: receive_handle(transaction, handle, layout, None, mappings))
        measure("handle: checksum of the buffer", lambda: buffer_checksum(mappings.memory(handle)))
        measure("prepare", lambda: transaction.prepare(filled.checksum))
        measure("  of which finite", lambda: first_non_finite(spare.published, spare))
        measure("  of which checksum", lambda: weights_checksum(spare.published))
        commit = transaction.commit()
        rows.setdefault("commit: swap", []).append(commit.seconds["swap"])
        rows.setdefault("commit: repack", []).append(commit.seconds["repack"])
        measure("SHA-256 of the ledger, once a step", lambda: tensors_digest(spare.published))

    for version in range(1, rounds + 2):
        one_round(version)
    return store.layout.num_bytes, without_first(rows)


def staging(model: Decoder, rounds: int) -> tuple[int, Rows]:
    store, arenas = make_store(model)
    outbox, mappings = Outbox(store.layout), Mappings()
    source = Arena(store.layout)
    source.fill(model)
    filled = outbox.fill(source.published)

    def copy() -> None:
        np.copyto(arenas[1].flat.numpy(), source.flat.numpy())

    def one_by_one() -> None:
        for name, tensor in source.published.items():
            transaction.stage(name, tensor)

    def by_handle() -> None:
        receive_handle(transaction, filled.handle, filled.layout, None, mappings)

    rows: Rows = {}
    actions = {"a copy of the bytes": copy, "handle: map and stage": by_handle, "tensor by tensor": one_by_one}
    for _ in range(rounds + 1):
        for name, action in actions.items():
            transaction = store.begin(1)
            rows.setdefault(name, []).append(timed(action))
            transaction.abort()
    return store.layout.num_bytes, without_first(rows)


def over_group(name: str, model: Decoder, rounds: int) -> tuple[int, Rows]:
    store, _ = make_store(model)
    layout = store.layout.published
    plain_port, listener = free_port(), listen("127.0.0.1")
    port = listener.getsockname()[1]
    listener.close()
    arguments = ["--model", name, "--send", str(plain_port), str(port), str(layout.num_bytes), str(rounds + 1)]
    sender = subprocess.Popen([sys.executable, __file__, *arguments])
    try:
        plain = make_plain(plain_port, 1)
        group = join_group("weights", "127.0.0.1", port, 1, 2, timeout_s=WAIT_S)
        memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        ready = torch.zeros(1, dtype=torch.uint8)
        rows: Rows = {}
        actions: dict[str, Callable[[], object]] = {
            "torch's broadcast of one flat tensor": lambda: dist.broadcast(memory, 0, group=plain),
            "group, flattened: receive and stage": lambda: receive(store, group, flattened=True),
            "group, one broadcast a tensor": lambda: receive(store, group, flattened=False),
        }
        for _ in range(rounds + 1):
            for row, action in actions.items():
                # Both begin together, so that no row pays for the sender's preparations.
                dist.all_reduce(ready, group=plain)
                rows.setdefault(row, []).append(timed(action))
        group.leave()
        if sender.wait(WAIT_S):
            raise SystemExit(f"the sender failed with code {sender.returncode}")
    finally:
        sender.kill()
        sender.wait()
    dist.destroy_process_group()
    return layout.num_bytes, without_first(rows)


def receive(store: WeightStore, group: Group, *, flattened: bool) -> None:
    transaction = store.begin(1)
    receive_group(transaction, group, store.layout.published, flattened=flattened, timeout_s=WAIT_S)
    transaction.abort()


def send(name: str, plain_port: int, port: int, num_bytes: int, rounds: int) -> None:
    """The other process of ``over_group``: one flat buffer, sent in each of the three ways."""
    plain = make_plain(plain_port, 0)
    group = join_group("weights", "127.0.0.1", port, 0, 2, timeout_s=WAIT_S)
    memory, ready = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    model = load_model(resolve_model(name), torch.bfloat16)
    pieces = list(published_tensors(model).values())
    for _ in range(rounds):
        dist.all_reduce(ready, group=plain)
        dist.broadcast(memory, 0, group=plain)
        dist.all_reduce(ready, group=plain)
        group.send_bucket(memory)
        dist.all_reduce(ready, group=plain)
        group.send_bucket(pieces)
    group.leave()
    dist.destroy_process_group()


def make_plain(port: int, rank: int) -> dist.ProcessGroup | None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=WAIT_S), 2, rank)
    return dist.group.WORLD


def make_store(model: Decoder, derived: RolloutDecoder | None = None) -> tuple[WeightStore, list[Arena]]:
    layout = ArenaLayout.of(model.spec, model.dtype)
    arenas = [Arena(layout), Arena(layout)]
    for arena in arenas:
        # Memory that was never written is not there yet.
        arena.flat.zero_()
    move_into(model, arenas[0])
    return WeightStore(model, derived=derived, arenas=arenas), arenas


def deep(spec: DecoderSpec, layers: int, hidden: int) -> Decoder:
    """A tied model of random weights with 9 tensors a layer, its embedding as small as may be."""
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_heads": 1, "num_kv_heads": 1}
    changed = replace(spec, num_layers=layers, head_dim=hidden, vocab_size=256, tied_embeddings=True, **sizes)
    arena = Arena(ArenaLayout.of(changed, torch.bfloat16))
    arena.flat.view(torch.bfloat16).normal_(0, 0.02)
    return model_over(arena)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def without_first(rows: Rows) -> Rows:
    """The first round maps memory and builds plans that the others find ready."""
    return {name: times[1:] for name, times in rows.items()}


if __name__ == "__main__":
    main()
