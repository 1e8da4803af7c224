"""From prompt rows to token ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from unison.config.names import did_you_mean, join_or
from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.data.cursor import Cursor
from unison.data.source import PromptRow, PromptSource
from unison.text.tokenizer import Tokenizer

TOO_LONG: Final = "longer than data.max_prompt_tokens"
TOO_SHORT: Final = "shorter than data.min_prompt_tokens"
_SYSTEM_ROLES: Final = ("system", "developer")
_OWN_VARIABLES: Final = frozenset(
    [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "now",
        "strftime_now",
        "raise_exception",
        "namespace",
        "range",
        "dict",
        "cycler",
        "joiner",
        "loop",
        "self",
        "chat_template",
        "special_tokens",
        "additional_special_tokens",
        "extra_special_tokens",
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
    ]
)
"""What a template is told by the tokenizer or by us, and never by a configuration."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A row, its token ids and the epoch it was drawn in."""

    row: PromptRow
    token_ids: list[int]
    epoch: int = 0


def encode_prompt(row: PromptRow, tokenizer: Tokenizer, config: DataConfig) -> list[int]:
    """Token ids of one prompt, whatever their number.

    A string is taken as it is, or as one user turn with ``data.chat``; messages are rendered with
    the chat template, ``data.system_prompt`` before them where they have no system message.
    Raises DataError, naming the row, where it cannot be rendered or has no tokens.
    """
    try:
        if not is_chat(row, config):
            ids = tokenizer.encode(str(row.prompt), special_tokens=config.special_tokens)
        else:
            options: dict[str, Any] = dict(config.template_options)
            ids = tokenizer.render_chat(_messages(row, config), add_generation_prompt=True, **options)
    except DataError as error:
        raise DataError(f"{row.row_id}: {error}") from error
    if not ids:
        raise DataError(f"{row.row_id}: the prompt has no tokens; remove the row")
    return ids


def is_chat(row: PromptRow, config: DataConfig) -> bool:
    """Whether the row goes through the chat template."""
    return config.chat or not isinstance(row.prompt, str)


class PromptEncoder:
    """Turns rows into token ids under the settings of ``[data]``, and keeps count of what it leaves out.

    Prompts over ``data.max_prompt_tokens`` raise DataError, are left out ("skip") or cut; those under
    ``data.min_prompt_tokens`` are left out. Only raw prompts are cut: a chat without its beginning, its
    middle or its end is no conversation of the template any more. Raises ConfigError for settings that
    contradict each other.
    """

    def __init__(self, tokenizer: Tokenizer, config: DataConfig) -> None:
        _check_settings(tokenizer, config)
        self._tokenizer = tokenizer
        self._config = config
        self.left_out: dict[str, dict[str, str]] = {}
        """Reason -> row id -> a line about the row, each row once."""
        self.truncated: dict[str, int] = {}
        """Row id -> tokens before it was cut."""
        self.num_chats = 0

    @property
    def skipped(self) -> list[str]:
        """A line about each row left out so far."""
        return [line for lines in self.left_out.values() for line in lines.values()]

    def encode(self, row: PromptRow) -> list[int] | None:
        """Ids of one row, or None where it is left out for its length."""
        config = self._config
        ids = encode_prompt(row, self._tokenizer, config)
        self.num_chats += is_chat(row, config)
        if len(ids) < config.min_prompt_tokens:
            told = f"the prompt has {len(ids)} tokens, under data.min_prompt_tokens={config.min_prompt_tokens}"
            self.left_out.setdefault(TOO_SHORT, {})[row.row_id] = f"{row.row_id}: {told}"
            return None
        return ids if len(ids) <= config.max_prompt_tokens else self._too_long(row, ids)

    def _too_long(self, row: PromptRow, ids: list[int]) -> list[int] | None:
        limit, how = self._config.max_prompt_tokens, self._config.on_long_prompt
        told = f"{row.row_id}: the prompt has {len(ids)} tokens, over data.max_prompt_tokens={limit}"
        if how == "fail":
            raise DataError(f'{told}; raise it, or set data.on_long_prompt to "skip"')
        if how == "skip":
            self.left_out.setdefault(TOO_LONG, {})[row.row_id] = told
            return None
        if is_chat(row, self._config):
            raise DataError(f"{told}; {_NO_CUT.format(how)}")
        self.truncated[row.row_id] = len(ids)
        if how == "truncate_left":
            return ids[-limit:]
        if how == "truncate_right":
            return ids[:limit]
        head = (limit + 1) // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]


_NO_CUT: Final = (
    "data.on_long_prompt={} applies to raw prompts only, since a chat that is cut is no conversation of its template "
    'any more; use "skip", or raise data.max_prompt_tokens'
)


class EncodedPrompts:
    """A source's usable prompts in its order, each encoded when it is asked for."""

    def __init__(self, source: PromptSource, encoder: PromptEncoder) -> None:
        self._source = source
        self.encoder = encoder

    @property
    def skipped(self) -> list[str]:
        """A line about each row left out so far."""
        return self.encoder.skipped

    def __iter__(self) -> Iterator[EncodedPrompt]:
        for index in range(len(self._source)):
            row = self._source[index]
            ids = self.encoder.encode(row)
            if ids is not None:
                yield EncodedPrompt(row, ids)


def encode_all(source: PromptSource, tokenizer: Tokenizer, config: DataConfig) -> EncodedPrompts:
    """The source's prompts as token ids, encoded lazily; raises ConfigError where settings contradict."""
    return EncodedPrompts(source, PromptEncoder(tokenizer, config))


def draw_prompts(cursor: Cursor, encoder: PromptEncoder, n: int, *, num_rows: int) -> list[EncodedPrompt]:
    """The next ``n`` usable prompts of a cursor, those left out replaced by the next.

    Raises DataError where twice ``num_rows`` in a row are unusable: so many hold a whole epoch.
    """
    drawn: list[EncodedPrompt] = []
    num_unusable = 0
    while len(drawn) < n:
        for row, epoch in cursor.next_batch(n - len(drawn)):
            ids = encoder.encode(row)
            if ids is not None:
                drawn.append(EncodedPrompt(row, ids, epoch))
                num_unusable = 0
                continue
            num_unusable += 1
            if num_unusable >= 2 * num_rows:
                raise DataError(f"the last {num_unusable} prompts drawn were all left out; {encoder.skipped[-1]}")
    return drawn


def _messages(row: PromptRow, config: DataConfig) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    has_own = any(isinstance(message, dict) and message.get("role") in _SYSTEM_ROLES for message in messages)
    if config.system_prompt is None or has_own:
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def _check_settings(tokenizer: Tokenizer, config: DataConfig) -> None:
    if config.chat and not tokenizer.has_chat_template:
        raise ConfigError("data.chat=true needs a chat template, and the model's tokenizer has none")
    if config.chat and config.special_tokens == "parse":
        raise ConfigError('data.special_tokens="parse" has no effect with data.chat=true; remove one of them')
    if config.chat and config.on_long_prompt.startswith("truncate"):
        raise ConfigError(f"data.chat=true: {_NO_CUT.format(config.on_long_prompt)}")
    if config.min_prompt_tokens > config.max_prompt_tokens:
        raise ConfigError(
            f"data.min_prompt_tokens={config.min_prompt_tokens} is above data.max_prompt_tokens="
            f"{config.max_prompt_tokens}, so that no prompt is left"
        )
    if config.system_prompt is not None and not config.system_prompt.strip():
        raise ConfigError("data.system_prompt is empty; remove it")
    if config.template_options:
        _check_template_options(tokenizer, config)


def _check_template_options(tokenizer: Tokenizer, config: DataConfig) -> None:
    if not tokenizer.has_chat_template:
        raise ConfigError("data.template_options need a chat template, and the model's tokenizer has none")
    read = tokenizer.chat_template().variables
    for name in config.template_options:
        if name in _OWN_VARIABLES:
            raise ConfigError(f"data.template_options.{name} is not for a configuration to set; remove it")
        if name not in read:
            own = sorted(read - _OWN_VARIABLES)
            there = f" (it reads {join_or(own)})" if own else " (it reads none)"
            raise ConfigError(
                f"data.template_options.{name} has no effect: the model's chat template does not read it"
                f"{did_you_mean(name, own)}{there}"
            )
