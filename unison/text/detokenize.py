"""Streamed text: from one token id after the other to the very text that decoding them together gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from unison.text.tokenizer import Tokenizer

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING_TOKENS: Final = 8
"""A character has at most 4 bytes; more pending tokens than this are broken bytes, not a character."""


class IncrementalDetokenizer:
    """Turns token ids into text as they come.

    Only a short window of the last tokens is decoded at each push, so the cost of a token does not
    grow with the length of the answer. The bytes of an incomplete character are held back until it
    is complete, or until the bytes that follow show that it never will be.

    All pieces joined, the flush included, equal ``tokenizer.decode`` of all ids. One exception by
    nature: decoders with byte fallback (Llama 2 style) turn a whole run of byte tokens into
    U+FFFD, one per byte, if a single one of them is broken; here what was complete stays readable.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._window: list[int] = []
        self._num_context = 0
        """Tokens of the window that stood there at the last stable point: context, all emitted."""
        self._num_emitted = 0
        """Characters of the decoded window that were emitted."""

    def push(self, token_id: int) -> str:
        """Take one id; returns the text that became certain with it, often none."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._settle(text)
        if len(self._window) - self._num_context > _MAX_PENDING_TOKENS:
            return self._give_up(text)
        return self._emit(text, len(text.rstrip(REPLACEMENT)))

    def flush(self) -> str:
        """The rest, when no more ids come: the bytes of an incomplete character as one U+FFFD."""
        text = self._decode(self._window)
        rest = text[self._num_emitted :]
        if self._tokenizer.byte_fallback and rest:
            rest = rest.rstrip(REPLACEMENT) + REPLACEMENT
        self._window, self._num_context, self._num_emitted = [], 0, 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        # Special tokens that are to be skipped never enter the window.
        return self._tokenizer.decode(ids, skip_special=False)

    def _emit(self, text: str, end: int) -> str:
        piece = text[self._num_emitted : end]
        self._num_emitted = max(self._num_emitted, end)
        return piece

    def _settle(self, text: str) -> str:
        """All of ``text`` is certain. The tokens new since the last such point become the context.

        A context is needed because a decoder may treat the first token differently (it strips its
        leading space); so one that decodes to nothing will not do.
        """
        piece = self._emit(text, len(text))
        context = self._window[self._num_context :]
        context_text = self._decode(context)
        if context_text:
            self._window, self._num_emitted = context, len(context_text)
        self._num_context = len(self._window)
        return piece

    def _give_up(self, text: str) -> str:
        """Emit broken bytes, all but the last few tokens that may yet grow into a character.

        The cut is put where decoding the two sides apart changes nothing.
        """
        for num_kept in range(1, 5):
            head = self._decode(self._window[:-num_kept])
            if head + self._decode(self._window[-num_kept:]) == text:
                piece = self._emit(text, max(len(head), len(text.rstrip(REPLACEMENT))))
                self._window = self._window[-num_kept:]
                self._num_context, self._num_emitted = 0, self._num_emitted - len(head)
                return piece
        return self._emit(text, len(text.rstrip(REPLACEMENT)))
