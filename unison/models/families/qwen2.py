"""Qwen2 and Qwen2.5 dense: biases on q, k and v only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unison.models.spec import DecoderSpec, read_common


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    return replace(read_common(config, "qwen2"), qkv_bias=True)
