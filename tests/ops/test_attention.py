"""Attention over packed rows and over the KV pool against a dense float64 oracle; the plan."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unison.ops import chunk_attention, reference
from unison.ops.attention import attention
from unison.ops.padding import EXACT, FAST, NumericsPath
from unison.ops.plan import AttentionPlan, packed_plan

BOTH_PATHS = pytest.mark.parametrize("path", [EXACT, FAST], ids=["exact", "fast"])
LENGTHS = [(1,), (8,), (1, 2, 31, 33), (140, 3, 3, 129), (5, 5, 5, 5), (390, 1)]
HEADS = [(4, 2), (3, 3), (6, 1)]
HEAD_DIM = 16


def inputs(num_rows: int, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    counts = (heads[0], heads[1], heads[1])
    return [
        torch.randn(num_rows, count, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype) for count in counts
    ]


def attend(qkv: Sequence[Tensor], plan: AttentionPlan) -> Tensor:
    q, k, v = qkv
    return attention(q, k, v, plan, None)


def oracle(qkv: Sequence[Tensor], segments: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat(
        [reference.attention(qkv[0][start:end], qkv[1][start:end], qkv[2][start:end]) for start, end in segments]
    )


@BOTH_PATHS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_values_and_gradients_of_packed_sequences(
    lengths: tuple[int, ...], heads: tuple[int, int], path: NumericsPath, dtype: torch.dtype, tolerance: float
) -> None:
    plan, size = packed_plan(lengths, path=path), sum(lengths)
    own = [x.requires_grad_() for x in inputs(plan.num_rows, heads, dtype)]
    true = [x.detach().double().requires_grad_() for x in own]
    out, expected = attend(own, plan), oracle(true, plan.segments)
    assert out.shape == (plan.num_rows, heads[0] * HEAD_DIM)
    torch.testing.assert_close(out[:size].double(), expected, rtol=tolerance, atol=tolerance)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (out[:size].double() * direction).sum().backward()
    (expected * direction).sum().backward()
    for actual, wanted in zip(own, true, strict=True):
        assert actual.grad is not None and wanted.grad is not None
        torch.testing.assert_close(actual.grad.double(), wanted.grad, rtol=tolerance * 10, atol=tolerance * 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    heads, lengths = (4, 2), (1, 2, 31, 33, 97, 140, 7, 390)
    plan = packed_plan(lengths, path=EXACT)
    q, k, v = inputs(plan.num_rows, heads, dtype)
    packed = attention(q, k, v, plan, None)
    small_groups = attention(q, k, v, packed_plan(lengths, path=EXACT, max_group_rows=1), None)
    assert torch.equal(small_groups, packed)
    for start, end in plan.segments:
        alone_plan = packed_plan([end - start], path=EXACT)
        padded = [
            torch.cat([x[start:end], x.new_zeros(alone_plan.num_rows - (end - start), *x.shape[1:])]) for x in (q, k, v)
        ]
        alone = attend(padded, alone_plan)
        assert torch.equal(alone[: end - start], packed[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_row_does_not_depend_on_later_ones(dtype: torch.dtype, cut: int) -> None:
    heads = (4, 2)
    whole_plan, part_plan = packed_plan([60], path=EXACT), packed_plan([cut], path=EXACT)
    qkv = inputs(whole_plan.num_rows, heads, dtype)
    changed = [torch.cat([x[:cut], -3 * x[cut:]]) for x in qkv]
    whole = attend(qkv, whole_plan)[:cut]
    assert torch.equal(attend(changed, whole_plan)[:cut], whole)
    assert torch.equal(attend([x[: part_plan.num_rows] for x in qkv], part_plan)[:cut], whole)


@BOTH_PATHS
@pytest.mark.parametrize("broken", [0, 1, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sequence_that_is_not_finite_reaches_no_other(broken: int, value: float, path: NumericsPath) -> None:
    heads, lengths = (4, 2), (31, 7, 20, 33, 140)
    plan = packed_plan(lengths, path=path)
    qkv = inputs(plan.num_rows, heads, torch.float32)
    clean_inputs = [x.clone().requires_grad_() for x in qkv]
    clean = attend(clean_inputs, plan)
    start, end = plan.segments[broken]
    for x in qkv:
        x[start:end] = value
    dirty_inputs = [x.requires_grad_() for x in qkv]
    dirty = attend(dirty_inputs, plan)
    others = torch.ones(plan.num_rows, dtype=torch.bool)
    others[start:end] = False
    others[sum(lengths) :] = False
    assert torch.equal(dirty[others], clean[others])
    assert bool(dirty[start:end].isnan().all())
    clean[: sum(lengths)].square().sum().backward()
    dirty[: sum(lengths)].square().sum().backward()
    for with_nan, without in zip(dirty_inputs, clean_inputs, strict=True):
        assert with_nan.grad is not None and without.grad is not None
        torch.testing.assert_close(with_nan.grad[others], without.grad[others], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("heads", [(2, 1), (3, 3)])
@pytest.mark.parametrize("lengths", [(513,), (700, 30, 577)])
def test_more_keys_than_one_level_of_sums_holds(lengths: tuple[int, ...], heads: tuple[int, int]) -> None:
    test_values_and_gradients_of_packed_sequences(lengths, heads, EXACT, torch.float32, 1e-5)


def test_more_keys_than_one_product_takes() -> None:
    test_values_and_gradients_of_packed_sequences(
        (chunk_attention.KEYS_AT_ONCE + 70,), (1, 1), EXACT, torch.float32, 1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cut_of_the_work_changes_no_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    heads, lengths = (4, 2), (600, 577, 3)
    plan = packed_plan(lengths, path=EXACT)
    outputs, gradients = [], []
    for scores, keys in ((1 << 20, 4096), (1 << 16, 128), (1, 64)):
        monkeypatch.setattr(chunk_attention, "_CHUNK_SCORES", scores)
        monkeypatch.setattr(chunk_attention, "KEYS_AT_ONCE", keys)
        qkv = [x.requires_grad_() for x in inputs(plan.num_rows, heads, dtype)]
        out = attend(qkv, plan)
        out.float().square().sum().backward()
        outputs.append(out)
        gradients.append([x.grad for x in qkv])
        for group in plan.chunks:
            group.masks.clear()
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for other in gradients[1:]:
        for one, two in zip(gradients[0], other, strict=True):
            assert one is not None and two is not None
            torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", [[], [0], [3, 0], [4, -1]])
def test_a_batch_without_tokens_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"at least one token"):
        packed_plan(lengths, path=EXACT)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 96, 128, 129, 384, 385])), min_size=1, max_size=8
    ),
    st.sampled_from([EXACT, FAST]),
    st.sampled_from([1, 64, 512, 8192]),
)
def test_a_plan_returns_each_row_to_its_place(lengths: list[int], path: NumericsPath, max_group_rows: int) -> None:
    plan = packed_plan(lengths, path=path, max_group_rows=max_group_rows)
    size = sum(lengths)
    assert plan.num_rows == path.pad_rows(size)
    assert [end - start for start, end in plan.segments] == lengths
    computed = torch.cat([group.query_rows.view(-1) for group in plan.chunks])
    returned = computed if plan.output_index is None else computed[plan.output_index]
    assert len(returned) == plan.num_rows
    assert returned[:size].tolist() == list(range(size))
    assert returned[size:].tolist() == [0] * (plan.num_rows - size), "padding copies the first row"
    owner = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)])
    for group in plan.chunks:
        assert group.query_rows.shape[0] == 1 or group.query_rows.numel() <= max_group_rows
        assert not group.in_pool and plan.decode is None
        for queries, keys in zip(group.query_rows, group.keys, strict=True):
            assert len(set(owner[torch.cat([queries, keys])].tolist())) == 1, "padding stays within its sequence"
