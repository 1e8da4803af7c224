"""The dense decoder: Llama, Qwen2 and Qwen3 are options of this one definition.

Dims: T packed tokens, E hidden, H heads, K kv heads, D head dim, F intermediate.
Projections that share an input are stored fused (q, k, v and gate, up); their rows are those of
the separate matrices, so ``unison.models.names`` maps them to Hugging Face names by row ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unison.models.rope import RopeTable
from unison.models.spec import DecoderSpec
from unison.ops import attention as attention_ops
from unison.ops import basic as ops
from unison.ops.attention import LayerCache
from unison.ops.packed import PackedWeight, Weight
from unison.ops.padding import NumericsPath
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

    def bound(self, pack: bool) -> BoundLinear:
        return BoundLinear(PackedWeight(self.weight) if pack else self.weight, self.bias)


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
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = Linear(spec.hidden_size, width, spec.qkv_bias, dtype)
        self.out = Linear(spec.num_heads * spec.head_dim, spec.hidden_size, spec.output_bias, dtype)
        self.q_norm = RmsNorm(spec.head_dim, spec.norm_epsilon, dtype) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_dim, spec.norm_epsilon, dtype) if spec.qk_norm else None


class Mlp(nn.Module):
    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = Linear(spec.hidden_size, 2 * spec.intermediate_size, spec.mlp_bias, dtype)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, spec.mlp_bias, dtype)


@dataclass(frozen=True, slots=True)
class BoundLinear:
    weight: Weight
    bias: Tensor | None

    def __call__(self, x: Tensor, path: NumericsPath) -> Tensor:
        return ops.linear(x, self.weight, self.bias, path)


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """What one layer computes, over the tensors it computes with: the same for training and rollout.

    head_norm [H + K, D]: the weights of the query and key norms, one row per head.
    """

    spec: DecoderSpec
    attention_norm: Tensor
    qkv: BoundLinear
    head_norm: Tensor | None
    out: BoundLinear
    mlp_norm: Tensor
    gate_up: BoundLinear
    down: BoundLinear

    def __call__(
        self, x_TE: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, plan: AttentionPlan, cache: LayerCache | None
    ) -> Tensor:
        spec, path = self.spec, plan.path
        heads, kv_heads, epsilon = spec.num_heads, spec.num_kv_heads, spec.norm_epsilon
        qkv = self.qkv(ops.rms_norm(x_TE, self.attention_norm, epsilon), path)
        qk, v = qkv.view(-1, heads + 2 * kv_heads, spec.head_dim).split_with_sizes((heads + kv_heads, kv_heads), 1)
        if self.head_norm is not None:
            qk = ops.rms_norm(qk, self.head_norm, epsilon)
        q, k = ops.rope(qk, cos_T1D, sin_T1D).split_with_sizes((heads, kv_heads), 1)
        x_TE = x_TE + self.out(attention_ops.attention(q, k, v, plan, cache), path)
        inner = self.gate_up(ops.rms_norm(x_TE, self.mlp_norm, epsilon), path)
        return x_TE + self.down(ops.silu_mul(inner), path)


class Layer(nn.Module):
    """Holds the weights of a layer under their names; ``bound`` is what computes."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.attention_norm = RmsNorm(spec.hidden_size, spec.norm_epsilon, dtype)
        self.attention = Attention(spec, dtype)
        self.mlp_norm = RmsNorm(spec.hidden_size, spec.norm_epsilon, dtype)
        self.mlp = Mlp(spec, dtype)

    def forward(
        self, x_TE: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, plan: AttentionPlan, cache: LayerCache | None
    ) -> Tensor:
        return self.bound()(x_TE, cos_T1D, sin_T1D, plan, cache)

    def bound(self, pack: bool = False) -> BoundLayer:
        """The layer over its present weights; with ``pack``, over packed copies of its matrices."""
        attention, mlp = self.attention, self.mlp
        return BoundLayer(
            self.spec,
            self.attention_norm.weight,
            attention.qkv.bound(pack),
            self._head_norm(),
            attention.out.bound(pack),
            self.mlp_norm.weight,
            mlp.gate_up.bound(pack),
            mlp.down.bound(pack),
        )

    def _head_norm(self) -> Tensor | None:
        q_norm, k_norm = self.attention.q_norm, self.attention.k_norm
        if q_norm is None or k_norm is None:
            return None
        # Wide, so that the gradients of the heads are added before they are rounded.
        q_weight, k_weight = (norm.weight.to(ops.wide_dtype(norm.weight.dtype)) for norm in (q_norm, k_norm))
        counts = (self.spec.num_heads, self.spec.num_kv_heads)
        return torch.cat([w.expand(n, -1) for w, n in zip((q_weight, k_weight), counts, strict=True)])


class Decoder(nn.Module):
    """A causal language model up to its last norm; the vocabulary projection is applied to chosen rows."""

    checkpoint_layers: bool = False
    """In training, keep of each layer its input alone and compute it again in the backward pass: the same bits in
    outputs and gradients, less memory, about a fifth more time. Calls with a state or taps are not touched by it."""

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
        recompute = self.checkpoint_layers and torch.is_grad_enabled() and state is None and taps is None
        for i, layer in enumerate(self._bound_layers()):
            if recompute:
                # Nothing in a layer is random, so there is no state of a generator to bring back.
                x = checkpoint(layer, x, cos, sin, plan, None, use_reentrant=False, preserve_rng_state=False)
                continue
            x = layer(x, cos, sin, plan, None if state is None else state[i])
            if taps is not None:
                taps.offer(f"layer.{i}", x)
        x = self.norm(x)
        if taps is not None:
            taps.offer("final", x)
        return x  # type: ignore[no-any-return]

    def _bound_layers(self) -> Iterable[Callable[..., Tensor]]:
        """The layers in order; each maps (x, cos, sin, plan, cache) to x."""
        return self.layers

    def _check_taps(self, taps: Taps) -> None:
        unknown = taps.wanted.difference(self.tap_names)
        if unknown:
            raise ValueError(f"no activation is called {', '.join(sorted(unknown))}")

    @property
    def tap_names(self) -> tuple[str, ...]:
        """The activations that ``Taps`` can name, in the order in which they are computed."""
        return (*(f"layer.{i}" for i in range(len(self.layers))), "final")

    def head_weight(self) -> Weight:
        """[V, E] matrix of the vocabulary projection; the embedding itself where they are tied."""
        return self.embed if self.head is None else self.head
