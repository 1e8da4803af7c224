"""Row-wise operators against float64 autograd of their textbook formulas; the padding rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unison.core.errors import NumericsError
from unison.ops import basic, reference
from unison.ops.packed import PackedWeight, can_pack
from unison.ops.padding import EXACT, FAST, NumericsPath, numerics_path

EPSILON = 1e-5
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
ALL_DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=["float64", "float32", "bfloat16"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def angles(num_tokens: int, half: int) -> tuple[Tensor, Tensor]:
    turn = torch.arange(num_tokens, dtype=torch.float64)[:, None] * torch.linspace(1.0, 0.01, half).double()
    return turn.cos(), turn.sin()


def assert_agrees(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Values and gradients of ``ours`` in ``dtype`` against ``theirs`` in float64, from the same rounded inputs."""
    rounded = [x.to(dtype) for x in inputs]
    own = [x.clone().requires_grad_() for x in rounded]
    true = [x.double().requires_grad_() for x in rounded]
    value, expected = ours(*own), theirs(*true)
    assert value.dtype == dtype
    direction = normal(*expected.shape, seed=9).to(dtype)
    value.backward(direction)
    expected.backward(direction.double())
    pairs = [(value, expected), *((x.grad, y.grad) for x, y in zip(own, true, strict=True))]
    for actual, wanted in pairs:
        assert actual is not None and wanted is not None
        assert actual.dtype == dtype
        error = (actual.double() - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCES[dtype]


@ALL_DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (3, 4, 32), (300, 576)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_agrees(
        lambda x, w: basic.rms_norm(x, w, EPSILON),
        lambda x, w: reference.rms_norm(x, w, EPSILON),
        [normal(*shape) * 3, normal(shape[-1], seed=1)],
        dtype,
    )


@ALL_DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (5, 128), (37, 3072)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_agrees(basic.silu_mul, reference.silu_mul, [normal(*shape) * 3], dtype)


@ALL_DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 2), (9, 3, 8), (130, 4, 64)])
def test_rope(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    cos, sin = angles(shape[0], shape[2] // 2)
    kept = torch.promote_types(dtype, torch.float32)
    factors = basic.rope_factors(cos.to(kept), sin.to(kept))
    assert_agrees(lambda x: basic.rope(x, *factors), lambda x: reference.rope(x, cos, sin), [normal(*shape)], dtype)


@ALL_DTYPES
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(with_bias: bool, dtype: torch.dtype) -> None:
    inputs = [normal(9, 16), normal(5, 16, seed=1), normal(5, seed=2)][: 3 if with_bias else 2]

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = torch.einsum("tk,nk->tn", x, weight)
        return product if bias is None else product + bias

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return basic.linear(x, weight, bias, EXACT)

    assert_agrees(product, plain, inputs, dtype)


class Blocks(NumericsPath):
    """As on a machine whose kernels take a few rows at once."""

    def rows_at_once(self, dtype: torch.dtype) -> int | None:
        return 8


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [7, 8, 9, 24, 70])
def test_rows_in_blocks_give_the_product_and_its_gradients(num_rows: int, with_bias: bool) -> None:
    inputs = [normal(num_rows, 16).double(), normal(5, 16, seed=1).double(), normal(5, seed=2).double()]
    inputs = [x.requires_grad_() for x in inputs[: 3 if with_bias else 2]]

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return basic.linear(x, weight, bias, Blocks("exact", row_multiple=8))

    torch.testing.assert_close(product(*inputs), torch.nn.functional.linear(*inputs))
    assert torch.autograd.gradcheck(product, inputs)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this build packs nothing")
def test_many_blocks_over_a_packed_weight_or_a_plain_one_have_the_same_bits() -> None:
    x, weight = normal(70, 64).bfloat16(), normal(96, 64, seed=1).bfloat16()
    path = Blocks("exact", row_multiple=8)
    expected = torch.cat([torch.nn.functional.linear(x[i : i + 8], weight) for i in range(0, 70, 8)])
    assert torch.equal(basic.linear(x, weight, None, path), expected)
    assert torch.equal(basic.linear(x, PackedWeight(weight), None, path), expected)


def test_embedding() -> None:
    weight = normal(7, 3).requires_grad_()
    out = basic.embedding(torch.tensor([2, 2, 6]), weight)
    assert torch.equal(out, weight[[2, 2, 6]])
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [0, 0, 2, 0, 0, 0, 1]


def test_gradients_pass_a_finite_difference_check() -> None:
    factors = basic.rope_factors(*angles(3, 2))
    x = normal(3, 2, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: basic.rope(x, *factors), x)
    assert torch.autograd.gradcheck(basic.silu_mul, normal(3, 8).requires_grad_())
    weight = normal(4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: basic.rms_norm(x, w, EPSILON), (x, weight))
    assert torch.autograd.gradcheck(
        lambda x, w: basic.rms_norm(x, w, EPSILON), (x, normal(2, 4, seed=2).requires_grad_())
    )


@ALL_DTYPES
def test_a_norm_with_weights_for_each_head_is_that_of_the_heads_one_by_one(dtype: torch.dtype) -> None:
    x, weights = normal(7, 3, 8), normal(3, 8, seed=1)
    assert_agrees(
        lambda x, w: basic.rms_norm(x, w, EPSILON),
        lambda x, w: torch.stack([reference.rms_norm(x[:, i], w[i], EPSILON) for i in range(3)], dim=1),
        [x, weights],
        dtype,
    )
    x, weights = x.to(dtype), weights.to(dtype)
    apart = torch.stack([basic.rms_norm(x[:, i], weights[i], EPSILON) for i in range(3)], dim=1)
    assert torch.equal(basic.rms_norm(x, weights, EPSILON), apart)


@ALL_DTYPES
def test_values_are_the_same_with_and_without_gradients(dtype: torch.dtype) -> None:
    x, weight = normal(40, 4, 16).to(dtype), normal(16).to(dtype)
    factors = basic.rope_factors(*(part.to(basic.wide_dtype(dtype)) for part in angles(40, 8)))
    operators: list[Callable[[Tensor], Tensor]] = [
        lambda x: basic.rms_norm(x, weight, EPSILON),
        lambda x: basic.rope(x, *factors),
        lambda x: basic.silu_mul(x.flatten(1)),
    ]
    for operator in operators:
        taped = operator(x.clone().requires_grad_())
        assert taped.grad_fn is not None
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(operator(x), taped)


def test_operators_leave_their_inputs_alone() -> None:
    factors = basic.rope_factors(*(part.float() for part in angles(4, 4)))
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = normal(4, 2, 8).to(dtype), normal(8).to(dtype)
        before = x.clone()
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                basic.rms_norm(x, weight, EPSILON)
                basic.silu_mul(x)
                basic.rope(x, *factors)
            assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_of_extreme_gates_is_finite(dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 1e30, 1, 1, 1, 1, 1, 1]], dtype=dtype).requires_grad_()
    out = basic.silu_mul(gate_up)
    out.sum().backward()
    assert out[0, :4].tolist() == [0, 0, 0, 0]
    assert torch.equal(out[0, 4:], gate_up[0, 4:6])
    assert gate_up.grad is not None and bool(gate_up.grad.isfinite().all())


def test_a_row_of_zeros_has_a_norm() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    out = basic.rms_norm(x, torch.ones(8), EPSILON)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(2, 8))
    assert x.grad is not None and bool(x.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    x, weight = normal(40, 64).to(dtype), normal(64).to(dtype)
    cos, sin = basic.rope_factors(*(part.float() for part in angles(40, 8)))
    whole = (
        basic.rms_norm(x, weight, EPSILON),
        basic.silu_mul(x),
        basic.rope(x.view(40, 4, 16), cos, sin),
    )
    for rows in (slice(0, 1), slice(3, 8), slice(39, 40)):
        part = (
            basic.rms_norm(x[rows], weight, EPSILON),
            basic.silu_mul(x[rows]),
            basic.rope(x[rows].view(-1, 4, 16), cos[rows], sin[rows]),
        )
        for alone, among in zip(part, whole, strict=True):
            assert torch.equal(alone, among[rows])


def test_rope_turns_and_never_stretches() -> None:
    x = normal(50, 2, 16)
    cos, sin = basic.rope_factors(*angles(50, 8))
    out = basic.rope(x, cos, sin)
    assert torch.equal(out[0], x[0]), "position 0 is not turned"
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    # The product of two turned vectors depends on the distance of their positions alone.
    same = x[:1].expand(50, -1, -1)
    turned = basic.rope(same.contiguous(), cos, sin)
    products = (turned[3:] * turned[:-3]).sum(-1)
    torch.testing.assert_close(products, products[:1].expand_as(products))


@given(st.integers(1, 100_000))
def test_padding_rules(count: int) -> None:
    rows, keys = EXACT.pad_rows(count), EXACT.pad_keys(count)
    assert rows % 8 == 0 and count <= rows < count + 8
    assert keys % 64 == 0 and count <= keys < count + 64
    assert FAST.pad_rows(count) == count
    assert EXACT.pad_rows(0) == FAST.pad_rows(0) == 0


@given(st.integers(1, 1000), st.integers(1, 256))
def test_padding_of_products_with_a_block(count: int, head_dim: int) -> None:
    single = EXACT.pad_product_rows(count, torch.float32, head_dim)
    assert single % 8 == 0 and count <= single < count + 8
    half = EXACT.pad_product_rows(count, torch.bfloat16, head_dim)
    assert half >= max(2, count) and half * head_dim * 64 > 16**3
    assert half in (2, count) or (half - 1) * head_dim * 64 <= 16**3, "no more rows than it takes"
    for dtype in (torch.float32, torch.bfloat16):
        assert FAST.pad_product_rows(count, dtype, head_dim) == count


def test_paths_have_names() -> None:
    assert (numerics_path("exact"), numerics_path("fast")) == (EXACT, FAST)
    with pytest.raises(NumericsError, match="numerics='exakt' is unknown; use one of exact, fast"):
        numerics_path("exakt")
