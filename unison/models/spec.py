"""What a dense decoder is made of, read from a Hugging Face ``config.json``.

A family reads its own keys; every key that would change the mathematics and is not known here is
refused by name, so that no model runs as something it is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unison.core.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary frequencies: theta ** (-2i / D), optionally rescaled (linear, or llama3)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Sizes and options of a dense pre-norm decoder with grouped-query attention and SwiGLU."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_epsilon: float
    rope: RopeSpec
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name}={getattr(self, name)} in config.json must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_attention_heads={self.num_heads} is no multiple of {self.num_kv_heads} kv heads")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} must be even for rotary embedding")

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    def num_parameters(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * (attention + mlp + 2 * self.hidden_size) + embeddings + self.hidden_size

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


def read_common(config: Mapping[str, Any], family: str) -> DecoderSpec:
    """The part of config.json that all dense families share; families replace their own options."""
    try:
        num_heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        spec = DecoderSpec(
            family=family,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden // num_heads),
            max_positions=int(config["max_position_embeddings"]),
            norm_epsilon=float(config["rms_norm_eps"]),
            rope=read_rope(config),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ModelError(f"config.json of family {family} lacks {error.args[0]!r}") from error
    _refuse_unsupported(config)
    return spec


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act={activation!r} is not supported; only silu is")
    layers = config.get("layer_types") or []
    foreign = sorted(set(layers) - {"full_attention"})
    if foreign or config.get("use_sliding_window"):
        raise ModelError(f"sliding-window layers ({', '.join(foreign) or 'use_sliding_window'}) are not supported")
    if config.get("quantization_config"):
        raise ModelError("quantization_config is set: quantised weights are not supported; use a bf16 or float32 folder")
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"partial_rotary_factor={config['partial_rotary_factor']} is not supported; only 1.0 is")


def read_rope(config: Mapping[str, Any]) -> RopeSpec:
    """rope_parameters (new style) or rope_theta with rope_scaling (old style)."""
    parameters = dict(config.get("rope_parameters") or {})
    scaling = parameters or dict(config.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    spec = RopeSpec(theta=theta, kind=kind)
    if not math.isfinite(theta) or theta <= 1:
        raise ModelError(f"rope_theta={theta} must be a finite number above 1")
    if kind == "default":
        return spec
    if kind == "linear":
        return replace(spec, factor=_rope_number(scaling, "factor"))
    if kind == "llama3":
        return replace(
            spec,
            factor=_rope_number(scaling, "factor"),
            low_freq_factor=_rope_number(scaling, "low_freq_factor"),
            high_freq_factor=_rope_number(scaling, "high_freq_factor"),
            original_max_positions=int(_rope_number(scaling, "original_max_position_embeddings")),
        )
    raise ModelError(f"rope type {kind!r} is not supported; only default, linear and llama3 are")


def _rope_number(scaling: Mapping[str, Any], key: str) -> float:
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelError(f"rope scaling of type {scaling.get('rope_type')!r} needs {key} > 0, not {value!r}")
    return float(value)
