"""Qwen3 dense: RMS norm on each head of q and k, biases as configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unison.models.spec import DecoderSpec, read_common


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    # Qwen3's head size does not follow from its hidden size; its own default is 128.
    config = {"head_dim": 128, **config}
    return replace(read_common(config, "qwen3"), qkv_bias=bias, output_bias=bias, qk_norm=True)
