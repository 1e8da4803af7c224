"""Which file reads which ``model_type``. A new dense family is one file and one line here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from unison.core.errors import ModelError
from unison.models.spec import DecoderSpec

SpecReader = Callable[[Mapping[str, Any]], DecoderSpec]

FAMILIES: dict[str, str] = {
    "llama": "unison.models.families.llama:read_spec",
    "qwen2": "unison.models.families.qwen2:read_spec",
    "qwen3": "unison.models.families.qwen3:read_spec",
}


def register_family(model_type: str, reader: str) -> None:
    """Make ``model_type`` readable by ``module:function``."""
    FAMILIES[model_type] = reader


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Spec of a config.json. Raises ModelError where the family or an option is not supported."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(f"model_type={model_type!r} is not supported; known families: {', '.join(sorted(FAMILIES))}")
    module, _, name = FAMILIES[model_type].partition(":")
    try:
        reader: SpecReader = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"family {model_type!r} cannot be read by {FAMILIES[model_type]!r}: {error}") from error
    return reader(config)
