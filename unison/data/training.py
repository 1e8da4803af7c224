"""The training prompts of a run: opened, filtered, measured, and drawn from in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.core.seeds import derive_seed
from unison.data.curriculum import SuccessRate
from unison.data.cursor import Cursor, PromptCursor
from unison.data.filters import apply_filter
from unison.data.mixture import MixtureCursor, PartSource, part_config
from unison.data.prompts import EncodedPrompt, PromptEncoder, draw_prompts
from unison.data.source import PromptSource, Subset, identity_of, load_source
from unison.text.tokenizer import Tokenizer

NUM_MEASURED: Final = 16
"""Rows of a generated source that are encoded before the run starts."""
BAD_ROW: Final = "broken"
FILTERED: Final = "left out by data.filter"
_SOURCE_SETTINGS: Final = ("source", "layout", "prompt_key", "label_key", "metadata_key", "options")
_NUM_NAMED: Final = 10


@dataclass(slots=True)
class TrainingPrompts:
    """What a run draws its prompts from. ``cursor`` is the state that a checkpoint carries."""

    cursor: Cursor
    encoder: PromptEncoder
    num_rows: int
    longest: int
    """In tokens, over the prompts looked at: all of them, but for generated sources."""
    left_out: dict[str, list[str]]
    """Rows left out before they were encoded: by reason, a line about each."""
    notes: list[str] = field(default_factory=list)
    """What was left out, cut or not looked at, for people."""

    def draw(self, n: int) -> list[EncodedPrompt]:
        """The next ``n`` prompts, each with its epoch."""
        return draw_prompts(self.cursor, self.encoder, n, num_rows=self.num_rows)

    @property
    def num_skipped(self) -> int:
        """Rows left out so far, for whatever reason."""
        return sum(map(len, self.left_out.values())) + len(self.encoder.skipped)


def open_training(
    config: DataConfig, tokenizer: Tokenizer, run_seed: int, *, held_out: bool = False
) -> TrainingPrompts:
    """The training prompts as configured in ``[data]``.

    Every prompt is encoded once (of a generated source the first few), so that one that cannot be used
    stops the run before it starts, and an epoch has each usable one once. Raises ConfigError for
    settings that contradict or have no effect, DataError for unusable data. With a mixture, the settings
    of ``data.source`` are those of held-out data, and refused where there is none (``held_out``).
    """
    check_curriculum(config)
    _check_mixture(config, held_out)
    encoder = PromptEncoder(tokenizer, config)
    left_out: dict[str, list[str]] = {}
    sources: dict[str, PromptSource] = {}
    longest = 0
    for name, own in _sections(config).items():
        with _named(name):
            source = _open(name, own, run_seed, left_out)
            sources[name], most = _usable(source, encoder)
            longest = max(longest, most)
    _check_used(config, encoder)
    return TrainingPrompts(
        cursor=_cursor(config, sources, run_seed),
        encoder=encoder,
        num_rows=sum(map(len, sources.values())),
        longest=longest,
        left_out=left_out,
        notes=_notes(left_out, encoder, config, sources),
    )


def check_curriculum(config: DataConfig) -> None:
    """Raise ConfigError where a setting of the curriculum has no effect."""
    if config.curriculum == "none":
        neutral = DataConfig()
        for name in ("curriculum_low", "curriculum_high", "curriculum_rest"):
            value = getattr(config, name)
            if value != getattr(neutral, name):
                raise ConfigError(f'data.{name}={value} has no effect with data.curriculum="none"; remove it')


def _check_mixture(config: DataConfig, held_out: bool) -> None:
    if not config.mix:
        return
    neutral = DataConfig()
    for name in ("train", "filter", *(() if held_out else _SOURCE_SETTINGS)):
        value = getattr(config, name)
        if value != getattr(neutral, name):
            raise ConfigError(f"data.{name}={value!r} has no effect with data.mix; give it to the parts, or remove it")


def summary(reason: str, lines: list[str]) -> list[str]:
    """How many rows were left out for a reason, and the first few of them."""
    prompts = "1 prompt was" if len(lines) == 1 else f"{len(lines)} prompts were"
    more = len(lines) - _NUM_NAMED
    named = [f"skipped: {line}" for line in lines[:_NUM_NAMED]]
    return [f"{prompts} skipped: {reason}", *named] + ([f"skipped: ... and {more} more"] if more > 0 else [])


def _sections(config: DataConfig) -> Mapping[str, DataConfig]:
    """The data section of each part; of the only one under the empty name."""
    if not config.mix:
        return {"": config}
    return {name: part_config(config, name, part) for name, part in config.mix.items()}


@contextmanager
def _named(part: str) -> Iterator[None]:
    """Errors within name the mixture's part."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if not part:
            raise
        raise type(error)(f"data.mix.{part}: {error}") from error


def _open(name: str, config: DataConfig, seed: int, left_out: dict[str, list[str]]) -> PromptSource:
    # One seed for all parts and for the held-out split, or a part could train on what is held out.
    source = load_source(config, "train", seed)
    bad = [str(line) for line in getattr(source, "skipped", ())]
    source, filtered = apply_filter(source, config.filter)
    prefix = f"{name}/" if name else ""
    for reason, lines in ((BAD_ROW, bad), (FILTERED, filtered)):
        if lines:
            left_out.setdefault(reason, []).extend(prefix + line for line in lines)
    return PartSource(name, source) if name else source


def _usable(source: PromptSource, encoder: PromptEncoder) -> tuple[PromptSource, int]:
    """The rows that are not left out for their length, and the tokens of the longest.

    A generated source is left as it is, and measured by its first rows.
    """
    generated = identity_of(source) is not None
    usable: list[int] = []
    longest = 0
    for index in islice(range(len(source)), NUM_MEASURED if generated else None):
        ids = encoder.encode(source[index])
        if ids is not None:
            usable.append(index)
            longest = max(longest, len(ids))
    if generated:
        return source, longest
    if not usable:
        raise DataError(f"each of the {len(source)} prompts is left out for its length; {encoder.skipped[-1]}")
    return (source if len(usable) == len(source) else Subset(source, usable)), longest


def _check_used(config: DataConfig, encoder: PromptEncoder) -> None:
    if encoder.num_chats:
        return
    for name in ("system_prompt", "template_options"):
        value = getattr(config, name)
        if value:
            raise ConfigError(
                f"data.{name}={value!r} has no effect: no prompt is a chat; set data.chat=true, or remove it"
            )


def _cursor(config: DataConfig, sources: Mapping[str, PromptSource], run_seed: int) -> Cursor:
    seed = derive_seed(run_seed, "order")
    cursors = {
        name: PromptCursor(
            source, derive_seed(seed, name) if name else seed, config.shuffle, curriculum=_curriculum(config)
        )
        for name, source in sources.items()
    }
    if not config.mix:
        return cursors[""]
    return MixtureCursor(cursors, {name: part.weight for name, part in config.mix.items()}, seed)


def _curriculum(config: DataConfig) -> SuccessRate | None:
    if config.curriculum == "none":
        return None
    return SuccessRate(config.curriculum_low, config.curriculum_high, config.curriculum_rest)


def _notes(
    left_out: Mapping[str, list[str]], encoder: PromptEncoder, config: DataConfig, sources: Mapping[str, PromptSource]
) -> list[str]:
    notes: list[str] = []
    for reason, lines in left_out.items():
        notes += summary(reason, lines)
    for reason, told in encoder.left_out.items():
        notes += summary(reason, list(told.values()))
    if encoder.truncated:
        row_id, length = next(iter(encoder.truncated.items()))
        notes.append(
            f"prompts cut to {config.max_prompt_tokens} tokens by data.on_long_prompt={config.on_long_prompt}: "
            f"{len(encoder.truncated)}, the first of them {row_id} with its {length} tokens"
        )
    generated = [source for source in sources.values() if identity_of(source) is not None]
    if generated:
        num_rows = sum(map(len, generated))
        notes.append(
            f"{num_rows} prompts are made when they are drawn; the first {NUM_MEASURED} of each source were looked at"
        )
    return notes
