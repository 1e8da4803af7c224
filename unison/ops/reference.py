"""The operators' formulas in plain torch, as a textbook has them: what the others are held against.

In float32 or float64, differentiable by autograd, one sequence at a time, no padding, nothing fused.
Dims: T tokens, E hidden, F intermediate, H heads, K kv heads, D head dim, N rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dim."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up -> [T, F]."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def rope(x_THD: Tensor, cos_TD2: Tensor, sin_TD2: Tensor) -> Tensor:
    """Each pair (i, i + D/2) as a complex number, turned by its angle."""
    first, second = x_THD.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos_TD2, sin_TD2).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


def attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(D)) v of one sequence; query head h reads kv head h // (H/K) -> [T, H*D]."""
    num_tokens, num_heads, head_dim = q_THD.shape
    repeats = num_heads // k_TKD.shape[1]
    keys, values = (x.repeat_interleave(repeats, dim=1) for x in (k_TKD, v_TKD))
    scores = torch.einsum("qhd,khd->hqk", q_THD, keys) / math.sqrt(head_dim)
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).reshape(num_tokens, -1)


def token_logprobs(logits_NV: Tensor, ids_N: Tensor, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
    """log-softmax(logits / T) at ids, and the entropy of each row in nats, [N] each; T = 0 counts as 1."""
    divisor = torch.where(temperature_N > 0, temperature_N, 1).to(logits_NV.dtype)
    logprobs = (logits_NV / divisor[:, None]).log_softmax(-1)
    return logprobs.gather(1, ids_N[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
