"""What a dense decoder is made of, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unison.core.errors import ModelError
from unison.models.settings import read_flag, read_integer, read_number, refuse_unsupported


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
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name}={getattr(self, name)} in config.json must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_attention_heads={self.num_heads} is no multiple of {self.num_kv_heads} kv heads")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} must be even for rotary embedding")
        if not 0 < self.norm_epsilon < math.inf:
            raise ModelError(f"rms_norm_eps={self.norm_epsilon} must be a finite number above 0")

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    def num_parameters(self) -> int:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        layer = hidden * (2 * queries + 2 * keys + 3 * inner) + 2 * hidden
        layer += (queries + 2 * keys) * self.qkv_bias + hidden * self.output_bias
        layer += (2 * inner + hidden) * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        return self.num_layers * layer + self.vocab_size * hidden * (1 if self.tied_embeddings else 2) + hidden

    @property
    def digest(self) -> str:
        """SHA-256 (hex, its beginning) of all sizes and options: two that differ compute differently."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


def read_common(config: Mapping[str, Any], family: str) -> DecoderSpec:
    """The part of config.json that all dense families share; families replace their own options."""
    refuse_unsupported(config)
    num_heads, hidden = read_integer(config, "num_attention_heads"), read_integer(config, "hidden_size")
    if num_heads < 1:
        raise ModelError(f"num_attention_heads={num_heads} in config.json must be at least 1")
    if config.get("head_dim") is None and (num_heads < 1 or hidden % num_heads):
        raise ModelError(f"hidden_size={hidden} is no multiple of num_attention_heads={num_heads}; give head_dim")
    return DecoderSpec(
        family=family,
        vocab_size=read_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=read_integer(config, "intermediate_size"),
        num_layers=read_integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=read_integer(config, "num_key_value_heads", default=num_heads),
        head_dim=read_integer(config, "head_dim", default=hidden // num_heads),
        max_positions=read_integer(config, "max_position_embeddings"),
        norm_epsilon=read_number(config, "rms_norm_eps"),
        rope=read_rope(config),
        tied_embeddings=read_flag(config, "tie_word_embeddings"),
    )


def read_rope(config: Mapping[str, Any]) -> RopeSpec:
    """rope_parameters (new style) or rope_theta with rope_scaling (old style)."""
    settings = _rope_settings(config)
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    if kind not in _ROPE_KEYS:
        raise ModelError(f"rope type {kind!r} is not supported; only {', '.join(_ROPE_KEYS)} are")
    _refuse_rope_keys(settings, kind)
    theta = read_number(settings if "rope_theta" in settings else config, "rope_theta", default=10000.0)
    if not math.isfinite(theta) or theta <= 1:
        raise ModelError(f"rope_theta={theta} must be a finite number above 1")
    spec = RopeSpec(theta=theta, kind=kind)
    if kind == "default":
        return spec
    factor = _rope_number(settings, "factor", kind)
    if kind == "linear":
        return replace(spec, factor=factor)
    low, high = (_rope_number(settings, key, kind) for key in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise ModelError(f"rope type llama3 needs high_freq_factor={high} above low_freq_factor={low}")
    original = int(_rope_number(settings, "original_max_position_embeddings", kind))
    return replace(spec, factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_positions=original)


_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_COMMON_KEYS = ("rope_type", "type", "rope_theta", "original_max_position_embeddings")


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The one dict of rope settings, completed by original_max_position_embeddings where it stands outside."""
    styles: dict[str, dict[str, Any]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key) or {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{key}={value!r} in config.json must be an object")
        if value:
            styles[key] = {name: setting for name, setting in value.items() if setting is not None}
    if len(styles) == 2 and styles["rope_parameters"] != styles["rope_scaling"]:
        raise ModelError("rope_parameters and rope_scaling in config.json differ; keep the one that is meant")
    settings = next(iter(styles.values()), {})
    original, inside = config.get("original_max_position_embeddings"), settings.get("original_max_position_embeddings")
    if original is not None and inside is not None and original != inside:
        raise ModelError(
            f"original_max_position_embeddings is {original} outside and {inside} inside the rope settings"
        )
    return settings if original is None else {**settings, "original_max_position_embeddings": original}


def _refuse_rope_keys(settings: Mapping[str, Any], kind: str) -> None:
    """Settings by layer type, partial or sectioned rotation: all of them would pass for the default otherwise."""
    known = (*_ROPE_COMMON_KEYS, *_ROPE_KEYS[kind])
    for key, value in settings.items():
        if key not in known and not (key == "partial_rotary_factor" and value == 1.0):
            raise ModelError(f"{key}={value!r} is not supported with rope type {kind}; known are {', '.join(known)}")


def _rope_number(settings: Mapping[str, Any], key: str, kind: str) -> float:
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"rope type {kind} needs {key} > 0, not {value!r}")
    return float(value)
