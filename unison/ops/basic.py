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


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in the dtype of x. Exact when T is padded by the numerics path."""
    return F.linear(x_TK, weight_NK, bias_N)


def embedding(tokens_T: Tensor, weight_VE: Tensor) -> Tensor:
    return F.embedding(tokens_T, weight_VE)


def _wide(x: Tensor) -> Tensor:
    """x in float32 at least; x itself where it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return (wide.mul_(scale) if wide is not x else wide * scale).mul_(_wide(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad = _wide(grads[0])
        normed = _wide(x) * scale
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad_normed = grad * _wide(weight)
        correction = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = (grad_normed - normed * correction) * scale
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dim; in float32, cast once at the end (Zhang & Sennrich 2019)."""
    return _RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-any-return, no-untyped-call]


def _silu(gate: Tensor) -> Tensor:
    """silu as a new tensor, the same bits wherever an element lies."""
    if gate.dtype == torch.bfloat16:
        return F.silu(gate)
    # The stock kernel takes another exp for the elements left over where threads share the work. In
    # bfloat16 the two round alike; here torch.exp stands in, which has one form only.
    divisor = gate.neg().exp_().add_(1)
    return torch.div(gate, divisor, out=divisor)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return _silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grads[0], _silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grads[0] * up, gate))
        return grad_gate_up


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up -> [T, F], each of the two steps rounded to the input's dtype (Shazeer 2020)."""
    return _SiluMul.apply(gate_up_T2F)  # type: ignore[no-any-return, no-untyped-call]


def _rotate(x_TND: Tensor, cos_TD2: Tensor, sin_TD2: Tensor) -> Tensor:
    first, second = _wide(x_TND).chunk(2, dim=-1)
    cos, sin = cos_TD2.unsqueeze(1), sin_TD2.unsqueeze(1)
    out = torch.empty_like(x_TND)
    half = first.shape[-1]
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin), None, None


def rope(x_TND: Tensor, cos_TD2: Tensor, sin_TD2: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of each head in float32, cast once at the end (Su et al. 2021)."""
    return _Rope.apply(x_TND, cos_TD2, sin_TD2)  # type: ignore[no-any-return, no-untyped-call]
