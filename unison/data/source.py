"""Sources of prompts, found by name or by ``module:object``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError, UnisonError
from unison.data.sections import section_of
from unison.rewards.plugins import Registry

Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt: raw text, or chat messages as ``{"role": ..., "content": ...}``.

    ``label`` is the reference answer as the source gave it (a number stays a number). ``row_id``
    names the prompt: it seeds the noise of its samples, and no two rows of a source share one.
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
    """Rows by index. The order never changes; whoever draws from it shuffles.

    Two attributes may be there besides: ``skipped``, a list of lines about rows left out; and
    ``identity``, a text that the rows are a pure function of. A source with an identity makes its
    rows when they are asked for, so they are not all read when a run starts.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> PromptRow: ...


SourceFactory = Callable[[DataConfig, Split, int], PromptSource]

_registry: Registry[SourceFactory] = Registry(
    "data source",
    ConfigError,
    {
        "jsonl": "unison.data.jsonl:open_jsonl",
        "parquet": "unison.data.parquet:open_parquet",
        "datasets": "unison.data.hub:open_datasets",
        "reasoning_gym": "unison.data.gym:open_gym",
        "sums": "unison.data.sums:open_sums",
    },
)
register_source: Final = _registry.register


class Subset:
    """Some rows of a source, in the order of ``indices``."""

    def __init__(self, source: PromptSource, indices: Sequence[int]) -> None:
        self._source = source
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int, /) -> PromptRow:
        return self._source[self._indices[index]]


def load_source(config: DataConfig, split: Split, seed: int) -> PromptSource:
    """Open the configured source for one split; ``data.mix`` and ``data.filter`` are not its business.

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
    _check_rows(source, config.source)
    return source


def identity_of(source: PromptSource) -> str | None:
    """What the rows of a generated source are a function of; None where the rows themselves must be read."""
    identity = getattr(source, "identity", None)
    return identity if isinstance(identity, str) else None


def refuse_settings(config: DataConfig, *names: str) -> None:
    """Raise ConfigError where one of these settings was changed, though the source has no use for it."""
    neutral = DataConfig()
    for name in names:
        value = getattr(config, name)
        if value != getattr(neutral, name):
            section = section_of(config)
            raise ConfigError(
                f"{section}.{name}={value!r} has no effect with {section}.source={config.source!r}; remove it"
            )


def _check_rows(source: PromptSource, name: str) -> None:
    seen: dict[str, int] = {}
    for index in range(len(source) if identity_of(source) is None else 1):
        row = source[index]
        if not isinstance(row, PromptRow):
            raise ConfigError(f"data.source={name!r} holds {type(row).__name__} objects; its rows must be PromptRow")
        if not isinstance(row.row_id, str) or not row.row_id:
            raise DataError(f"row {index} of data.source={name!r} has the row_id {row.row_id!r}; give it a name")
        if row.row_id in seen:
            raise DataError(
                f"rows {seen[row.row_id]} and {index} of data.source={name!r} share the row_id {row.row_id!r}, so "
                "their samples would share their noise; give each row a row_id of its own"
            )
        seen[row.row_id] = index
