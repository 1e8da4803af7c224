"""Did-you-mean: from a name nobody knows to the one that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Final

from unison.config.fields import Field, fields, named_tables, sections
from unison.config.foreign import FOREIGN, Foreign, find_foreign
from unison.config.systems.common import COMMON

MOVED: Final[dict[str, str]] = {}
"""Old dotted key -> its present dotted key, so that an old file is told where its key went."""

_MOST_SUGGESTIONS: Final = 3
_LEAST_PREFIX: Final = 3


def edit_distance(left: str, right: str) -> int:
    """Letters to insert, delete, change or swap with their neighbour to get from one to the other."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, row, above = row, [i], before
        for j, b in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]


def one_letter_off(left: str, right: str) -> bool:
    return abs(len(left) - len(right)) <= 1 and edit_distance(left, right) == 1


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """Up to three candidates like ``word``: those one letter away, else those it begins, else alike ones."""
    pool = list(candidates)
    close = [name for name in pool if one_letter_off(word, name)]
    close = close or [name for name in pool if len(word) >= _LEAST_PREFIX and name.startswith(word)]
    return close[:_MOST_SUGGESTIONS] or difflib.get_close_matches(word, pool, _MOST_SUGGESTIONS, cutoff)


def did_you_mean(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """``; did you mean a or b?``, or nothing: to be put behind the complaint about ``word``."""
    found = nearest(word, candidates, cutoff=cutoff)
    return f"; did you mean {join_or(found)}?" if found else ""


def join_or(names: Sequence[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def explain_unknown(path: str, *, prefix: str = "", other_names: Sequence[str] = ()) -> str:
    """The end of a sentence about the unknown dotted key ``path``, naming what was probably meant.

    ``prefix`` is put before each suggested name (``--`` for flags); ``other_names`` are names that
    are not configuration keys but may have been meant, such as a command's own flags.
    """
    entry = _in_named_table(path)
    if entry is not None:
        return entry
    head, rest = _split_option(path)
    if head in MOVED:
        return f"has moved: it is {prefix}{MOVED[head]}{rest} now"
    foreign = find_foreign(path)
    if foreign:
        return f"is unknown; {'; '.join(_called_here(foreign, prefix))}"
    if _takes_options(head):
        return f"is unknown; an option of {head} has one plain name, like {prefix}{head}.name"
    names = other_names if "." not in head else ()
    for lead, found in (
        ("did you mean", _one_letter_off(head, names)),
        ("that is", _same_key_elsewhere(head)),
        ("did you mean", _synonyms(head)),
        ("did you mean", _alike(head, names)),
    ):
        if found:
            shown = [prefix + name + (rest if _takes_options(name) else "") for name in found]
            return f"is unknown; {lead} {join_or(shown)}{'?' if lead == 'did you mean' else ''}"
    section = head.partition(".")[0]
    if section in sections():
        keys = [field.key for field in fields().values() if field.table == section]
        return f"is unknown; the keys of [{section}] are {', '.join(keys)}"
    return f"is unknown; the sections are {', '.join(sections())}"


def _in_named_table(path: str) -> str | None:
    """What to say of an unknown key under ``data.mix`` and its like."""
    parts = path.split(".")
    table = ".".join(parts[:2])
    struct = named_tables().get(table)
    if struct is None:
        return None
    keys = struct.__struct_fields__
    if len(parts) <= 3:
        return f"is unknown; the keys of {table} are {table}.NAME.KEY, with a name of yours and {join_or(keys)} as KEY"
    return f"is unknown{did_you_mean(parts[3], keys)}; the keys of [{'.'.join(parts[:3])}] are {', '.join(keys)}"


def _split_option(path: str) -> tuple[str, str]:
    """``data.options.max`` -> (``data.options``, ``.max``)."""
    section, dot, key = path.partition(".")
    key, more, option = key.partition(".")
    return section + dot + key, more + option


def _takes_options(path: str) -> bool:
    field: Field | None = fields().get(path)
    return field is not None and field.kind == "table"


def _one_letter_off(path: str, other_names: Sequence[str]) -> list[str]:
    """Names that differ by one letter, or only by case and dashes."""
    plain = _normalised(path)
    pool = [*_plain_keys(), *other_names]
    same = [name for name in pool if _normalised(name) == plain]
    return (same or [name for name in pool if one_letter_off(path, name)])[:_MOST_SUGGESTIONS]


def _same_key_elsewhere(path: str) -> list[str]:
    key = _normalised(path.rpartition(".")[2])
    found = [name for name, field in fields().items() if field.key == key and field.named is None]
    return found[:_MOST_SUGGESTIONS]


@cache
def synonyms() -> Mapping[str, tuple[str, ...]]:
    """Other words for the last part of a key -> our dotted keys: common ones, and the plain names of other systems."""
    own = {field.key for field in fields().values()}
    found = dict(COMMON)
    for entry in FOREIGN:
        name = entry.normalised
        if "." not in name and name not in own and name not in COMMON:
            ours = [key for key in entry.ours if key in fields() and "*" not in key]
            found[name] = tuple(dict.fromkeys([*found.get(name, ()), *ours]))
    return MappingProxyType({name: ours for name, ours in found.items() if ours})


def _called_here(entries: Sequence[Foreign], prefix: str) -> list[str]:
    """What a name of other systems is called here, systems that agree in one clause."""
    systems: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for entry in entries:
        systems.setdefault((entry.ours, entry.note), []).append(entry.system)
    clauses: list[str] = []
    for (ours, note), names in systems.items():
        keys = join_or([prefix + key.replace(".*.", ".NAME.") for key in ours]) if ours else ""
        said = f"that is called {keys} here ({', '.join(names)})" if keys else f"{', '.join(names)} has it, we do not"
        clauses.append(f"{said}: {note}" if note else said)
    return clauses


def _synonyms(path: str) -> list[str]:
    section, _, key = _normalised(path).rpartition(".")
    known = synonyms().get(key, ())
    return [name for name in known if name.startswith(f"{section}.")] or list(known)


def _alike(path: str, other_names: Sequence[str]) -> list[str]:
    found = difflib.get_close_matches(path, [*_plain_keys(), *other_names], _MOST_SUGGESTIONS, 0.75)
    if found:
        return found
    by_key: dict[str, list[str]] = {}
    for name, field in fields().items():
        if field.named is None:
            by_key.setdefault(field.key, []).append(name)
    keys = difflib.get_close_matches(path.rpartition(".")[2], by_key, _MOST_SUGGESTIONS, 0.7)
    return [name for key in keys for name in by_key[key]][:_MOST_SUGGESTIONS]


def _plain_keys() -> list[str]:
    return [name for name, field in fields().items() if field.named is None]


def _normalised(name: str) -> str:
    return name.lower().replace("-", "_")
