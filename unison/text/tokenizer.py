"""The tokenizer: text to ids and back, with control tokens only where they are meant."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unison.core.errors import DataError, ModelError
from unison.text.chat import encode_chat
from unison.text.chat_template import ChatTemplate, Message
from unison.text.control import AddedToken, ControlTokens

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Tokenizer:
    """A fast tokenizer of transformers, used through its Rust backend.

    Never adds begin or end tokens on its own, never cleans up spaces. Safe to share between
    threads. Raises ModelError for a tokenizer without a Rust backend.
    """

    def __init__(self, source: PreTrainedTokenizerBase) -> None:
        backend = getattr(source, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"{type(source).__name__} is not a fast tokenizer; convert it to a tokenizer.json")
        self._serialized: str = backend.to_str()
        self._backend = _load_backend(self._serialized)
        self._chat_source: str | dict[str, str] | None = source.chat_template
        self._special_variables = {name: str(text) for name, text in source.special_tokens_map.items()}
        self._chat_templates: dict[str, ChatTemplate] = {}
        self.eos_token_id: int | None = source.eos_token_id
        self.added_tokens: tuple[AddedToken, ...] = tuple(
            AddedToken(
                text=token.content,
                id=token_id,
                special=token.special,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
            )
            for token_id, token in sorted(self._backend.get_added_tokens_decoder().items())
        )
        self.control = ControlTokens(self.added_tokens)
        self.special_ids = frozenset(token.id for token in self.added_tokens if token.special)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Load from a local folder; no hub is asked and no code of the folder is run.

        Raises ModelError where the folder or its tokenizer files are missing or unreadable.
        """
        if not path.is_dir():
            raise ModelError(f"{path} is not a folder; give a local model folder")
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
            raise ModelError(f"{path} holds no tokenizer; it needs a tokenizer.json and a tokenizer_config.json")
        from transformers import AutoTokenizer

        try:
            source = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:
            # The loader raises whatever its many file formats come to, the bare Exception included.
            raise ModelError(f"the tokenizer in {path} cannot be loaded: {type(error).__name__}: {error}") from error
        return cls(source)

    @cached_property
    def vocab_size(self) -> int:
        """Highest id + 1, added tokens included. A model may have more rows than this."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def byte_fallback(self) -> bool:
        """Whether unknown characters are spelt as byte tokens (Llama 2 style)."""
        return '"ByteFallback"' in json.dumps(json.loads(self._serialized).get("decoder"))

    def encode(self, text: str, *, special_tokens: Literal["plain", "parse"] = "plain") -> list[int]:
        """Ids of ``text``, nothing added. Raises DataError where the text is not valid Unicode.

        plain: control tokens spelt out in the text are ordinary characters.
        parse: they become control tokens.
        """
        return _encode(self._plain if special_tokens == "plain" else self._backend, text)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; broken bytes become U+FFFD, ids that no token has become nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_source)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of a conversation under the model's chat template; ``tools`` go in ``template_kwargs``.

        Control tokens come from the template alone: those spelt out in a message stay ordinary
        text (in an assistant's message, those not marked special keep their meaning).
        Raises ModelError where there is no template, DataError where it refuses the messages.
        """
        return encode_chat(
            self.chat_template(with_tools=template_kwargs.get("tools") is not None),
            self.control,
            self._encode_run,
            messages,
            add_generation_prompt=add_generation_prompt,
            now=now,
            variables=template_kwargs,
        )

    def chat_template(self, *, with_tools: bool = False) -> ChatTemplate:
        """The compiled template; where the model has several, the one for tools or the default."""
        if not self._chat_source:
            raise ModelError(
                "the model's tokenizer has no chat template; use raw prompts, "
                "or put a chat_template.jinja into its folder"
            )
        named = self._chat_source if isinstance(self._chat_source, Mapping) else {"default": self._chat_source}
        name = "tool_use" if with_tools and "tool_use" in named else "default"
        if name not in named:
            raise ModelError(f"none of the model's chat templates is the default; there are {', '.join(sorted(named))}")
        if name not in self._chat_templates:
            self._chat_templates[name] = ChatTemplate(named[name], self._special_variables)
        return self._chat_templates[name]

    def _encode_run(self, text: str, *, first: bool) -> list[int]:
        return _encode(self._plain if first else self._plain_inside, text)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """Finds no control token. Only special ones can be switched off, so all of them are made special."""
        spec = json.loads(self._serialized)
        control_ids = self.control.ids
        for token in spec["added_tokens"]:
            token["special"] = token["special"] or token["id"] in control_ids
        backend = _load_backend(json.dumps(spec))
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _plain_inside(self) -> tokenizers.Tokenizer:
        """As ``_plain``, for text that stands behind other text: no space is put before its first word."""
        backend = self._plain
        serialized = backend.to_str()
        if '"prepend_scheme":"first"' not in serialized:
            return backend
        spec = json.loads(serialized)
        _set_everywhere(spec["pre_tokenizer"], "prepend_scheme", "first", "never")
        backend = _load_backend(json.dumps(spec))
        backend.encode_special_tokens = True
        return backend


def _load_backend(serialized: str) -> tokenizers.Tokenizer:
    """A backend of our own, so that no other user of the tokenizer can change its settings."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(serialized)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        return backend.encode(text, add_special_tokens=False).ids
    except (TypeError, UnicodeEncodeError) as error:
        # A lone surrogate has no UTF-8 form, so the text never reaches the backend.
        raise DataError(f"text that cannot be encoded: {text!r:.80}: {error}") from error


def _set_everywhere(value: Any, key: str, old: str, new: str) -> None:
    """Replace ``old`` by ``new`` under ``key`` at any depth of plain data, in place."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _set_everywhere(item, key, old, new)
    if isinstance(value, dict) and value.get(key) == old:
        value[key] = new
