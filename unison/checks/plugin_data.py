"""Sources of prompts, and filters of rows and of groups."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from unison.checks.plugin_report import Called, Report, call, frozen_copy
from unison.checks.plugin_reward import made_up_samples
from unison.config.schema import DataConfig
from unison.core.records import SampleStatus
from unison.data.source import PromptRow, PromptSource, Split

MOST_ROWS: Final = 1000
_SEED: Final = 17
_SPLITS: Final[tuple[Split, ...]] = ("train", "eval")


def check_source(report: Report, path: str, found: Any, options: Mapping[str, Any]) -> None:
    """Opened for both splits: rows of the right type, stable, with ids and labels that a checkpoint can hold."""
    if not callable(found):
        report.problem(f"it is a {type(found).__name__}", "name a function (config, split, seed) -> source")
        return
    config = DataConfig(source=path, options=dict(options))
    ids: dict[str, set[str]] = {}
    for split in _SPLITS:
        rows = _check_split(report, found, config, split)
        if rows is not None:
            ids[split] = {row.row_id for row in rows}
    both = ids.get("train", set()) & ids.get("eval", set())
    if both:
        report.note(f"{len(both)} rows are in both splits, {min(both)!r} for one: evaluation would measure memory")


def _check_split(report: Report, factory: Any, config: DataConfig, split: Split) -> list[PromptRow] | None:
    called = call(factory, config, split, _SEED)
    if called.error is not None:
        report.problem(
            f"{split}: opening it raised {called.error}",
            "open both splits, as (config, split, seed), and take settings from config.options (--option NAME=VALUE)",
        )
        return None
    source = called.value
    if not isinstance(source, PromptSource):
        report.problem(
            f"{split}: it returned a {type(source).__name__}", "return an object with len() and rows by index"
        )
        return None
    read = call(_read, source)
    if read.error is not None:
        report.problem(f"{split}: reading its rows raised {read.error}", "give every index from 0 to len() - 1 a row")
        return None
    rows: list[Any] = read.value
    if not report.expect(bool(rows), f"{split}: {len(source)} rows", f"{split}: it has no rows", "return at least one"):
        return None
    if not all(_check_row(report, split, index, row) for index, row in enumerate(rows)):
        return None
    _check_ids(report, split, rows)
    again, other = call(_read, source), call(factory, config, split, _SEED)
    reread = call(_read, other.value) if other.error is None else other
    _check_same(report, split, "read twice", rows, again)
    _check_same(report, split, "opened twice with one seed", rows, reread)
    return rows


def _read(source: PromptSource) -> list[Any]:
    return [source[index] for index in range(min(len(source), MOST_ROWS))]


def _check_row(report: Report, split: str, index: int, row: object) -> bool:
    where = f"{split}: row {index}"
    if not isinstance(row, PromptRow):
        report.problem(f"{where} is a {type(row).__name__}", "return unison.data.source.PromptRow objects")
        return False
    if not isinstance(row.row_id, str) or not row.row_id:
        report.problem(f"{where} has the row_id {row.row_id!r}", "give each row a text of its own as row_id")
        return False
    if not _is_prompt(row.prompt):
        report.problem(
            f"{where} has a prompt that is neither text nor messages: {str(row.prompt)[:80]!r}",
            'use a text that is not empty, or a list of {"role": ..., "content": ...}',
        )
        return False
    try:
        json.dumps([row.label, dict(row.metadata)], allow_nan=False)
    except (TypeError, ValueError) as error:
        report.problem(
            f"{where} has a label or metadata that JSON cannot hold: {error}", "use texts, numbers, lists and tables"
        )
        return False
    return True


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn for turn in prompt)
    )


def _check_ids(report: Report, split: str, rows: list[PromptRow]) -> None:
    twice = next((name for name, count in Counter(row.row_id for row in rows).items() if count > 1), None)
    report.expect(
        twice is None,
        f"{split}: every row has an id of its own, a prompt, and plain data",
        f"{split}: two rows have the row_id {twice!r}",
        "row_ids name prompts over epochs and seed their noise; make them unique, by the row's number if need be",
    )


def _check_same(report: Report, split: str, how: str, rows: list[PromptRow], again: Called) -> None:
    report.expect(
        again.error is None and again.value == rows,
        f"{split}: {how}, the rows are the same",
        f"{split}: {how}, the rows differ{f' ({again.error})' if again.error else ''}",
        "let rows depend on their index and the seed alone; a run that is resumed reads them again",
    )


def check_filter(report: Report, path: str, found: Any, options: Mapping[str, Any]) -> None:
    """A filter of rows (data.filter) or of groups (rollout.filter), whichever it can be called as."""
    if options:
        report.problem("filters take no options", "write them into the function, or make it with a function that does")
    if not callable(found):
        report.problem(f"it is a {type(found).__name__}", "name a function (row) -> bool or (group) -> bool or text")
        return
    rows = [
        PromptRow("made-up:1", "5+3=", "8", {"level": 1}),
        PromptRow("made-up:2", [{"role": "user", "content": "What is 5+3?"}]),
    ]
    samples = made_up_samples()
    for index, sample in enumerate(samples):
        sample.reward = float(index % 2)
    alike = [replace(sample, reward=1.0) for sample in samples]
    broken = [replace(sample, reward=None, status=SampleStatus.UNSCORABLE) for sample in samples[:2]]
    if _takes_rows(found, rows):
        report.note("it takes a row: for data.filter")
        _check_verdicts(report, found, {"a row": rows[0], "a row of messages, without label": rows[1]}, texts=False)
        return
    report.note("it takes a group: for rollout.filter")
    groups = {"a group with contrast": samples, "a group scored alike": alike, "a group nobody could score": broken}
    _check_verdicts(report, found, groups, texts=True)


def _takes_rows(found: Any, rows: list[PromptRow]) -> bool:
    """By the name of its parameter where that tells, else by what it can be called with."""
    first = next(iter(inspect.signature(found).parameters), "")
    if first in ("row", "group", "samples"):
        return first == "row"
    return any(call(found, frozen_copy(row)).error is None for row in rows)


def _check_verdicts(report: Report, found: Any, cases: Mapping[str, Any], *, texts: bool) -> None:
    wanted = "true to keep it; false or a text that says why to discard it" if texts else "true to keep it, else false"
    for name, value in cases.items():
        given = frozen_copy(value)
        called, again = call(found, given), call(found, given)
        if called.error is not None:
            report.problem(f"{name}: it raised {called.error}", f"return {wanted}")
            continue
        # A group's filter may answer with what numpy's comparisons give.
        verdict = bool(called.value) if texts and isinstance(called.value, np.bool_) else called.value
        if not isinstance(verdict, bool) and not (texts and isinstance(verdict, str) and verdict.strip()):
            report.problem(f"{name}: it returned {verdict!r}", f"return {wanted}")
            continue
        report.ok(
            f"{name}: {'kept' if verdict is True else 'left out' if verdict is False else f'left out: {verdict}'}"
        )
        if again.value != verdict:
            report.problem(f"{name}: asked twice it said {verdict!r}, then {again.value!r}", "draw no random numbers")
        if repr(given) != repr(value):
            report.problem(f"{name}: it changed what it was given", "only read from it")
