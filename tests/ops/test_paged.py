"""Queries over keys in blocks of a pool, wherever they lie: the rows of training, to the bit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unison.ops import reference
from unison.ops.attention import LayerCache, attention
from unison.ops.blocks import KEY_BLOCK, num_blocks
from unison.ops.padding import EXACT
from unison.ops.paged import DecodeGroup, _runs, decode_group
from unison.ops.plan import AttentionPlan, ChunkGroup, output_index, packed_plan, padded_rows

BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
HEADS = [(1, 1, 64), (1, 1, 32), (3, 3, 32), (4, 2, 80), (9, 3, 64), (8, 1, 128), (3, 1, 16)]
PADDED_HEADS = pytest.mark.parametrize("heads", HEADS, ids=["-".join(map(str, heads)) for heads in HEADS])


@dataclass
class Sequences:
    """Queries, keys and values [tokens, heads, D] of several sequences, and the pool their keys lie in."""

    rows: list[tuple[Tensor, Tensor, Tensor]]
    tables: list[list[int]]
    cache: LayerCache

    @property
    def lengths(self) -> list[int]:
        return [len(q) for q, _, _ in self.rows]

    def trained(self) -> list[Tensor]:
        """Outputs of each sequence by the trainer's plan: keys are rows of the same call."""
        plan = packed_plan(self.lengths, path=EXACT)
        padding = plan.num_rows - sum(self.lengths)
        q, k, v = (torch.cat([*x, x[0].new_zeros(padding, *x[0].shape[1:])]) for x in zip(*self.rows, strict=True))
        out = attention(q, k, v, plan, None)
        return [out[start:end] for start, end in plan.segments]


def normal(noise: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=noise).to(dtype)


def make_sequences(
    families: Sequence[tuple[int, Sequence[int]]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    spread: float = 1.0,
    seed: int = 0,
) -> Sequences:
    """Sequences whose blocks lie in no order among ``spread`` times as many, all others being NaN.

    families: (blocks that its sequences have in common, tokens of each behind them).
    """
    noise, places = torch.Generator().manual_seed(seed), random.Random(seed)
    num_heads, num_kv_heads, head_dim = heads
    most = sum(shared + sum(num_blocks(length) for length in lengths) for shared, lengths in families)
    free = list(range(int(most * spread)))
    places.shuffle(free)
    cache = tuple(
        torch.full((len(free), num_kv_heads, KEY_BLOCK, head_dim), float("nan"), dtype=dtype) for _ in range(2)
    )
    rows, tables = [], []
    for shared, lengths in families:
        common = [normal(noise, dtype, shared * KEY_BLOCK, num_kv_heads, head_dim) for _ in range(2)]
        common_table = [free.pop() for _ in range(shared)]
        for length in lengths:
            own = [normal(noise, dtype, length, num_kv_heads, head_dim) for _ in range(2)]
            k, v = (torch.cat(pair) for pair in zip(common, own, strict=True))
            rows.append((normal(noise, dtype, len(k), num_heads, head_dim), k, v))
            tables.append(common_table + [free.pop() for _ in range(num_blocks(length))])
            for held, x in zip(cache, (k, v), strict=True):
                # Behind a sequence's keys lies what a copied page brought along.
                tail = normal(noise, dtype, len(tables[-1]) * KEY_BLOCK - len(x), num_kv_heads, head_dim) * 100
                blocks = torch.cat([x, tail]).view(-1, KEY_BLOCK, num_kv_heads, head_dim)
                held[torch.tensor(tables[-1])] = blocks.transpose(1, 2)
    return Sequences(rows, tables, (cache[0], cache[1]))


def decoded(sequences: Sequences, dtype: torch.dtype, order: Sequence[int] | None = None) -> tuple[Tensor, DecodeGroup]:
    """Outputs [B, H*D] of the last query of each sequence, all in one call."""
    order = range(len(sequences.rows)) if order is None else order
    group = decode_group([sequences.tables[i] for i in order], [sequences.lengths[i] for i in order], dtype)
    num_rows = EXACT.pad_rows(len(order))
    last = [torch.stack([sequences.rows[i][part][-1] for i in order]) for part in range(3)]
    q, k, v = (torch.cat([x, x.new_zeros(num_rows - len(order), *x.shape[1:])]) for x in last)
    out = attention(q, k, v, AttentionPlan(num_rows, EXACT, [], group), sequences.cache)
    assert out.shape[0] == num_rows and not out[len(order) :].any()
    return out[: len(order)], group


FAMILIES = [
    (0, (1, 63, 64, 65, 128, 200)),
    (2, (1, 70)),
    (1, (5, 64, 130)),
    (3, (9,) * 5),
    (1, (33,) * 20),
    (0, (530,)),
]


@BOTH_DTYPES
@PADDED_HEADS
@pytest.mark.parametrize("spread", [1.0, 1.7, 30.0], ids=["dense", "with gaps", "scattered"])
def test_decoding_gives_the_rows_of_training_wherever_the_blocks_lie(
    heads: tuple[int, int, int], dtype: torch.dtype, spread: float
) -> None:
    sequences = make_sequences(FAMILIES, heads, dtype, spread)
    expected = torch.stack([out[-1] for out in sequences.trained()])
    assert bool(expected.isfinite().all())
    backwards = list(reversed(range(len(sequences.rows))))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out, group = decoded(sequences, dtype)
        assert torch.equal(out, expected)
        assert torch.equal(decoded(sequences, dtype, backwards)[0].flip(0), expected)
    assert {batch.degree for batch in group.batches} == {1, 4, 8, 32}
    if spread > 10:
        assert any(isinstance(batch.blocks, Tensor) for batch in group.batches), "no blocks were copied together"
    for i in (0, 1, 2, 6, 30):
        alone, _ = decoded(sequences, dtype, [i])
        assert torch.equal(alone[0], expected[i])


@BOTH_DTYPES
@pytest.mark.parametrize("degree", [*range(2, 10), 16, 17, 20])
def test_a_prefix_may_be_shared_by_any_number(degree: int, dtype: torch.dtype) -> None:
    sequences = make_sequences([(2, tuple(range(1, degree + 1))), (1, (3,))], (4, 2, 32), dtype, spread=2)
    out, group = decoded(sequences, dtype)
    assert torch.equal(out, torch.stack([one[-1] for one in sequences.trained()]))
    assert max(batch.degree for batch in group.batches) >= degree
    for row, (q, k, v) in zip(out, sequences.rows, strict=True):
        whole = reference.attention(q.double(), k.double(), v.double())[-1]
        torch.testing.assert_close(row.double(), whole, rtol=2e-2, atol=2e-2)


@settings(deadline=None, max_examples=60)
@given(
    families=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(1, 200), min_size=1, max_size=9)), min_size=1, max_size=5
    ),
    heads=st.sampled_from([(1, 1, 32), (2, 2, 64), (6, 2, 16)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.sampled_from([1.0, 1.3, 4.0, 40.0]),
    seed=st.integers(0, 1000),
)
def test_decoding_gives_the_rows_of_training_for_any_tables(
    families: list[tuple[int, list[int]]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    spread: float,
    seed: int,
) -> None:
    sequences = make_sequences(families, heads, dtype, spread, seed)
    out, group = decoded(sequences, dtype)
    assert torch.equal(out, torch.stack([one[-1] for one in sequences.trained()]))
    # Each block of each sequence is computed once, under its own keys; what else is multiplied goes nowhere.
    in_classes = range(group.num_sequences) if group.order is None else group.order.argsort().tolist()
    room = [blocks for count, blocks in group.classes for _ in range(count)]
    owners = [(b, n) for b, blocks in zip(in_classes, room, strict=True) for n in range(blocks)]
    seen: Counter[tuple[int, int]] = Counter()
    for batch in group.batches:
        start, stop = (batch.blocks.start, batch.blocks.stop) if isinstance(batch.blocks, slice) else (0, 0)
        blocks = list(range(start, stop)) if isinstance(batch.blocks, slice) else batch.blocks.tolist()
        assert len(blocks) == batch.num_blocks
        entries = range(batch.entries.start, batch.entries.stop)
        for block, i in zip(np.repeat(blocks, batch.degree), entries, strict=True):
            place = i if group.places is None else int(group.places[i])
            if place == len(owners):
                continue
            sequence, number = owners[place]
            rank = sequence if group.order is None else int(group.order[sequence])
            assert sequences.tables[sequence][number] == block and group.members[i] == rank
            visible = int((group.mask[i] == 0).sum())
            assert visible == min(KEY_BLOCK, sequences.lengths[sequence] - number * KEY_BLOCK)
            seen[sequence, number] += 1
    wanted = {(b, n) for b, length in enumerate(sequences.lengths) for n in range(num_blocks(length))}
    assert set(seen) == wanted and set(seen.values()) == {1}


@given(st.sets(st.integers(0, 2000), min_size=1, max_size=60), st.integers(1, 6))
def test_runs_hold_all_blocks_asked_for_in_order_and_not_much_else(blocks: set[int], most_runs: int) -> None:
    asked = np.array(sorted(blocks))
    runs = _runs(asked, most_runs)
    held = [range(run.start, run.stop) if isinstance(run, slice) else run.tolist() for run in runs]
    flat = [block for run in held for block in run]
    assert flat == sorted(set(flat)) and set(flat) >= blocks
    assert len(runs) <= most_runs
    assert len(flat) <= 2.5 * len(blocks)


def test_a_sequence_that_is_not_finite_reaches_no_other() -> None:
    sequences = make_sequences([(2, (3, 4, 5)), (0, (100, 30))], (4, 2, 32), torch.float32)
    clean, _ = decoded(sequences, torch.float32)
    for broken in (0, 1, 3):
        q = sequences.rows[broken][0].clone()
        sequences.rows[broken][0][-1] = float("nan")
        sequences.cache[1][sequences.tables[broken][-1]] = float("inf")
        dirty, _ = decoded(sequences, torch.float32)
        others = [i for i in range(5) if i != broken]
        assert torch.equal(dirty[others], clean[others])
        assert bool(dirty[broken].isnan().all())
        sequences.rows[broken][0][-1] = q[-1]
        sequences = make_sequences([(2, (3, 4, 5)), (0, (100, 30))], (4, 2, 32), torch.float32)


@BOTH_DTYPES
@PADDED_HEADS
def test_chunks_of_sequences_of_different_length_read_the_pool_in_one_call(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    sequences = make_sequences([(2, (70, 5)), (0, (9, 64, 65, 300)), (1, (128,))], heads, dtype, spread=2)
    counts = [70, 2, 9, 13, 40, 8, 65]
    segments = [(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]
    blocks = [num_blocks(length) for length in sequences.lengths]
    keys = [table + table[:1] * (max(blocks) - len(table)) for table in sequences.tables]
    first = torch.tensor([length - count for length, count in zip(sequences.lengths, counts, strict=True)])
    num_rows = EXACT.pad_rows(sum(counts))
    group = ChunkGroup(padded_rows(segments, 8), torch.tensor(keys), first, max(blocks) * KEY_BLOCK, in_pool=True)
    plan = AttentionPlan(num_rows, EXACT, [group], None, output_index([group], segments, num_rows))
    rows = []
    for part in range(3):
        taken = torch.cat([row[part][-count:] for row, count in zip(sequences.rows, counts, strict=True)])
        rows.append(torch.cat([taken, taken.new_zeros(num_rows - len(taken), *taken.shape[1:])]))
    expected = torch.cat([out[-count:] for out, count in zip(sequences.trained(), counts, strict=True)])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = attention(rows[0], rows[1], rows[2], plan, sequences.cache)
        assert torch.equal(out[: sum(counts)], expected)


@BOTH_DTYPES
@pytest.mark.parametrize("chunks", [(150,), (149, 1), (63, 1, 1, 64, 1), (7, 57, 20, 66), (1,) * 70])
def test_rows_written_and_read_chunk_by_chunk_are_those_of_the_whole_sequences(
    chunks: tuple[int, ...], dtype: torch.dtype
) -> None:
    heads, size = (4, 2, 16), sum(chunks)
    sequences = make_sequences([(0, (size, size))], heads, dtype, spread=3)
    expected = torch.stack(sequences.trained())
    for held in sequences.cache:
        held[torch.tensor(sequences.tables)] = 0
    outputs, done = [], 0
    for count in chunks:
        segments, first = [(0, count), (count, 2 * count)], torch.tensor([done, done])
        tables = torch.tensor(sequences.tables)[:, : num_blocks(done + count)].contiguous()
        num_rows = EXACT.pad_rows(2 * count)
        positions = torch.arange(done, done + count)
        slots = tables[:, positions // KEY_BLOCK].reshape(-1), (positions % KEY_BLOCK).repeat(2)
        if count == 1:
            decode = decode_group(tables.tolist(), [done + 1, done + 1], dtype)
            plan = AttentionPlan(num_rows, EXACT, [], decode, write_slots=slots)
        else:
            keys = tables.shape[1] * KEY_BLOCK
            group = ChunkGroup(padded_rows(segments, 8), tables, first, keys, in_pool=True)
            index = output_index([group], segments, num_rows)
            plan = AttentionPlan(num_rows, EXACT, [group], None, index, slots)
        rows = []
        for part in range(3):
            taken = torch.cat([row[part][done : done + count] for row in sequences.rows])
            rows.append(torch.cat([taken, taken.new_zeros(num_rows - len(taken), *taken.shape[1:])]))
        out = attention(rows[0], rows[1], rows[2], plan, sequences.cache)
        outputs.append(out[: 2 * count].view(2, count, -1))
        done += count
    assert torch.equal(torch.cat(outputs, dim=1), expected)
    whole = torch.stack([reference.attention(*(x.double() for x in row)) for row in sequences.rows])
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(expected.double(), whole, rtol=tolerance, atol=tolerance)


def test_a_plan_that_reads_the_pool_needs_the_pool() -> None:
    sequences = make_sequences([(0, (9,))], (4, 2, 16), torch.float32)
    q, k, v = sequences.rows[0]
    decode = AttentionPlan(1, EXACT, [], decode_group(sequences.tables, [9], torch.float32))
    group = ChunkGroup(padded_rows([(0, 8)], 8), torch.tensor(sequences.tables), torch.tensor([1]), 64, in_pool=True)
    for plan in (decode, AttentionPlan(8, EXACT, [group])):
        with pytest.raises(ValueError, match="no cache"):
            attention(q[: plan.num_rows], k[: plan.num_rows], v[: plan.num_rows], plan, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sequences_among_short_ones_are_summed_apart_and_alike(dtype: torch.dtype) -> None:
    lengths = [5, 70, 900, 3, 64, 65, 1500, 20, 260, *([7] * 60)]
    sequences = make_sequences([(0, lengths), (3, [1, 40, 700])], (4, 2, 32), dtype)
    out, group = decoded(sequences, dtype)
    assert len(group.classes) > 2 and group.order is not None
    assert sum(count * blocks for count, blocks in group.classes) < len(sequences.lengths) * 24 / 3
    assert torch.equal(out, torch.stack([one[-1] for one in sequences.trained()]))
