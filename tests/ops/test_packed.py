"""Packed weights: the bits of the plain product, whatever the number of rows; no gradients, no surprises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unison.ops import basic
from unison.ops.packed import PackedWeight, can_pack
from unison.ops.padding import EXACT
from unison.ops.vocab import token_logprobs, vocabulary_logits

pytestmark = pytest.mark.skipif(not can_pack(torch.bfloat16), reason="no kernel for packed bfloat16 weights here")

SHAPES = [
    pytest.param(576, 960, id="SmolLM2 qkv"),
    pytest.param(1536, 576, id="SmolLM2 down"),
    pytest.param(896, 1152, id="Qwen2 qkv"),
    pytest.param(4864, 896, id="Qwen2 down"),
    pytest.param(1024, 6144, id="Qwen3 gate and up"),
    pytest.param(64, 256, id="tiny"),
    pytest.param(72, 40, id="odd"),
]


def operands(num_in: int, num_out: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weight and bias in bfloat16; half of the terms of each product are large and cancel."""
    generator = torch.Generator().manual_seed(num_in)
    x, weight, bias = (
        torch.randn(*s, generator=generator) for s in ((num_rows, num_in), (num_out, num_in), (num_out,))
    )
    quarter = num_in // 4
    order = torch.randperm(num_in, generator=generator)
    some, others = order[:quarter], order[quarter : 2 * quarter]
    weight[:, others] = weight[:, some]
    x[:, some] *= 2.0**14
    x[:, others] = -x[:, some]
    return x.bfloat16(), weight.bfloat16(), bias.bfloat16()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_the_bits_are_those_of_the_plain_product(num_in: int, num_out: int, with_bias: bool) -> None:
    x, weight, bias = operands(num_in, num_out, 512)
    given = bias if with_bias else None
    packed = PackedWeight(weight)
    assert (packed.shape, packed.dtype) == (weight.shape, weight.dtype)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in (8, 16, 24, 64, 128, 264, 512):
            expected = basic.linear(x[:count], weight, given, EXACT)
            found = basic.linear(x[:count], packed, given, EXACT)
            assert torch.equal(found, expected), f"{count} rows, {threads} threads"


def test_a_copy_keeps_what_it_was_made_from() -> None:
    x, weight, _ = operands(64, 32, 8)
    packed, before = PackedWeight(weight), basic.linear(x, weight, None, EXACT)
    weight.zero_()
    assert torch.equal(basic.linear(x, packed, None, EXACT), before)


def test_no_gradient_is_lost_in_silence() -> None:
    x, weight, _ = operands(64, 32, 8)
    with pytest.raises(ValueError, match="passes no gradient on"):
        basic.linear(x.requires_grad_(), PackedWeight(weight), None, EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_dtypes_are_not_packed(dtype: torch.dtype) -> None:
    assert not can_pack(dtype)
    with pytest.raises(ValueError, match=f"{dtype} cannot be packed"):
        PackedWeight(torch.zeros(16, 16, dtype=dtype))


def test_the_vocabulary_takes_a_packed_head() -> None:
    hidden, head, _ = operands(64, 515, 11)
    hidden = hidden / 2.0**14
    packed = PackedWeight(head)
    ids, temperature = torch.arange(11) * 40, torch.full((11,), 0.7)
    with torch.inference_mode():
        assert torch.equal(vocabulary_logits(hidden, packed, EXACT), vocabulary_logits(hidden, head, EXACT))
        for one, other in zip(
            token_logprobs(hidden, packed, ids, temperature, path=EXACT),
            token_logprobs(hidden, head, ids, temperature, path=EXACT),
            strict=True,
        ):
            assert torch.equal(one, other)
