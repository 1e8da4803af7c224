"""Llama 1 to 3, SmolLM and other models that say ``model_type: llama``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unison.models.spec import DecoderSpec, read_common


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    spec = read_common(config, "llama")
    return replace(spec, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))
