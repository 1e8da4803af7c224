"""Proves on this machine, in about a second, that the operators keep their promise.

Each check computes the same rows in different company: other batch sizes, other threads, keys from
a pool or from the batch, whole or in chunks. One differing bit fails it. The checks run on the
shapes of the model at hand, for kernels choose their path by shape. Inputs are such that the large
terms of each sum cancel: another order of addition then shows in the leading digits, which rounding
to bfloat16 would mostly hide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product

import torch
from torch import Tensor

from unison.ops import attention as attention_ops
from unison.ops import basic
from unison.ops.blocks import KEY_BLOCK, num_blocks
from unison.ops.chunk_attention import KEYS_AT_ONCE
from unison.ops.packed import PackedWeight
from unison.ops.padding import EXACT, NumericsPath
from unison.ops.paged import decode_group
from unison.ops.plan import AttentionPlan, ChunkGroup, output_index, packed_plan, padded_rows
from unison.ops.vocab import gather_logprobs, row_stats, scaled_logits, vocabulary_logits

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_ROWS = (8, 16, 40, 72, 264)
_VOCABULARY_ROWS = (8, 40, 136)
_NUM_DISTINCT = 24
"""Rows computed alone; larger batches repeat them."""
_DISTINCT_OUTPUTS = 4096
_LENGTHS = (7, 33, 64, 65, 128, 140, 390, 520, 1030)
_BATCHED_LENGTHS = (5, 300, 31, 97, 64, 388)
_SHARED_LENGTH = 200
_NUM_SHARING = 7
_LARGE = 2.0**14
"""How much larger than the rest the terms that cancel are."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a model asks of the operators: (in, out, bias) of its linears, and its attention heads."""

    linears: tuple[tuple[int, int, bool], ...] = (
        (576, 960, False),
        (576, 576, False),
        (576, 3072, False),
        (1536, 576, False),
    )
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    hidden_size: int = 576
    intermediate_size: int = 1536
    vocab_size: int = 49152
    longest: int = 8192
    """Most tokens of a sequence."""


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    passed: bool
    failures: tuple[str, ...]
    seconds: float


def run_selftest(dtype: str, shapes: Shapes | None = None, path: NumericsPath = EXACT) -> SelfTestResult:
    """Run all checks in ``dtype`` ("bfloat16" or "float32") under ``path``.

    The thread counts proved are 1, 2 and the present one. Results are remembered per process.
    """
    return _run(dtype, shapes or Shapes(), path, _proved_threads())


@lru_cache(maxsize=32)
def _run(dtype: str, shapes: Shapes, path: NumericsPath, threads: tuple[int, ...]) -> SelfTestResult:
    start = time.perf_counter()
    bench = _Bench(DTYPES[dtype], shapes, path, threads, torch.Generator().manual_seed(0))
    failures: list[str] = []
    with torch.no_grad():
        for check in (_check_linears, _check_rows, _check_silu, _check_attention, _check_vocabulary):
            failures += check(bench)
    return SelfTestResult(not failures, tuple(failures), time.perf_counter() - start)


def packing_failures(shapes: Shapes) -> tuple[str, ...]:
    """Where packed weights (bfloat16) give other bits than plain ones in ``basic.linear``; empty where nowhere.

    On the model's own shapes, its vocabulary projection included, for several row counts and thread counts.
    Results are remembered per process.
    """
    return _packing_failures(shapes, _proved_threads())


@lru_cache(maxsize=32)
def _packing_failures(shapes: Shapes, threads: tuple[int, ...]) -> tuple[str, ...]:
    bench = _Bench(torch.bfloat16, shapes, EXACT, threads, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return tuple(_check_packing(bench))


def _proved_threads() -> tuple[int, ...]:
    return tuple(sorted({1, 2, torch.get_num_threads()}))


@dataclass(frozen=True, slots=True)
class _Bench:
    """What every check is given."""

    dtype: torch.dtype
    shapes: Shapes
    path: NumericsPath
    threads: tuple[int, ...]
    generator: torch.Generator

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=self.dtype).normal_(std=std, generator=self.generator)

    def cancelling(self, left: Tensor, right: Tensor) -> None:
        """Change both [rows, terms] so that in each product left @ right.T half of the terms cancel, large ones."""
        order = torch.randperm(left.shape[-1], generator=self.generator)
        some, others = order[: len(order) // 4], order[len(order) // 4 : len(order) // 4 * 2]
        right[..., others] = right[..., some]
        left[..., some] *= _LARGE
        left[..., others] = -left[..., some]

    def row_failures(
        self, name: str, operator: Callable[[Tensor], Tensor], rows: Tensor, counts: Sequence[int], padded: bool = True
    ) -> Iterator[str]:
        """Rows alone against the same rows in batches of several sizes, for each thread count."""
        with threads_set_to(1):
            alone = torch.cat([self._alone(operator, rows[i : i + 1], padded) for i in range(len(rows))])
        for threads in self.threads:
            with threads_set_to(threads):
                for count in counts:
                    index = torch.arange(count) % len(rows)
                    differing = int((operator(rows[index]) != alone[index]).flatten(1).any(-1).sum())
                    if differing:
                        yield f"{name}: {differing} of {count} rows depend on the batch ({threads} threads)"

    def _alone(self, operator: Callable[[Tensor], Tensor], row: Tensor, padded: bool) -> Tensor:
        padding = self.path.pad_rows(1) - 1 if padded else 0
        return operator(torch.cat([row, row.new_zeros(padding, *row.shape[1:])]))[:1]


@contextmanager
def threads_set_to(count: int) -> Iterator[None]:
    """Run a block with ``count`` threads of torch, and put the present number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_linears(bench: _Bench) -> Iterator[str]:
    for num_in, num_out, has_bias in bench.shapes.linears:
        weight, rows = bench.normal(num_out, num_in), bench.normal(_NUM_DISTINCT, num_in)
        bench.cancelling(rows, weight)
        bias = bench.normal(num_out) if has_bias else None
        operator = partial(basic.linear, weight_NK=weight, bias_N=bias, path=bench.path)
        yield from bench.row_failures(f"linear {num_in}x{num_out}", operator, rows, _ROWS)


def _check_packing(bench: _Bench) -> Iterator[str]:
    shapes = bench.shapes
    linears = [(f"linear {num_in}x{num_out}", num_in, num_out, bias) for num_in, num_out, bias in shapes.linears]
    linears.append(("logits", shapes.hidden_size, shapes.vocab_size, False))
    for name, num_in, num_out, has_bias in linears:
        # The rows of a large matrix repeat: the kernel knows the shape alone, and drawing numbers is slow.
        weight, rows = bench.normal(min(num_out, _DISTINCT_OUTPUTS), num_in), bench.normal(_NUM_DISTINCT, num_in)
        bench.cancelling(rows, weight)
        weight = weight.repeat(-(-num_out // len(weight)), 1)[:num_out]
        bias = bench.normal(num_out) if has_bias else None
        packed = PackedWeight(weight)
        for threads, count in product(bench.threads, _VOCABULARY_ROWS if name == "logits" else _ROWS):
            with threads_set_to(threads):
                x = rows[torch.arange(count) % len(rows)]
                packed_rows, plain_rows = (basic.linear(x, held, bias, bench.path) for held in (packed, weight))
                differing = int((packed_rows != plain_rows).any(-1).sum())
            if differing:
                yield f"{name}: {differing} of {count} rows differ ({threads} threads)"


def _check_rows(bench: _Bench) -> Iterator[str]:
    shapes = bench.shapes
    for name, row in (("rms_norm", (shapes.hidden_size,)), ("head norm", (shapes.num_heads, shapes.head_dim))):
        operator = partial(basic.rms_norm, weight=bench.normal(row[-1]), epsilon=1e-5)
        # It sums in float32 under either dtype; seen through bfloat16 the check would be half blind.
        yield from bench.row_failures(name, operator, bench.normal(_NUM_DISTINCT, *row).float(), _ROWS)
    rows = bench.normal(_NUM_DISTINCT, 2 * shapes.intermediate_size)
    yield from bench.row_failures("silu_mul", basic.silu_mul, rows, _ROWS)
    heads = bench.normal(_NUM_DISTINCT, shapes.num_heads, shapes.head_dim)
    angle = torch.randn(1, shapes.head_dim // 2, generator=bench.generator)
    cos, sin = basic.rope_factors(angle.cos(), angle.sin())

    def rotate(x: Tensor) -> Tensor:
        return basic.rope(x, cos.expand(len(x), -1, -1), sin.expand(len(x), -1, -1))

    yield from bench.row_failures("rope", rotate, heads, _ROWS)


def _check_silu(bench: _Bench) -> Iterator[str]:
    """Each value in the middle of a row and alone in one: kernels have a second form for what is left over."""
    if bench.dtype == torch.bfloat16:
        values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        values = values[values.isfinite()]
    else:
        values = bench.normal(1 << 16, std=8.0)
    inside = basic.silu_mul(torch.cat([values, torch.ones_like(values)])[None])[0]
    apart = basic.silu_mul(torch.stack([values, torch.ones_like(values)], dim=1))[:, 0]
    differing = int((inside != apart).sum())
    if differing:
        yield f"silu: {differing} of {len(values)} values depend on their place"


def _check_vocabulary(bench: _Bench) -> Iterator[str]:
    shapes = bench.shapes
    head = bench.normal(shapes.vocab_size, shapes.hidden_size, std=0.05)
    hidden = bench.normal(_NUM_DISTINCT // 2, shapes.hidden_size)
    bench.cancelling(hidden, head)
    project = partial(vocabulary_logits, head_VE=head, path=bench.path)
    yield from bench.row_failures("logits", project, hidden, _VOCABULARY_ROWS)
    token = shapes.vocab_size // 3

    def statistics(logits: Tensor) -> Tensor:
        scaled = scaled_logits(logits, torch.full((len(logits),), 0.7))
        stats = row_stats(scaled)
        logprobs = gather_logprobs(scaled, stats, torch.full((len(logits),), token))
        return torch.cat([stats.block_sums.double(), stats.total[:, None], logprobs[:, None]], dim=1)

    yield from bench.row_failures("log-prob", statistics, project(hidden), (1, 3, 12), padded=False)


@dataclass(frozen=True, slots=True)
class _Heads:
    """Queries, keys and values [tokens, heads, D] of the longest sequence."""

    q: Tensor
    k: Tensor
    v: Tensor

    def rows(self, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.q[start:end], self.k[start:end], self.v[start:end]


def _check_attention(bench: _Bench) -> Iterator[str]:
    heads = _heads(bench)
    with threads_set_to(1):
        whole = _packed(heads, max(_LENGTHS), bench)
        far = _from_pool(heads, (len(heads.q),), 2, bench)
    for threads in bench.threads:
        with threads_set_to(threads):
            found: dict[str, int] = {}
            for length in _LENGTHS:
                rows = _packed(heads, length, bench)
                found[f"training, {length} keys"] = int((rows != whole[:length]).any(-1).sum())
                for count in (1, 5):
                    rows = _from_pool(heads, (length,), count, bench)
                    expected = whole[length - count : length]
                    found[f"chunk of {count}, {length} keys"] = int((rows != expected).any(-1).sum())
            rows = _from_pool(heads, _BATCHED_LENGTHS, 1, bench)
            expected = whole[torch.tensor(_BATCHED_LENGTHS) - 1]
            found[f"{len(rows)} sequences in one call"] = int((rows != expected).any(-1).sum())
            rows = _from_pool(heads, (_SHARED_LENGTH,) * _NUM_SHARING, 1, bench, shared=True)
            found["a prompt read for several"] = int((rows != whole[_SHARED_LENGTH - 1]).any(-1).sum())
            # Its other rows would take long to compute.
            rows = _from_pool(heads, (len(heads.q), 70), 1, bench)
            found[f"decoding, {len(heads.q)} keys"] = int((rows != torch.stack([far[1], whole[69]])).any(-1).sum())
        for name, differing in found.items():
            if differing:
                yield f"attention, {name}: {differing} rows differ ({threads} threads)"


def _heads(bench: _Bench) -> _Heads:
    """Of every four keys the first two are equal, and their values large and opposite."""
    shapes = bench.shapes
    # Longer sequences are made of products and sums of the same sizes.
    longest = max(*_LENGTHS, min(shapes.longest, KEYS_AT_ONCE + 100))
    q = bench.normal(longest, shapes.num_heads, shapes.head_dim)
    k, v = (bench.normal(longest, shapes.num_kv_heads, shapes.head_dim) for _ in range(2))
    bench.cancelling(q, k)
    first = torch.arange(0, longest - 1, 4)
    k[first + 1] = k[first]
    v[first] *= _LARGE
    v[first + 1] = -v[first]
    return _Heads(q, k, v)


def _packed(heads: _Heads, length: int, bench: _Bench) -> Tensor:
    plan = packed_plan([length], path=bench.path)
    q, k, v = (_pad(x, plan.num_rows) for x in heads.rows(0, length))
    return attention_ops.attention(q, k, v, plan, None)[:length]


def _from_pool(heads: _Heads, lengths: Sequence[int], count: int, bench: _Bench, *, shared: bool = False) -> Tensor:
    """The last ``count`` queries of one sequence or several over keys in blocks of a pool, in no order.

    ``shared``: all but the last block of each is the same one in memory.
    """
    shapes, num_sequences = bench.shapes, len(lengths)
    counts = [num_blocks(length) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(1)).tolist()
    pool = [
        torch.zeros((len(order), shapes.num_kv_heads, KEY_BLOCK, shapes.head_dim), dtype=bench.dtype) for _ in range(2)
    ]
    tables: list[list[int]] = []
    for length, most in zip(lengths, counts, strict=True):
        common = tables[0][: most - 1] if shared and tables else []
        table = common + [order.pop() for _ in range(most - len(common))]
        for i, block in enumerate(table):
            for held, x in zip(pool, (heads.k, heads.v), strict=True):
                part = x[i * KEY_BLOCK : min(length, (i + 1) * KEY_BLOCK)]
                held[block, :, : len(part)] = part.transpose(0, 1)
        tables.append(table)
    num_rows = bench.path.pad_rows(num_sequences * count)
    segments = [(b * count, (b + 1) * count) for b in range(num_sequences)]
    if count == 1:
        plan = AttentionPlan(num_rows, bench.path, [], decode_group(tables, lengths, bench.dtype))
    else:
        first = torch.tensor(lengths) - count
        group = ChunkGroup(padded_rows(segments, 8), torch.tensor(tables), first, counts[0] * KEY_BLOCK, in_pool=True)
        plan = AttentionPlan(num_rows, bench.path, [group], None, output_index([group], segments, num_rows))
    parts = [heads.rows(length - count, length) for length in lengths]
    q, k, v = (_pad(torch.cat(x), num_rows) for x in zip(*parts, strict=True))
    return attention_ops.attention(q, k, v, plan, (pool[0], pool[1]))[: num_sequences * count]


def _pad(rows: Tensor, num_rows: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(num_rows - len(rows), *rows.shape[1:])])
