"""Answers to tasks of reasoning-gym, scored by the data set's own ``score_answer``.

Some of its scorers run Python's ``eval``, or sympy's ``parse_expr``, which is ``eval``, on the answer or on the row
(read in the source of reasoning-gym 0.1.25; ``EVALUATED`` lists them). Here such text reaches its scorer only if it
consists of what a right answer can consist of: digits, signs, a few names; no call of anything else, no attribute, no
string. Grade them in an isolated process all the same: ``needs_sandbox`` says which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from unison.core.errors import RewardError
from unison.rewards.extract import check_source, pick
from unison.rewards.optional import optional_module
from unison.rewards.options import checked_by

MAX_ANSWER_CHARS: Final = 20_000
"""Longer answers are scored as no answer."""

_ALGEBRA: Final = re.compile(
    r"(?:\s|\d{1,40}(?:\.\d{0,20})?(?![\w.])|[-+*/()]|(?<![A-Za-z])(?:[A-Za-z](?!\s*\()|sin|cos|tan|exp|log|sqrt|asin|acos|atan"
    r"|sinh|cosh|tanh)(?![A-Za-z]))*"
)
_POWER: Final = re.compile(r"\*\*\s*(\(?\s*-?\s*\d{1,3}(?:\s*/\s*\d{1,2})?\s*\)?|[A-Za-z](?![A-Za-z(]))(?!\s*\*\*)")
_OUTER_POWER: Final = re.compile(r"\)\s*\*\*")
_SUMS: Final = re.compile(r"[\d\s+*/()-]*")

EVALUATED: Final[Mapping[str, tuple[str, re.Pattern[str]]]] = {
    "binary_matrix": ("eval of the answer", re.compile(r"[\d\s,\[\]]*")),
    "countdown": ("sympy.parse_expr of the answer", _SUMS),
    "intermediate_integration": ("sympy.parse_expr of the answer and of the row's integrand", _ALGEBRA),
    "n_queens": ("eval of the answer", re.compile(r"[Q_\s,'\"\[\]]*")),
    "polynomial_multiplication": ("sympy.parse_expr of the answer and of the row's answer", _ALGEBRA),
    "puzzle24": ("sympy.parse_expr of the answer", _SUMS),
    "simple_integration": ("sympy.parse_expr of the answer and of the row's integrand", _ALGEBRA),
    "spiral_matrix": ("eval of the answer", re.compile(r"[\d\s,\[\]-]*")),
    "string_insertion": ("eval of the answer", re.compile(r"[A-E\s,'\"\[\]]*")),
}
"""Data sets whose scorer evaluates the answer as Python -> how, and what an answer given to it may consist of."""
EVALUATED_ROWS: Final[Mapping[str, tuple[str, re.Pattern[str]]]] = {
    "bitwise_arithmetic": ("eval of the row's problem", re.compile(r"(?:0x[\da-fA-F]{1,16}|\d{1,6}|<<|>>|[\s()+*-])*")),
    "intermediate_integration": ("sympy.parse_expr of the row's integrand", _ALGEBRA),
    "number_sorting": ("eval of the row's answer, where it is no JSON", re.compile(r"[\d\s.,'\"\[\]-]*")),
    "polynomial_multiplication": ("sympy.parse_expr of the row's answer", _ALGEBRA),
    "simple_integration": ("sympy.parse_expr of the row's integrand", _ALGEBRA),
}
"""Data sets whose scorer evaluates a part of the row, which is as trusted as the file it came from."""
_ROW_PARTS: Final = {
    "bitwise_arithmetic": ("metadata", "problem"),
    "intermediate_integration": ("metadata", "integrand"),
    "number_sorting": ("answer",),
    "polynomial_multiplication": ("answer",),
    "simple_integration": ("metadata", "integrand"),
}
BROKEN: Final[Mapping[str, str]] = {
    "game_of_life_halting": "its scorer compares truth values of text, so that any answer that is not empty is right"
}
"""Data sets that are refused, and why (reasoning-gym 0.1.25)."""
_TUPLE_ROWS: Final = frozenset({"arc_agi", "rearc"})
"""Their scorers compare with tuples, which JSON had turned into lists."""


def needs_sandbox(dataset: str) -> bool:
    """Whether the data set's scorer evaluates text as Python, so that it belongs into an isolated process."""
    return dataset in EVALUATED or dataset in EVALUATED_ROWS


def _check_options(*, source: str = "tag", tag: str = "answer") -> None:
    check_source(source, tag)


@checked_by(_check_options)
def reasoning_gym(text: str, label: object, *, source: str = "tag", tag: str = "answer") -> float:
    """The score in [0, 1] that the data set itself gives to the answer.

    ``label`` is a table, or JSON text of one: ``{"dataset": name, "entry": {...}}`` with an entry as the data set
    made it, and ``"config"`` where the data set was made with settings that its scorer reads. The answer stands in the
    last ``<answer>`` by default; ``source`` and ``tag`` as in ``exact_match``. No answer, one of more than 20 000
    characters, or one that a scorer listed in ``EVALUATED`` may not see, is scored as None, which data sets give their
    lowest score. A scorer that fails on an answer, but not on the entry's own, means wrong: 0.0.
    Raises ValueError where the label names no data set or its entry cannot be scored. Needs reasoning-gym.
    """
    name, entry, scorer = _read_label(label)
    answer = pick(text, source, tag)
    if answer is not None and (len(answer) > MAX_ANSWER_CHARS or not may_be_evaluated(name, answer)):
        answer = None
    try:
        return _in_range(scorer.score_answer(answer, entry))
    except Exception as error:  # a scorer may fail in any way; whose fault it was, the entry's own answer tells
        _check_entry(name, scorer, entry, error)
        return 0.0


def may_be_evaluated(dataset: str, answer: str) -> bool:
    """Whether an answer may be given to the data set's scorer: always, but where that would evaluate it."""
    return dataset not in EVALUATED or _is_harmless(answer, EVALUATED[dataset][1])


def _is_harmless(text: str, allowed: re.Pattern[str]) -> bool:
    if not allowed.fullmatch(text) or _deepest(text) > 50:
        return False
    num_powers = text.count("**")
    if num_powers == 0:
        return True
    # Powers of powers could ask for numbers without end.
    return allowed is _ALGEBRA and num_powers == len(_POWER.findall(text)) and len(_OUTER_POWER.findall(text)) <= 4


def _deepest(text: str) -> int:
    level = deepest = 0
    for character in text:
        level += (character in "([") - (character in ")]")
        deepest = max(deepest, level)
    return deepest


def _read_label(label: object) -> tuple[str, dict[str, Any], Any]:
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"reasoning_gym got a label that is no JSON: {error}") from error
    if not isinstance(label, Mapping) or not isinstance(label.get("entry"), Mapping):
        raise ValueError('reasoning_gym needs {"dataset": name, "entry": {...}} as label')
    unknown = set(label) - {"dataset", "entry", "config"}
    if unknown:
        raise ValueError(f"reasoning_gym got {sorted(map(str, unknown))} in its label; it reads dataset, entry, config")
    name, entry = label.get("dataset"), dict(label["entry"])
    if not isinstance(name, str):
        raise ValueError(f"reasoning_gym got {name!r} as the name of a data set")
    _check_row(name, entry)
    if name in _TUPLE_ROWS:
        entry = {**entry, "metadata": _with_tuples(entry.get("metadata"))}
    return name, entry, _scorer(name, json.dumps(label.get("config") or {}, sort_keys=True))


def _with_tuples(metadata: object) -> object:
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("output"), (list, tuple)):
        return metadata
    return {**metadata, "output": tuple(tuple(row) for row in metadata["output"])}


def _check_row(name: str, entry: Mapping[str, Any]) -> None:
    """Raises ValueError where the scorer would evaluate a part of the row that is no arithmetic."""
    if name not in EVALUATED_ROWS:
        return
    part: Any = entry
    for key in _ROW_PARTS[name]:
        part = part.get(key) if isinstance(part, Mapping) else None
    if not isinstance(part, str) or not _is_harmless(part, EVALUATED_ROWS[name][1]):
        raise ValueError(
            f"the entry of {name} has {str(part)[:100]!r} at {'.'.join(_ROW_PARTS[name])}, "
            "which its scorer would evaluate and which is no plain expression"
        )


@lru_cache(maxsize=128)
def _scorer(name: str, config_json: str) -> Any:
    factory = optional_module("reasoning_gym.factory", "reasoning-gym")
    if name == "composite":
        raise ValueError("composite mixes data sets; give the name of the entry's own as dataset (its source_dataset)")
    if name in BROKEN:
        raise ValueError(f"the data set {name!r} cannot be used: {BROKEN[name]}")
    if name not in factory.DATASETS:
        raise ValueError(f"reasoning-gym has no data set {name!r}")
    try:
        return factory.create_dataset(name, **json.loads(config_json))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym cannot make {name!r} with the config {config_json}: {error}") from error


def _check_entry(name: str, scorer: Any, entry: Mapping[str, Any], cause: Exception) -> None:
    """Raises ValueError where not even the entry's own answer can be scored."""
    try:
        _in_range(scorer.score_answer(entry.get("answer"), entry))
    except Exception:
        raise ValueError(f"the entry of {name} cannot be scored: {type(cause).__name__}: {cause}") from cause


def _in_range(score: Any) -> float:
    value = float(score)
    if not 0.0 <= value <= 1.0:
        raise RewardError(f"the data set gave the score {value}; it should lie between 0 and 1")
    return value
