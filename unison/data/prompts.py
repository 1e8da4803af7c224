"""From prompt rows to token ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.data.cursor import PromptCursor
from unison.data.source import PromptRow, PromptSource
from unison.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A row, its token ids and the epoch it was drawn in."""

    row: PromptRow
    token_ids: list[int]
    epoch: int = 0


def encode_prompt(row: PromptRow, tokenizer: Tokenizer, config: DataConfig) -> list[int]:
    """Token ids of one prompt, whatever their number.

    A string is taken as it is, or as one user turn with ``data.chat``; messages are rendered with
    the chat template. Raises DataError, naming the row, where it cannot be rendered or has no tokens.
    """
    try:
        if isinstance(row.prompt, str) and not config.chat:
            ids = tokenizer.encode(row.prompt, special_tokens=config.special_tokens)
        else:
            messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
            ids = tokenizer.render_chat(messages, add_generation_prompt=True)
    except DataError as error:
        raise DataError(f"{row.row_id}: {error}") from error
    if not ids:
        raise DataError(f"{row.row_id}: the prompt has no tokens; remove the row")
    return ids


class EncodedPrompts:
    """A source's prompts as token ids, each encoded when it is asked for.

    Prompts over ``data.max_prompt_tokens`` raise DataError, or with ``data.on_long_prompt`` "skip"
    are left out; ``skipped`` tells of each row left out so far, once.
    """

    def __init__(self, source: PromptSource, tokenizer: Tokenizer, config: DataConfig) -> None:
        if config.chat and not tokenizer.has_chat_template:
            raise ConfigError("data.chat=true needs a chat template, and the model's tokenizer has none")
        if config.chat and config.special_tokens == "parse":
            raise ConfigError('data.special_tokens="parse" has no effect with data.chat=true; remove one of them')
        self._source = source
        self._tokenizer = tokenizer
        self._config = config
        self._skipped: dict[str, str] = {}

    @property
    def skipped(self) -> list[str]:
        return list(self._skipped.values())

    def encode(self, row: PromptRow) -> list[int] | None:
        """Ids of one row, or None where it is left out for its length."""
        ids = encode_prompt(row, self._tokenizer, self._config)
        limit = self._config.max_prompt_tokens
        if len(ids) <= limit:
            return ids
        problem = f"{row.row_id}: the prompt has {len(ids)} tokens, over data.max_prompt_tokens={limit}"
        if self._config.on_long_prompt == "fail":
            raise DataError(f'{problem}; raise it, or set data.on_long_prompt to "skip"')
        self._skipped[row.row_id] = problem
        return None

    def __iter__(self) -> Iterator[EncodedPrompt]:
        """The usable prompts in the source's order."""
        for index in range(len(self._source)):
            row = self._source[index]
            ids = self.encode(row)
            if ids is not None:
                yield EncodedPrompt(row, ids)

    def draw(self, cursor: PromptCursor, n: int) -> list[EncodedPrompt]:
        """The next ``n`` usable prompts of a cursor over the source, those left out replaced by the next.

        Raises DataError where a whole epoch brings no usable prompt.
        """
        drawn: list[EncodedPrompt] = []
        num_unusable = 0
        while len(drawn) < n:
            for row, epoch in cursor.next_batch(n - len(drawn)):
                ids = self.encode(row)
                if ids is not None:
                    drawn.append(EncodedPrompt(row, ids, epoch))
                    num_unusable = 0
                    continue
                num_unusable += 1
                # So many in a row contain a whole epoch, wherever they began.
                if num_unusable >= 2 * len(self._source):
                    raise DataError(
                        f"each of the {len(self._source)} prompts is over data.max_prompt_tokens="
                        f"{self._config.max_prompt_tokens}; raise it"
                    )
        return drawn


def encode_all(source: PromptSource, tokenizer: Tokenizer, config: DataConfig) -> EncodedPrompts:
    """The source's prompts as token ids, encoded lazily; raises ConfigError where settings contradict."""
    return EncodedPrompts(source, tokenizer, config)
