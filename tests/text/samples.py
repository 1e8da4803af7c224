"""Small tokenizers made on the spot, and the real one where it is at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from unison.models.packaged import cache_dir

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again",
    "user system assistant tool: be brief, read both, done",
    '{"name": "find", "arguments": {"path": "a/b"}} 3+5=8 12+4=16',
    "naïve café 你好，世界 🌍🌎 — ça va?",
]
SPECIAL = ["<|e|>", "<|s|>", "<|s|>x"]
MARKUP = ["<think>", "</think>", "<tool>", "</tool>"]
_fast: Any = PreTrainedTokenizerFast

TURNS_TEMPLATE = (
    "{% for m in messages %}{% if m['role']=='tool' %}"
    "{% if loop.first or messages[loop.index0-1]['role']!='tool' %}<|s|>user{% endif %}{{'\\n'}}"
    "<obs>{{m['content']}}</obs>"
    "{% if loop.last or messages[loop.index0+1]['role']!='tool' %}<|e|>{{'\\n'}}{% endif %}"
    "{% else %}<|s|>{{m['role']}}{{'\\n'}}{{m['content']}}<|e|>{{'\\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant{{'\\n'}}{% endif %}"
)
AGENT_TEMPLATE = """
{%- if tools %}
    {{- '<|s|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '<|e|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- set text = m.content if m.content is string else '' %}
    {%- if m.content is not string and m.content is defined %}
        {%- for part in m.content %}
            {%- set text = part.text %}
            {{- '<|s|>' + m.role + '\\n' + text + '<|e|>\\n' if loop.last else '' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '<|s|>user\\n<tool>' + text + '</tool><|e|>\\n' }}
    {%- else %}
        {%- set thought = m.reasoning_content or '' %}
        {%- if m.role == 'assistant' and '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1] %}
            {%- set text = text.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|s|>' + m.role + '\\n' }}
        {%- if thought %}
            {{- '<think>' + thought + '</think>' }}
        {%- endif %}
        {{- text | trim }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</tool>' }}
        {%- endfor %}
        {{- '<|e|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|s|>assistant\\n' }}
    {%- if thinking is defined and not thinking %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""


def byte_level(template: str | None = None, extra: list[Any] | None = None) -> Any:
    """A byte-level BPE tokenizer with special tokens and, not special, markup."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([*MARKUP, *(extra or [])])
    return _wrapped(backend, template)


def byte_tokens(tokens: list[bytes], special: list[str] | None = None) -> Any:
    """A tokenizer whose token i is exactly ``tokens[i]``."""
    letters = _byte_letters()
    vocab = {"".join(letters[byte] for byte in token): i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special or [])
    return _fast(tokenizer_object=backend)


def sentence_piece(template: str | None = None) -> Any:
    """In the manner of Llama 2: a space before the first word, unknown characters as byte tokens."""
    words = ["▁", "▁hello", "hello", "▁world", "world", "▁user", "user", "\n", *"abcdefghijklmnopqrstuvwxyz<>|/▁"]
    vocab = {
        token: i for i, token in enumerate(dict.fromkeys([*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *words]))
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return _wrapped(backend, template)


def real_folder() -> Path:
    """The folder of the real model; the test is skipped where there is none."""
    folder = cache_dir() / "smollm2-135m"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("the real tokenizer is not in the cache")
    return folder


def _wrapped(backend: tokenizers.Tokenizer, template: str | None) -> Any:
    source = _fast(tokenizer_object=backend, eos_token="<|e|>", bos_token="<|s|>")
    source.chat_template = template
    return source


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable ones stand for themselves, the others follow from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letter[byte] for byte in range(256)]
