"""The least time in which this machine can answer a workload, from its measured rates and the model's shape.

usage: limits.py --workload FILE [--model M] [--dtype D] [--threads N] [--rows 1,8,...] [--max-running N]
                 [--seconds S] [--json FILE]

Two limits are printed:

bound    every step takes max(operations / best measured GEMM rate, bytes / best measured read bandwidth)
linear   the linear layers take what F.linear takes at the step's number of rows, all else nothing: where an engine on
         plain F.linear ends

Assumptions of both: all requests are there at once and at most --max-running samples run together; a prompt's tokens
that several requests begin with are computed once and read once a step for all that need them; each step reads all
weights once, decodes one token of each running sample and prefills whole prompts; sampling, norms, scheduling and
Python cost nothing.
"""

from __future__ import annotations

import argparse
import json
import mmap
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from unison.bench.workload import Conversation, Workload, read_workload
from unison.models.loading import read_config
from unison.models.registry import read_spec
from unison.models.sources import resolve_model
from unison.models.spec import DecoderSpec

CACHE_BYTES = 160_000_000
"""Weights are taken in turn from copies larger than any last-level cache together, as in a real step."""
POOL_BYTES = 512 * 1024 * 1024
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Rates:
    """What the machine does: operations per second, bytes per second, and F.linear over all weights of a model."""

    gemm_flops: float
    read_bytes_per_s: float
    body_s: dict[int, float]
    """Rows -> seconds of F.linear over all matrices of all layers."""
    head_s: dict[int, float]


@dataclass
class Bill:
    """What a workload costs at least."""

    num_steps: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    bound_s: float = 0.0
    compute_bound_s: float = 0.0
    """Part of bound_s in which operations, not memory, set the time."""
    linear_s: float = 0.0


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    workload = read_workload(Path(options.workload))
    spec = read_spec(read_config(resolve_model(options.model)))
    bandwidths = measure_bandwidth(options.seconds)
    rates = {name: measure_rates(spec, name, options.rows, bandwidths, options.seconds) for name in options.dtypes}
    print_machine(rates, bandwidths)
    bills = {name: bill_of(workload, spec, rates[name], name, options.max_running) for name in options.dtypes}
    for name, bill in bills.items():
        print_bill(workload, options.model, name, bill)
    if options.json:
        data = {
            "workload": workload.name,
            "model": options.model,
            "threads": torch.get_num_threads(),
            "rates": {name: asdict(one) for name, one in rates.items()},
            "limits": {name: asdict(one) for name, one in bills.items()},
        }
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", dest="dtypes", choices=sorted(DTYPES), nargs="+", default=sorted(DTYPES))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument(
        "--rows", type=lambda text: [int(word) for word in text.split(",")], default=[1, 8, 16, 32, 64, 128, 512]
    )
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.4, help="spent on each single measurement")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def seconds_of(calls: Sequence[Callable[[], object]], seconds: float) -> float:
    """Seconds of one call: the 10th percentile over many, the calls taken in turn (a sample nobody interrupted)."""
    for call in calls[:3]:
        call()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 12 or (len(times) < 400 and time.perf_counter() - started < seconds):
        call = calls[len(times) % len(calls)]
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return sorted(times)[len(times) // 10]


def measure_bandwidth(seconds: float) -> dict[str, float]:
    """Bytes per second of summing float32 numbers, on pages of the usual size and on huge ones."""
    plain = torch.ones(POOL_BYTES // 4)
    found = {"4 KiB pages": read_rate(plain, seconds)}
    del plain
    region = mmap.mmap(-1, POOL_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
        found["huge pages"] = read_rate(torch.frombuffer(region, dtype=torch.float32).fill_(1.0), seconds)
    return found


def read_rate(pool: Tensor, seconds: float) -> float:
    pieces = pool.chunk(32)
    return pieces[0].nbytes / seconds_of([piece.sum for piece in pieces], seconds)


def measure_rates(
    spec: DecoderSpec, dtype_name: str, rows: Sequence[int], bandwidths: dict[str, float], seconds: float
) -> Rates:
    dtype = DTYPES[dtype_name]
    body = dict.fromkeys(rows, 0.0)
    head: dict[int, float] = {}
    best = square_rate(dtype, seconds)
    for num_out, num_in, count in (*matrices(spec), (spec.vocab_size, spec.hidden_size, 0)):
        copies = max(2, min(64, CACHE_BYTES // (num_out * num_in * dtype.itemsize)))
        weights = [torch.randn(num_out, num_in).to(dtype) for _ in range(copies)]
        for num_rows in rows:
            x = torch.randn(num_rows, num_in).to(dtype)
            spent = seconds_of([lambda w=w, x=x: linear(x, w) for w in weights], seconds)
            best = max(best, 2 * num_rows * num_in * num_out / spent)
            if count:
                body[num_rows] += count * spent
            else:
                head[num_rows] = spent
    return Rates(best, max(bandwidths.values()), body, head)


def square_rate(dtype: torch.dtype, seconds: float, size: int = 1024) -> float:
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / seconds_of([lambda: left @ right], seconds)


def matrices(spec: DecoderSpec) -> list[tuple[int, int, int]]:
    """(rows, columns, how many there are) of the layers' matrices, fused as they are computed."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner, layers = spec.hidden_size, spec.intermediate_size, spec.num_layers
    shapes = ((queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner))
    return [(*shape, layers) for shape in shapes]


class Prefixes:
    """Which tokens at the head of a history some earlier one had in common with it."""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}

    def add(self, tokens: Sequence[int]) -> int:
        """Number of tokens that no history added before began with."""
        node, new = self._root, 0
        for token in tokens:
            new += token not in node
            node = node.setdefault(token, {})
        return new


@dataclass
class Running:
    """One sample of a conversation on its way. ``own_tokens`` are those of its context that no other sample has."""

    conversation: Conversation
    turn: int
    context: int
    own_tokens: int
    left: int


def bill_of(workload: Workload, spec: DecoderSpec, rates: Rates, dtype_name: str, max_running: int) -> Bill:
    """Go through the workload step by step, each sample drawing one token a step from its prompt's end on."""
    bill, computed = Bill(), Prefixes()
    waiting = [one for one in reversed(workload.conversations) for _ in range(one.sampling.n)]
    running: list[Running] = []
    live_prompt_tokens, changed = 0, True
    while waiting or running:
        prefill = sum(next_turn(one) for one in running if one.left == 0)
        decoding = sum(one.left < one.conversation.turns[one.turn].max_new_tokens for one in running)
        while waiting and len(running) < max_running:
            conversation = waiting.pop()
            ids = conversation.turns[0].new_ids
            prefill += computed.add(ids)
            running.append(Running(conversation, 0, len(ids), 0, conversation.turns[0].max_new_tokens))
            changed = True
        if changed:
            live = Prefixes()
            live_prompt_tokens = sum(live.add(one.conversation.turns[0].new_ids) for one in running)
        kv_tokens = live_prompt_tokens + sum(one.own_tokens for one in running)
        contexts = sum(one.context for one in running)
        charge(bill, spec, rates, DTYPES[dtype_name].itemsize, prefill, decoding, len(running), kv_tokens, contexts)
        for one in running:
            one.left -= 1
            one.context += 1
            one.own_tokens += 1
        going_on = [one for one in running if one.left or one.turn + 1 < len(one.conversation.turns)]
        changed = len(going_on) < len(running)
        running = going_on
    return bill


def next_turn(one: Running) -> int:
    """Begin the next turn; the number of tokens it prefills: what it brings, and the last one sampled before it."""
    one.turn += 1
    turn = one.conversation.turns[one.turn]
    one.left = turn.max_new_tokens
    one.context += len(turn.new_ids)
    one.own_tokens += len(turn.new_ids)
    return len(turn.new_ids) + 1


def charge(
    bill: Bill,
    spec: DecoderSpec,
    rates: Rates,
    element_bytes: int,
    prefill: int,
    decoding: int,
    sampled: int,
    kv_tokens: int,
    contexts: int,
) -> None:
    """Add one step. Attention is charged for the last query of each sample; that inside prompts is left out."""
    body = sum(num_out * num_in * count for num_out, num_in, count in matrices(spec))
    head = spec.vocab_size * spec.hidden_size
    rows = prefill + decoding
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim * contexts
    compute_s = (2 * rows * body + 2 * sampled * head + attention) / rates.gemm_flops
    num_bytes = (body + head) * element_bytes + kv_tokens * spec.kv_bytes_per_token(element_bytes)
    memory_s = num_bytes / rates.read_bytes_per_s
    bill.num_steps += 1
    bill.prefill_tokens += prefill
    bill.output_tokens += sampled
    bill.bound_s += max(compute_s, memory_s)
    bill.compute_bound_s += compute_s if compute_s >= memory_s else 0.0
    bill.linear_s += interpolated(rates.body_s, rows) + interpolated(rates.head_s, sampled)


def interpolated(measured: dict[int, float], rows: int) -> float:
    """Seconds at a number of rows, linear between those measured and proportional beyond the last."""
    points = sorted(measured)
    place = bisect_left(points, rows)
    if place == len(points):
        return measured[points[-1]] * rows / points[-1]
    if place == 0 or points[place] == rows:
        return measured[points[place]]
    low, high = points[place - 1], points[place]
    return measured[low] + (measured[high] - measured[low]) * (rows - low) / (high - low)


def print_machine(rates: dict[str, Rates], bandwidths: dict[str, float]) -> None:
    print(f"threads {torch.get_num_threads()}")
    print("read bandwidth  " + ", ".join(f"{rate / 1e9:.1f} GB/s on {pages}" for pages, rate in bandwidths.items()))
    for name, one in rates.items():
        print(f"{name:<9} best GEMM rate {one.gemm_flops / 1e9:,.0f} GFLOP/s; F.linear over all weights of a step:")
        for rows in one.body_s:
            whole = one.body_s[rows] + one.head_s[rows]
            print(
                f"  {rows:>5} rows: layers {1e3 * one.body_s[rows]:>8.2f} ms, head {1e3 * one.head_s[rows]:>8.2f} ms"
                f"  ({rows / whole:>8.1f} tokens/s)"
            )


def print_bill(workload: Workload, model: str, dtype_name: str, bill: Bill) -> None:
    share = bill.compute_bound_s / bill.bound_s
    print(
        f"\n{workload.name} on {model}, {dtype_name}: {bill.output_tokens:,} tokens in {bill.num_steps:,} steps, "
        f"{bill.prefill_tokens:,} prompt tokens computed"
    )
    print(
        f"  bound   {bill.output_tokens / bill.bound_s:>10,.1f} tokens/s ({bill.bound_s:.2f} s, "
        f"{share:.0%} of it set by operations, the rest by memory)"
    )
    print(f"  linear  {bill.output_tokens / bill.linear_s:>10,.1f} tokens/s ({bill.linear_s:.2f} s)")


if __name__ == "__main__":
    main()
