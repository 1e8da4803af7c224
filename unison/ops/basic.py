"""Row-wise operators: linear, RMS norm, SwiGLU product, rotary embedding.

Dims: T packed tokens, E hidden, F intermediate, N heads, D head dimension.
Cast points are part of the definition and stand here only. What is said to happen in float32
happens in float64 where the input is float64.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.ops.packed import PackedWeight, Weight, can_pack
from unison.ops.padding import NumericsPath

_WIDE = (torch.float32, torch.float64)


_PACKED_BLOCKS = 4
"""From so many blocks of rows on, laying a weight out once costs less than the kernel's doing it for each."""


def linear(x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None, path: NumericsPath) -> Tensor:
    """x @ weight.T + bias in the dtype of x. Exact when T is padded by ``path``."""
    rows = path.rows_at_once(x_TK.dtype) if x_TK.is_cpu else None
    if rows is None or len(x_TK) <= rows:
        return _product(x_TK, weight_NK, bias_N)
    if isinstance(weight_NK, PackedWeight):
        return _by_blocks(x_TK, weight_NK, bias_N, rows)
    return _LinearByBlocks.apply(x_TK, weight_NK, bias_N, rows)  # type: ignore[no-any-return, no-untyped-call]


def _product(x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None) -> Tensor:
    if isinstance(weight_NK, PackedWeight):
        return weight_NK.linear(x_TK, bias_N)
    return F.linear(x_TK, weight_NK, bias_N)


def _by_blocks(x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None, rows: int) -> Tensor:
    if isinstance(weight_NK, Tensor) and len(x_TK) >= _PACKED_BLOCKS * rows and can_pack(weight_NK.dtype):
        weight_NK = PackedWeight(weight_NK)
    return torch.cat([_product(block, weight_NK, bias_N) for block in torch.split(x_TK, rows)])


class _LinearByBlocks(torch.autograd.Function):
    """Its gradients are those of one product: nothing depends on their order, and in blocks they would be rounded."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, rows: int) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return _by_blocks(x_TK.detach(), weight_NK, bias_N, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, weight_NK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        (grad,) = grads
        return (
            grad @ weight_NK if needs_x else None,
            grad.t() @ x_TK if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            None,
        )


def row_dots(x_TE: Tensor, weight_E: Tensor) -> Tensor:
    """Product of each row with one vector -> [T]; products and their sum in float32, which is returned.

    Not a matrix product with a single column: that one sums in another order for some numbers of rows, and rounds its
    result to the dtype of x. Here no number of rows needs padding.
    """
    return (_wide(x_TE) * _wide(weight_E)).sum(-1)


def embedding(tokens_T: Tensor, weight_VE: Tensor) -> Tensor:
    return F.embedding(tokens_T, weight_VE)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms and rotations of ``dtype`` are computed."""
    return dtype if dtype in _WIDE else torch.float32


def _wide(x: Tensor) -> Tensor:
    """x in float32 at least; x itself where it already is."""
    return x if x.dtype in _WIDE else x.float()


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The normed rows, and 1 / rms of each in float32."""
    wide = _wide(x)
    scale = wide.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    normed = wide.mul_(scale) if wide is not x else wide * scale
    return normed.mul_(weight).to(x.dtype), scale


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out, scale = _normed(x, weight, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad = _wide(grads[0])
        normed = _wide(x) * scale
        product = grad * normed
        grad_weight = product.flatten(0, -1 - weight.ndim).sum(0)
        grad_normed = grad * weight
        correction = torch.mul(grad_normed, normed, out=product).mean(-1, keepdim=True)
        grad_x = grad_normed.sub_(normed.mul_(correction)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dim; in float32, cast once at the end (Zhang & Sennrich 2019).

    weight covers the last dim of x, or its last two: then each head has its own.
    """
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-any-return, no-untyped-call]
    return _normed(x, weight, epsilon)[0]


def _silu(gate: Tensor) -> Tensor:
    """silu as a new tensor, the same bits wherever an element lies."""
    if gate.dtype == torch.bfloat16:
        return F.silu(gate)
    # The stock kernel takes another exp for the elements left over where threads share the work. In
    # bfloat16 the two round alike; here torch.exp stands in, which has one form only.
    divisor = gate.neg().exp_().add_(1)
    return torch.div(gate, divisor, out=divisor)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _silu(gate).mul_(up)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _gated(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grads[0], _silu(gate), out=grad_up)
        torch.mul(grads[0], up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate_up


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up -> [T, F], each of the two steps rounded to the input's dtype (Shazeer 2020)."""
    if torch.is_grad_enabled():
        return _SiluMul.apply(gate_up_T2F)  # type: ignore[no-any-return, no-untyped-call]
    return _gated(gate_up_T2F)


def _rotated(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, *, back: bool = False) -> Tensor:
    """x turned by the angles, or back by them; each product and the sum are rounded to float32."""
    wide = _wide(x_TND)
    swapped = wide.roll(x_TND.shape[-1] // 2, -1).mul_(sin_T1D)
    turned = wide.mul_(cos_T1D) if wide is not x_TND else wide * cos_T1D
    return (turned.sub_(swapped) if back else turned.add_(swapped)).to(x_TND.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, back=True), None, None


def rope_factors(cos_TD2: Tensor, sin_TD2: Tensor) -> tuple[Tensor, Tensor]:
    """What ``rope`` multiplies a head and its swapped halves by: [T, 1, D] each, -sin over the first half."""
    return torch.cat([cos_TD2, cos_TD2], -1).unsqueeze(1), torch.cat([-sin_TD2, sin_TD2], -1).unsqueeze(1)


def rope(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of each head in float32, cast once at the end (Su et al. 2021).

    cos and sin as ``rope_factors`` lays them out.
    """
    if torch.is_grad_enabled():
        return _Rope.apply(x_TND, cos_T1D, sin_T1D)  # type: ignore[no-any-return, no-untyped-call]
    return _rotated(x_TND, cos_T1D, sin_T1D)
