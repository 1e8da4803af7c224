"""Sources of prompts, found by name or by ``module:object``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError, UnisonError
from unison.rewards.plugins import Registry

Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt: raw text, or chat messages as ``{"role": ..., "content": ...}``.

    ``label`` is the reference answer as the source gave it (a number stays a number).
    """

    row_id: str
    prompt: str | list[dict[str, Any]]
    label: Any | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def sample_metadata(self) -> dict[str, Any]:
        """What a sample of this prompt carries for reward functions."""
        return {**self.metadata, "row_id": self.row_id, "prompt": self.prompt, "label": self.label}


@runtime_checkable
class PromptSource(Protocol):
    """Rows by index. The order never changes; whoever draws from it shuffles."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> PromptRow: ...


SourceFactory = Callable[[DataConfig, Split, int], PromptSource]

_registry: Registry[SourceFactory] = Registry(
    "data source",
    ConfigError,
    {"jsonl": "unison.data.jsonl:open_jsonl", "sums": "unison.data.sums:open_sums"},
)
register_source: Final = _registry.register


def load_source(config: DataConfig, split: Split, seed: int) -> PromptSource:
    """Open the configured source for one split.

    A source is a function ``(config, split, seed) -> PromptSource``, registered or named as
    ``module:function``. Raises ConfigError where it is unknown or set up wrongly, DataError where
    the data cannot be used.
    """
    factory = _registry.find(config.source)
    if not callable(factory):
        raise ConfigError(f"data.source={config.source!r} is a {type(factory).__name__}; name a function")
    try:
        source = factory(config, split, seed)
    except UnisonError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"data.source={config.source!r} failed: {type(error).__name__}: {error}") from error
    if not isinstance(source, PromptSource):
        raise ConfigError(
            f"data.source={config.source!r} returned a {type(source).__name__}; it must have len() and rows by index"
        )
    if len(source) == 0:
        raise DataError(f"data.source={config.source!r} has no prompts for {split}")
    if not isinstance(source[0], PromptRow):
        raise ConfigError(
            f"data.source={config.source!r} holds {type(source[0]).__name__} objects; its rows must be PromptRow"
        )
    return source


def refuse_settings(config: DataConfig, *names: str) -> None:
    """Raise ConfigError where one of these settings was changed, though the source has no use for it."""
    neutral = DataConfig()
    for name in names:
        value = getattr(config, name)
        if value != getattr(neutral, name):
            raise ConfigError(f"data.{name}={value!r} has no effect with data.source={config.source!r}; remove it")
