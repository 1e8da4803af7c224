"""A user's own choice of training rows: ``data.filter``."""

from __future__ import annotations

from collections.abc import Callable

from unison.core.errors import ConfigError, DataError
from unison.data.source import PromptRow, PromptSource, Subset
from unison.rewards.plugins import load_object


def apply_filter(source: PromptSource, path: str | None) -> tuple[PromptSource, list[str]]:
    """The rows that the function at ``path`` (``module:object``) is true for, and the ids of the others.

    Every row is read, a generated source's too. Raises ConfigError where there is no such function,
    DataError where it fails on a row, answers anything but true or false, or leaves no row.
    """
    if path is None:
        return source, []
    keep = load_object(path, kind="data.filter", error=ConfigError)
    if not callable(keep):
        raise ConfigError(f"data.filter={path!r} is a {type(keep).__name__}; name a function (row) -> bool")
    kept: list[int] = []
    left_out: list[str] = []
    for index in range(len(source)):
        row = source[index]
        if _ask(keep, row, path):
            kept.append(index)
        else:
            left_out.append(row.row_id)
    if not kept:
        raise DataError(f"data.filter={path!r} left none of the {len(source)} rows, {left_out[0]} the first of them")
    return Subset(source, kept), left_out


def _ask(keep: Callable[[PromptRow], object], row: PromptRow, path: str) -> bool:
    try:
        answer = keep(row)
    except (Exception, SystemExit) as error:
        raise DataError(f"data.filter={path!r} failed on {row.row_id}: {type(error).__name__}: {error}") from error
    # numpy's booleans say True and False in other words.
    answer = answer.item() if type(answer).__module__ == "numpy" and hasattr(answer, "item") else answer
    if not isinstance(answer, bool):
        raise DataError(f"data.filter={path!r} answered {answer!r:.80} for {row.row_id}; it must be true or false")
    return answer
