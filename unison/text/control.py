"""Control tokens: which added tokens of a tokenizer are markup, and where they stand in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_BLANKS = " \t\r\n\v\f\N{LOWER ONE EIGHTH BLOCK}"
"""Whitespace, and the sign that SentencePiece writes for a space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that the tokenizer finds in the text before anything else."""

    text: str
    id: int
    special: bool
    """Skipped in decoded text."""
    lstrip: bool = False
    """Takes the whitespace before it along."""
    rstrip: bool = False
    """Takes the whitespace after it along."""
    single_word: bool = False
    """Is found only where no word character adjoins it."""

    @property
    def is_control(self) -> bool:
        """Markup. Runs of blanks, added by some tokenizers to shorten code, are ordinary text."""
        return self.special or bool(self.text.strip(_BLANKS))


class ControlTokens:
    """The control tokens of one tokenizer, as patterns."""

    def __init__(self, added: Iterable[AddedToken]) -> None:
        self.tokens = tuple(token for token in added if token.is_control)
        self._by_text = {token.text: token for token in self.tokens}
        self.ids = frozenset(token.id for token in self.tokens)

    @cached_property
    def anywhere(self) -> re.Pattern[str]:
        """Matches any control token's characters, the longest at each place."""
        return _any_of(token.text for token in self.tokens)

    @cached_property
    def special_anywhere(self) -> re.Pattern[str]:
        """As ``anywhere``, but only of those with ``special`` set."""
        return _any_of(token.text for token in self.tokens if token.special)

    @cached_property
    def not_special_anywhere(self) -> re.Pattern[str]:
        return _any_of(token.text for token in self.tokens if not token.special)

    @cached_property
    def edges(self) -> frozenset[str]:
        """The characters a control token begins or ends with, letters and digits apart."""
        return frozenset(c for token in self.tokens for c in (token.text[0], token.text[-1]) if not c.isalnum())

    @cached_property
    def _splitter(self) -> re.Pattern[str]:
        longest_first = sorted(self.tokens, key=lambda token: -len(token.text))
        return re.compile("|".join(map(_as_found, longest_first)) or _NOTHING)

    def split(self, text: str) -> list[str | int]:
        """``text`` as runs of ordinary text (never empty) and, between them, ids of control tokens.

        Finds what the tokenizer itself would find, its whitespace and word rules included.
        """
        pieces: list[str | int] = []
        end = 0
        for match in self._splitter.finditer(text):
            if match.start() > end:
                pieces.append(text[end : match.start()])
            found = match.group()
            token = self._by_text.get(found) or self._by_text[found.strip()]
            pieces.append(token.id)
            end = match.end()
        if end < len(text):
            pieces.append(text[end:])
        return pieces


_NOTHING = r"(?!)"


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or _NOTHING)


def _as_found(token: AddedToken) -> str:
    pattern = re.escape(token.text)
    if token.single_word:
        pattern = rf"(?<!\w){pattern}(?!\w)"
    return (r"\s*" if token.lstrip else "") + pattern + (r"\s*" if token.rstrip else "")
