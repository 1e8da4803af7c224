"""The dense decoder: Llama, Qwen2 and Qwen3 are options of this one definition.

Dims: T packed tokens, E hidden, H heads, K kv heads, D head dim, F intermediate.
Projections that share an input are stored fused (q, k, v and gate, up); their rows are those of
the separate matrices, so ``unison.models.names`` maps them to Hugging Face names by row ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from unison.models.rope import RopeTable
from unison.models.spec import DecoderSpec
from unison.ops import attention as attention_ops
from unison.ops import basic as ops
from unison.ops.attention import LayerCache
from unison.ops.plan import AttentionPlan


@dataclass(slots=True)
class Taps:
    """What a caller wants to see: names of activations, filled during the call.

    Known names: ``layer.N`` (residual stream after layer N) and ``final`` (after the last norm), [T, E].
    """

    wanted: frozenset[str]
    values: dict[str, Tensor] = field(default_factory=dict)

    def offer(self, name: str, value: Tensor) -> None:
        if name in self.wanted:
            self.values[name] = value


class Linear(nn.Module):
    def __init__(self, num_in: int, num_out: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_out, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class RmsNorm(nn.Module):
    def __init__(self, size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.epsilon)


class Attention(nn.Module):
    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = Linear(spec.hidden_size, width, spec.qkv_bias, dtype)
        self.out = Linear(spec.num_heads * spec.head_dim, spec.hidden_size, spec.output_bias, dtype)
        self.q_norm = RmsNorm(spec.head_dim, spec.norm_epsilon, dtype) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_dim, spec.norm_epsilon, dtype) if spec.qk_norm else None

    def forward(self, x_TE: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, cache: LayerCache | None) -> Tensor:
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qkv = self.qkv(x_TE).view(-1, heads + 2 * kv_heads, self.spec.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat([self.q_norm(qk[:, :heads]), self.k_norm(qk[:, heads:])], dim=1)
        qk = ops.rope(qk, cos, sin)
        return self.out(attention_ops.attention(qk[:, :heads], qk[:, heads:], v, plan, cache))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = Linear(spec.hidden_size, 2 * spec.intermediate_size, spec.mlp_bias, dtype)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, spec.mlp_bias, dtype)

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.down(ops.silu_mul(self.gate_up(x_TE)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(spec.hidden_size, spec.norm_epsilon, dtype)
        self.attention = Attention(spec, dtype)
        self.mlp_norm = RmsNorm(spec.hidden_size, spec.norm_epsilon, dtype)
        self.mlp = Mlp(spec, dtype)

    def forward(self, x_TE: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, cache: LayerCache | None) -> Tensor:
        x_TE = x_TE + self.attention(self.attention_norm(x_TE), cos, sin, plan, cache)
        return x_TE + self.mlp(self.mlp_norm(x_TE))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A causal language model up to its last norm; the vocabulary projection is applied to chosen rows."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        self.embed = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype))
        self.layers = nn.ModuleList(Layer(spec, dtype) for _ in range(spec.num_layers))
        self.norm = RmsNorm(spec.hidden_size, spec.norm_epsilon, dtype)
        self.head = (
            None if spec.tied_embeddings else nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype))
        )
        self._rope = RopeTable(spec.rope, spec.head_dim)

    def forward(
        self,
        tokens_T: Tensor | None,
        positions_AT: Tensor,
        plan: AttentionPlan,
        state: Sequence[LayerCache] | None = None,
        taps: Taps | None = None,
        embeddings_TE: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, E] after the last norm.

        Give tokens or their embeddings. positions has one axis per position dimension (A = 1 for
        text). plan says which keys each row sees; state is the KV cache of each layer, or None.
        """
        if (tokens_T is None) == (embeddings_TE is None):
            raise ValueError("give either tokens or embeddings")
        if len(positions_AT) != 1:
            raise ValueError(f"positions have {len(positions_AT)} axes; this model has one")
        if taps is not None:
            self._check_taps(taps)
        x = ops.embedding(tokens_T, self.embed) if tokens_T is not None else embeddings_TE
        cos, sin = self._rope.rows(positions_AT[0])
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, plan, None if state is None else state[i])
            if taps is not None:
                taps.offer(f"layer.{i}", x)
        x = self.norm(x)
        if taps is not None:
            taps.offer("final", x)
        return x  # type: ignore[no-any-return]

    def _check_taps(self, taps: Taps) -> None:
        unknown = taps.wanted.difference(self.tap_names)
        if unknown:
            raise ValueError(f"no activation is called {', '.join(sorted(unknown))}")

    @property
    def tap_names(self) -> tuple[str, ...]:
        """The activations that ``Taps`` can name, in the order in which they are computed."""
        return (*(f"layer.{i}" for i in range(len(self.layers))), "final")

    def head_weight(self) -> Tensor:
        """[V, E] matrix of the vocabulary projection; the embedding itself where they are tied."""
        return self.embed if self.head is None else self.head
