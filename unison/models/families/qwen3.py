"""Qwen3 dense: RMS norm on each head of q and k, biases as configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unison.models.settings import read_flag, read_integer
from unison.models.spec import DecoderSpec, read_common


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    bias = read_flag(config, "attention_bias")
    # Qwen3's head size does not follow from its hidden size; its own default is 128.
    config = {**config, "head_dim": read_integer(config, "head_dim", default=128)}
    return replace(read_common(config, "qwen3"), qkv_bias=bias, output_bias=bias, qk_norm=True)
