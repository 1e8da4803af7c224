"""Rows at odd widths, in many batch sizes and thread counts: the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unison.ops import basic
from unison.ops.attention import attention
from unison.ops.padding import EXACT
from unison.ops.plan import packed_plan
from unison.ops.vocab import row_stats, token_logprobs

THREADS = (1, 2, 3, 5, 7)
NUM_ROWS = 24
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def assert_rows_are_their_own(operator: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """``operator`` on each row alone, and on batches large enough to be shared out among threads."""
    torch.set_num_threads(1)
    alone = torch.cat([operator(rows[i : i + 1]) for i in range(len(rows))])
    for threads in THREADS:
        torch.set_num_threads(threads)
        for count in (8, 88, 264, 520):
            index = torch.arange(count) % len(rows)
            assert torch.equal(operator(rows[index]), alone[index]), f"{count} rows, {threads} threads"


@BOTH_DTYPES
@pytest.mark.parametrize("width", [1, 52, 100, 300, 1537, 4864])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    rows = torch.randn(NUM_ROWS, 2 * width, generator=torch.Generator().manual_seed(width)) * 3
    assert_rows_are_their_own(basic.silu_mul, rows.to(dtype))


@BOTH_DTYPES
@pytest.mark.parametrize("width", [2, 36, 100, 1153])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    rows, weight = torch.randn(NUM_ROWS, width, generator=generator), torch.randn(width, generator=generator)
    assert_rows_are_their_own(lambda x: basic.rms_norm(x, weight.to(dtype), 1e-5), rows.to(dtype))


@BOTH_DTYPES
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 20), (5, 10), (9, 64)])
def test_rope(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    rows = torch.randn(NUM_ROWS, heads, head_dim, generator=generator).to(dtype)
    angle = torch.randn(1, head_dim // 2, generator=generator)
    cos, sin = basic.rope_factors(angle.cos(), angle.sin())
    assert_rows_are_their_own(lambda x: basic.rope(x, cos.expand(len(x), -1, -1), sin.expand(len(x), -1, -1)), rows)


@pytest.mark.parametrize("vocab", [1, 7, 511, 1000, 32001, 50257])
def test_statistics_log_probs_and_entropy_of_a_row(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits, ids = torch.randn(11, vocab, generator=generator) * 4, torch.randint(vocab, (11,), generator=generator)

    def everything(rows: Tensor) -> Tensor:
        stats = row_stats(logits[rows])
        hidden, temperature = torch.nn.functional.pad(rows[:, None].float(), (0, 7)), torch.full((len(rows),), 0.7)
        logprobs, entropy = token_logprobs(hidden, logits[:8].t().contiguous(), ids[rows], temperature, path=EXACT)
        columns = [stats.block_sums.double(), stats.total[:, None], logprobs[:, None], entropy[:, None]]
        return torch.cat(columns, dim=1)

    torch.set_num_threads(1)
    alone = torch.cat([everything(torch.tensor([i])) for i in range(11)])
    for threads in THREADS:
        torch.set_num_threads(threads)
        for rows in (*([i] for i in range(11)), [3, 1, 4], [*range(10, -1, -1)]):
            assert torch.equal(everything(torch.tensor(rows)), alone[rows]), f"rows {rows}, {threads} threads"


@BOTH_DTYPES
@pytest.mark.parametrize("group_size", [1, 4])
def test_one_key_head_shared_by_all_queries(group_size: int, dtype: torch.dtype) -> None:
    """One sequence over one key head is a single piece of work, which threads must not share out."""
    generator = torch.Generator().manual_seed(group_size)
    lengths = [1, 5, 31, 32, 90, 200, 384, 390]
    shapes = [(max(lengths), heads, 32) for heads in (group_size, 1, 1)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    # Large terms that cancel: another order of addition shows in the leading digits.
    k[:, :, 1] = k[:, :, 0]
    q[:, :, 0] *= 2.0**14
    q[:, :, 1] = -q[:, :, 0]

    def whole(length: int) -> Tensor:
        plan = packed_plan([length], path=EXACT)
        padded = [torch.cat([x[:length], x.new_zeros(plan.num_rows - length, *x.shape[1:])]) for x in (q, k, v)]
        return attention(padded[0], padded[1], padded[2], plan, None)[:length]

    torch.set_num_threads(1)
    expected = whole(max(lengths))
    for threads in THREADS:
        torch.set_num_threads(threads)
        for length in lengths:
            assert torch.equal(whole(length), expected[:length]), f"{length} keys, {threads} threads"


@BOTH_DTYPES
@pytest.mark.parametrize("width", [1, 7, 100, 576, 1537, 4864])
def test_row_dots(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    rows, weight = torch.randn(NUM_ROWS, width, generator=generator), torch.randn(width, generator=generator)
    assert_rows_are_their_own(lambda x: basic.row_dots(x, weight.to(dtype)), rows.to(dtype))
