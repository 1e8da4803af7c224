"""Proves on this machine, in about a second, that the operators keep their promise.

Each check computes the same rows in different company: other batch sizes, other threads, keys from
a pool or from the batch, whole or in chunks. One differing bit fails it. The checks run on the
shapes of the model at hand, for kernels choose their path by shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from unison.ops import attention as attention_ops
from unison.ops import basic
from unison.ops.padding import EXACT, NumericsPath
from unison.ops.plan import AttentionGroup, AttentionPlan, PoolExtent, causal_mask, packed_plan
from unison.ops.vocab import gather_logprobs, row_stats, scaled_logits, vocabulary_logits

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_ROWS = (8, 16, 40, 72, 264)
_LENGTHS = (7, 33, 90, 128, 140, 384, 390, 520, 1030)


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a model asks of the operators: (in, out) of its linears, and its attention heads."""

    linears: tuple[tuple[int, int], ...] = ((576, 960), (576, 576), (576, 3072), (1536, 576))
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    hidden_size: int = 576
    intermediate_size: int = 1536
    vocab_size: int = 49152


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    passed: bool
    failures: tuple[str, ...]
    seconds: float


def run_selftest(dtype: str, shapes: Shapes | None = None, path: NumericsPath = EXACT) -> SelfTestResult:
    """Run all checks in ``dtype`` ("bfloat16" or "float32") under ``path``; remembered per process."""
    return _run(dtype, shapes or Shapes(), path)


@lru_cache(maxsize=32)
def _run(dtype: str, shapes: Shapes, path: NumericsPath) -> SelfTestResult:
    start = time.perf_counter()
    failures: list[str] = []
    generator = torch.Generator().manual_seed(0)
    checks: list[Callable[[torch.dtype, Shapes, NumericsPath, torch.Generator], Iterator[str]]]
    checks = [_check_linears, _check_rows, _check_attention, _check_vocabulary]
    with torch.no_grad():
        for check in checks:
            failures += check(DTYPES[dtype], shapes, path, generator)
    return SelfTestResult(not failures, tuple(failures), time.perf_counter() - start)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _thread_counts() -> tuple[int, ...]:
    return (1, torch.get_num_threads()) if torch.get_num_threads() > 1 else (1, 2)


def _normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _row_failures(name: str, operator: Callable[[Tensor], Tensor], rows: Tensor, path: NumericsPath) -> Iterator[str]:
    """Apply ``operator`` to the first n rows, for several n and thread counts; the rows must agree."""
    with _threads(1):
        alone = torch.cat([_padded(operator, rows[i : i + 1], path) for i in range(rows.shape[0])])
    for threads in _thread_counts():
        with _threads(threads):
            for count in [count for count in _ROWS if count <= rows.shape[0]]:
                differing = int((operator(rows[:count]) != alone[:count]).flatten(1).any(-1).sum())
                if differing:
                    yield f"{name}: {differing} of {count} rows depend on the batch ({threads} threads)"


def _padded(operator: Callable[[Tensor], Tensor], row: Tensor, path: NumericsPath) -> Tensor:
    padding = path.pad_rows(1) - 1
    return operator(torch.cat([row, row.new_zeros(padding, *row.shape[1:])]) if padding else row)[:1]


def _check_linears(
    dtype: torch.dtype, shapes: Shapes, path: NumericsPath, generator: torch.Generator
) -> Iterator[str]:
    for num_in, num_out in shapes.linears:
        weight = _normal(generator, dtype, num_out, num_in)
        rows = _normal(generator, dtype, 72, num_in)
        yield from _row_failures(f"linear {num_in}x{num_out}", lambda x, w=weight: basic.linear(x, w), rows, path)


def _check_rows(dtype: torch.dtype, shapes: Shapes, path: NumericsPath, generator: torch.Generator) -> Iterator[str]:
    weight = _normal(generator, dtype, shapes.hidden_size)
    rows = _normal(generator, dtype, 264, shapes.hidden_size)
    yield from _row_failures("rms_norm", lambda x: basic.rms_norm(x, weight, 1e-5), rows, path)
    rows = _normal(generator, dtype, 264, 2 * shapes.intermediate_size)
    yield from _row_failures("silu_mul", basic.silu_mul, rows, path)
    heads = _normal(generator, dtype, 40, shapes.num_heads, shapes.head_dim)
    angle = torch.randn(1, shapes.head_dim // 2, generator=generator)
    rotate = lambda x: basic.rope(x, angle.cos().expand(len(x), -1), angle.sin().expand(len(x), -1))  # noqa: E731
    yield from _row_failures("rope", rotate, heads, path)


def _check_vocabulary(
    dtype: torch.dtype, shapes: Shapes, path: NumericsPath, generator: torch.Generator
) -> Iterator[str]:
    head = torch.empty(shapes.vocab_size, shapes.hidden_size, dtype=dtype).normal_(std=0.05, generator=generator)
    hidden = _normal(generator, dtype, 16, shapes.hidden_size)
    ids = torch.arange(16) * (shapes.vocab_size // 16)

    def logprob(rows: Tensor) -> Tensor:
        count = rows.shape[0]
        scaled = scaled_logits(vocabulary_logits(rows, head, path), torch.full((count,), 0.7))
        return gather_logprobs(scaled.expand(count, -1), row_stats(scaled), ids[3].expand(count))[:, None]

    yield from _row_failures("log-prob", logprob, hidden, path)


def _check_attention(
    dtype: torch.dtype, shapes: Shapes, path: NumericsPath, generator: torch.Generator
) -> Iterator[str]:
    longest = max(_LENGTHS)
    q = _normal(generator, dtype, longest, shapes.num_heads, shapes.head_dim)
    k = _normal(generator, dtype, longest, shapes.num_kv_heads, shapes.head_dim)
    v = _normal(generator, dtype, longest, shapes.num_kv_heads, shapes.head_dim)
    with _threads(1):
        whole = _packed(q, k, v, longest, shapes, path)
    for threads in _thread_counts():
        with _threads(threads):
            for length in _LENGTHS:
                found = {"training": (_packed(q, k, v, length, shapes, path) != whole[:length]).any(-1).sum()}
                for count in (1, 5):
                    cached = _from_pool(q, k, v, length, count, shapes, path)
                    found[f"chunk of {count}"] = (cached != whole[length - count : length]).any(-1).sum()
                for name, differing in found.items():
                    if differing:
                        yield f"attention, {name}, {length} keys: {int(differing)} rows differ ({threads} threads)"


def _packed(q: Tensor, k: Tensor, v: Tensor, length: int, shapes: Shapes, path: NumericsPath) -> Tensor:
    group_size = shapes.num_heads // shapes.num_kv_heads
    plan = packed_plan([length], group_size=group_size, path=path, dtype=q.dtype)
    rows = [torch.cat([x[:length], x.new_zeros(plan.num_rows - length, *x.shape[1:])]) for x in (q, k, v)]
    return attention_ops.attention(rows[0], rows[1], rows[2], plan, None)[:length]


def _from_pool(
    q: Tensor, k: Tensor, v: Tensor, length: int, count: int, shapes: Shapes, path: NumericsPath
) -> Tensor:
    """The last ``count`` queries over keys that lie in a pool, at an odd place."""
    group_size = shapes.num_heads // shapes.num_kv_heads
    num_keys, offset, start = path.pad_keys(length), 3, length - count
    pool = [x.new_zeros(shapes.num_kv_heads, offset + num_keys, shapes.head_dim) for x in (k, v)]
    for held, x in zip(pool, (k, v), strict=True):
        held[:, offset : offset + start] = x[:start].transpose(0, 1)
    num_queries = count if count == 1 else path.pad_rows(count)
    mask = causal_mask(torch.tensor([start]), num_queries, num_keys, group_size if count > 1 else 1, q.dtype)
    query_rows = torch.zeros(1, num_queries, dtype=torch.int64)
    query_rows[0, :count] = torch.arange(count)
    group = AttentionGroup(query_rows, PoolExtent(offset, num_keys), mask, num_keys)
    slots = torch.arange(offset + start, offset + length)
    plan = AttentionPlan(count, [group], torch.arange(count), slots, path.query_multiple)
    rows = [x[start:length] for x in (q, k, v)]
    return attention_ops.attention(rows[0], rows[1], rows[2], plan, (pool[0], pool[1]))
