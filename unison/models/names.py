"""Hugging Face tensor names against our parameters: one table, read by loading, saving and updates.

A fused parameter holds several published tensors, one after the other along its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unison.models.decoder import Decoder
from unison.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Published tensor ``name`` is rows [start, end) of ``parameter``."""

    name: str
    parameter: str
    start: int
    end: int
    shape: tuple[int, ...]


def tensor_slots(spec: DecoderSpec) -> list[TensorSlot]:
    """Every tensor of a checkpoint of this model, in the published order."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    slots = [TensorSlot("model.embed_tokens.weight", "embed", 0, vocab, (vocab, hidden))]
    for i in range(spec.num_layers):
        slots += _layer_slots(spec, f"model.layers.{i}.", f"layers.{i}.")
    slots.append(TensorSlot("model.norm.weight", "norm.weight", 0, hidden, (hidden,)))
    if not spec.tied_embeddings:
        slots.append(TensorSlot("lm_head.weight", "head", 0, vocab, (vocab, hidden)))
    return slots


def canonical_name(spec: DecoderSpec, name: str) -> str:
    """The name ``name`` is kept under: with tied embeddings the output layer is the embedding."""
    return "model.embed_tokens.weight" if spec.tied_embeddings and name == "lm_head.weight" else name


def _layer_slots(spec: DecoderSpec, theirs: str, ours: str) -> list[TensorSlot]:
    hidden, dim = spec.hidden_size, spec.head_dim
    q, kv, inner = spec.num_heads * dim, spec.num_kv_heads * dim, spec.intermediate_size
    slots: list[TensorSlot] = []

    def fused(parameter: str, parts: list[tuple[str, int]], width: int, bias: bool) -> None:
        for suffix in ("weight", "bias") if bias else ("weight",):
            start = 0
            for name, rows in parts:
                shape = (rows, width) if suffix == "weight" else (rows,)
                slots.append(
                    TensorSlot(f"{theirs}{name}.{suffix}", f"{ours}{parameter}.{suffix}", start, start + rows, shape)
                )
                start += rows

    def norm(name: str, parameter: str, size: int) -> None:
        slots.append(TensorSlot(f"{theirs}{name}.weight", f"{ours}{parameter}.weight", 0, size, (size,)))

    norm("input_layernorm", "attention_norm", hidden)
    parts = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
    fused("attention.qkv", parts, hidden, spec.qkv_bias)
    fused("attention.out", [("self_attn.o_proj", hidden)], q, spec.output_bias)
    if spec.qk_norm:
        norm("self_attn.q_norm", "attention.q_norm", dim)
        norm("self_attn.k_norm", "attention.k_norm", dim)
    norm("post_attention_layernorm", "mlp_norm", hidden)
    fused("mlp.gate_up", [("mlp.gate_proj", inner), ("mlp.up_proj", inner)], hidden, spec.mlp_bias)
    fused("mlp.down", [("mlp.down_proj", hidden)], inner, spec.mlp_bias)
    return slots


def published_tensors(model: Decoder, parameters: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Published name -> view into the model's parameters (or into ``parameters``, e.g. masters)."""
    own = dict(model.named_parameters()) if parameters is None else parameters
    return {slot.name: own[slot.parameter].detach()[slot.start : slot.end] for slot in tensor_slots(model.spec)}
