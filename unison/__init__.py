"""Unison: reinforcement learning of large language models, rollout and training as one system."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unison.core.sampling import SamplingParams as SamplingParams
    from unison.engine.client import InProcessClient as InProcessClient
    from unison.engine.engine import Engine as Engine

__version__ = "0.1.0"
__all__ = ["Engine", "InProcessClient", "SamplingParams", "__version__"]

_EXPORTS = {
    "Engine": "unison.engine.engine",
    "InProcessClient": "unison.engine.client",
    "SamplingParams": "unison.core.sampling",
}


def __getattr__(name: str) -> Any:
    """Exports are imported on first use, so that ``import unison`` and its light parts stay light."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'unison' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
