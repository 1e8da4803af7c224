"""Llama 1 to 3, SmolLM and other models that say ``model_type: llama``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unison.models.settings import read_flag
from unison.models.spec import DecoderSpec, read_common


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    bias = read_flag(config, "attention_bias")
    spec = read_common(config, "llama")
    return replace(spec, qkv_bias=bias, output_bias=bias, mlp_bias=read_flag(config, "mlp_bias"))
