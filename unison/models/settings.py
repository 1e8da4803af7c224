"""Single settings of a Hugging Face ``config.json``, read strictly.

Every key that would change the mathematics and is not known here is refused by name, so that no
model runs as something it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unison.core.errors import ModelError


def read_integer(config: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    """A whole number; null counts as absent. Raises ModelError where it is neither given nor has a default."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json lacks {key!r}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{key}={value!r} in config.json must be a whole number")
    return value


def read_number(config: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    """A number; null counts as absent. Raises ModelError where it is neither given nor has a default."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json lacks {key!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelError(f"{key}={value!r} in config.json must be a number")
    return float(value)


def read_flag(config: Mapping[str, Any], key: str) -> bool:
    """true or false; absent and null are false."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{key}={value!r} in config.json must be true or false")
    return bool(value)


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise ModelError naming a setting under which this decoder would not be the model that is meant."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act={activation!r} is not supported; only silu is")
    layers = config.get("layer_types") or []
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        raise ModelError(f"layer_types={layers!r} is not supported; only full_attention is")
    if config.get("use_sliding_window"):
        raise ModelError("use_sliding_window is set: sliding-window layers are not supported")
    if config.get("quantization_config"):
        raise ModelError(
            "quantization_config is set: quantised weights are not supported; use a bf16 or float32 folder"
        )
    if config.get("auto_map"):
        raise ModelError("auto_map is set: the model comes with code of its own, which is not run; use a plain folder")
    if config.get("attention_dropout"):
        raise ModelError(
            f"attention_dropout={config['attention_dropout']} is not supported: the policy that is trained must be "
            "the one that sampled; set it to 0.0"
        )
    for key, neutral in _OTHER_MATHEMATICS.items():
        value = config.get(key)
        if value is not None and value is not False and (neutral is None or value != neutral):
            only = "leave it out" if neutral is None else f"only {neutral} is"
            raise ModelError(f"{key}={value!r} in config.json is not supported; {only}")


_OTHER_MATHEMATICS: dict[str, float | None] = {
    "partial_rotary_factor": 1.0,
    "rope_interleaved": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "clip_qkv": None,
    "use_qk_norm": None,
    "qk_layernorm": None,
    "use_parallel_residual": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": None,
    "num_experts": None,
    "num_local_experts": None,
    "dual_chunk_attention_config": None,
}
"""Settings of related architectures -> the value that changes nothing; None: no value but null and false."""
