"""What generalised advantage estimation costs, beside a loop over the tokens and beside the machine's memory.

usage: gae.py [--threads N] [--dtype D] [--places T] [--rounds N]

8 and 64 rows of T places in which the policy wrote about 7 of 10, in turns of 256 or scattered: masks are part of what
is timed on both sides. The loop is the ordinary implementation, one step a token for all rows together, which carries
its value and advantage over what the policy did not write. The bound is reading rewards, values and mask once and
writing advantages and returns once, at the best rate this machine reads or
copies memory. Times are the least of all rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from unison.algorithms.advantages.gae import gae

GAMMA, LAM = 0.999, 0.95
TURN = 256
POOL_BYTES = 512 * 1024 * 1024
Rows = tuple[Tensor, Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--places", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    rates = bandwidths(options.rounds)
    print(
        f"{options.threads} threads, {options.dtype}; memory: "
        + ", ".join(f"{k} {v:.1f} GB/s" for k, v in rates.items())
    )
    for num_rows in (8, 64):
        compare(num_rows, options.places, dtype, options.rounds, max(rates.values()))
    for factor in (1, 2, 4):
        rows = make_rows(8, factor * options.places, dtype, TURN)
        spent = seconds(partial(ours, rows), options.rounds)
        print(
            f"8 x {factor * options.places:<8} {1e3 * spent:>8.2f} ms  {1e9 * spent / rows[0].numel():>6.2f} ns a token"
        )


def compare(num_rows: int, places: int, dtype: torch.dtype, rounds: int, rate: float) -> None:
    rows = make_rows(num_rows, places, dtype, TURN)
    looped: list[Tensor] = []
    loop_s = seconds(lambda: looped.append(loop(rows)[0]), 1, warm=0)
    print(f"{num_rows} x {places:<8} loop over tokens {1e3 * loop_s:>8.1f} ms")
    error = (torch.where(rows[2], ours(rows)[0] - looped[0], 0.0).abs().amax(1) / looped[0].abs().amax(1)).max()
    for name, turn in (("in turns", TURN), ("scattered", 1)):
        rows = make_rows(num_rows, places, dtype, turn)
        spent = seconds(partial(ours, rows), rounds)
        size_bytes = sum(column.nbytes for column in rows) + sum(column.nbytes for column in rows[:2])
        bound_s = size_bytes / (1e9 * rate)
        print(
            f"    {name:<10} {1e3 * spent:>8.2f} ms  {loop_s / spent:>7.0f} x the loop's speed  "
            f"{bound_s / spent:>6.1%} of the memory bound ({1e3 * bound_s:.2f} ms)"
        )
    print(f"    largest difference from the loop {float(error):.1e} of a row's largest advantage")


def make_rows(num_rows: int, places: int, dtype: torch.dtype, turn: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(num_rows, places, generator=generator).to(dtype) for _ in range(2))
    written = torch.rand(num_rows, -(-places // turn), generator=generator) < 0.7
    return rewards, values, written.repeat_interleave(turn, 1)[:, :places].contiguous()


def ours(rows: Rows) -> tuple[Tensor, Tensor]:
    return gae(*rows, gamma=GAMMA, lam=LAM)


def loop(rows: Rows) -> tuple[Tensor, Tensor]:
    rewards, values, mask = rows
    next_value, advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    columns = []
    for place in reversed(range(values.shape[1])):
        written, value = mask[:, place], values[:, place]
        delta = rewards[:, place] + GAMMA * next_value - value
        advantage = torch.where(written, delta + GAMMA * LAM * advantage, advantage)
        next_value = torch.where(written, value, next_value)
        columns.append(advantage)
    advantages = torch.where(mask, torch.stack(columns[::-1], dim=1), 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def bandwidths(rounds: int) -> dict[str, float]:
    """GB per second, of summing a pool and of copying half of it to the other: bytes read and written."""
    pool = torch.ones(POOL_BYTES // 4)
    half, other = pool.chunk(2)
    return {
        "read": pool.nbytes / 1e9 / seconds(pool.sum, rounds),
        "copy": pool.nbytes / 1e9 / seconds(lambda: other.copy_(half), rounds),
    }


def seconds(call: Callable[[], object], rounds: int, warm: int = 1) -> float:
    for _ in range(warm):
        call()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


if __name__ == "__main__":
    main()
