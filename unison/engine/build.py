"""Puts an engine together from a model folder: weights, tokenizer, end ids, numerics."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from unison.config.schema import EngineConfig
from unison.engine.end_tokens import end_token_ids
from unison.engine.engine import Engine
from unison.models.loading import load_model, read_config
from unison.models.numerics import choose_numerics
from unison.models.registry import read_spec
from unison.models.sources import resolve_model
from unison.text.tokenizer import Tokenizer


def build_engine(model: str, *, dtype: str, numerics: str, config: EngineConfig) -> Engine:
    """The engine behind ``Engine.from_pretrained``; automatic choices are printed to stderr."""
    folder = resolve_model(model)
    choice = choose_numerics(read_spec(read_config(folder)), dtype, numerics)
    _print_notes(choice.notes)
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    end_ids = end_token_ids(folder, tokenizer.eos_token_id if tokenizer is not None else None)
    engine = Engine(
        load_model(folder, choice.dtype), path=choice.path, config=config, tokenizer=tokenizer, end_ids=end_ids
    )
    _print_notes(engine.notes)
    return engine


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
