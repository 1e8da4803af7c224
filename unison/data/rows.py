"""From one record of a file to a prompt row: which keys mean what, and what makes a row bad."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from unison.config.names import did_you_mean
from unison.config.schema import DataConfig, Layout
from unison.core.errors import DataError
from unison.data.sections import section_of
from unison.data.slices import ALL, Cut, take
from unison.data.source import PromptRow

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_RESERVED: Final = ("prompt", "label", "row_id")
_MAX_REPORTED: Final = 10


class BadRow(Exception):
    """What is wrong with one row."""


class _MissingKey(BadRow):
    """A row without its prompt or label: perhaps one of another layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Where a record's parts are. Dots go into nested objects, but a key that is there as written comes first.

    ``layout`` and ``section`` are what the keys come from, for errors.
    ``metadata`` None: every key that is not mapped. Otherwise the entries of that object alone; a
    record may lack it where ``metadata_required`` is false. ``tools`` is a key that must hold nothing.
    """

    prompt: str = "prompt"
    label: str | None = "label"
    metadata: str | None = None
    metadata_required: bool = True
    tools: str | None = None
    layout: Layout = "unison"
    section: str = "data"


LAYOUTS: Final[Mapping[Layout, Keys]] = {
    "unison": Keys(),
    "verl": Keys(label="reward_model.ground_truth", layout="verl"),
    "slime": Keys(
        prompt="input", label=None, metadata="metadata", metadata_required=False, tools="tools", layout="slime"
    ),
}


def key_map(config: DataConfig) -> Keys:
    """The layout's keys, and in their place those given explicitly (an empty one is not given)."""
    keys = replace(LAYOUTS[config.layout], section=section_of(config))
    if config.prompt_key:
        keys = replace(keys, prompt=config.prompt_key)
    if config.label_key != "":
        keys = replace(keys, label=config.label_key)
    if config.metadata_key != "":
        keys = replace(keys, metadata=config.metadata_key, metadata_required=True)
    return keys


class RowList:
    """Rows held in memory; ``skipped`` tells of each row left out, as ``file:row: what``."""

    def __init__(self, rows: list[PromptRow], skipped: list[str]) -> None:
        self._rows = rows
        self.skipped = skipped

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> PromptRow:
        return self._rows[index]


Place = tuple[str, str]
"""Of one record: its row id, and what people are shown."""


def collect_rows(
    records: Iterable[tuple[Place, dict[str, Any] | BadRow]],
    keys: Keys,
    *,
    cut: Cut = ALL,
    on_bad_row: str = "fail",
    where: str,
) -> RowList:
    """The usable rows of a source's records, or a slice of them.

    Records are read no further than the slice needs. Raises DataError where a bad row is among those
    read (unless bad rows are to be skipped), and where no usable row is left.
    """
    skipped: list[str] = []
    hint: str | None = None

    def usable() -> Iterator[PromptRow]:
        nonlocal hint
        for (row_id, place), record in records:
            try:
                if isinstance(record, BadRow):
                    raise record
                yield read_record(record, row_id, keys)
            except BadRow as error:
                skipped.append(f"{place}: {error}")
                if isinstance(error, _MissingKey) and not isinstance(record, BadRow):
                    hint = hint or other_layout(record, keys)

    def check_bad() -> None:
        if skipped and on_bad_row == "fail":
            raise DataError(_report(where, skipped, hint))

    try:
        rows = take(usable(), cut, where)
    except DataError:
        check_bad()
        raise
    check_bad()
    if not rows:
        raise DataError(f"{where} holds no usable row" + (f": {_report(where, skipped, hint)}" * bool(skipped)))
    return RowList(rows, skipped)


def other_layout(record: Iterable[str], keys: Keys) -> str | None:
    """What to set where a record without our keys has those of another system, by the names in it."""
    names = set(record)
    if keys.layout != "unison":
        return None
    if "reward_model" in names:
        return f'They look like rows of verl: set {keys.section}.layout = "verl".'
    if "input" in names and keys.prompt not in names and names & {"label", "metadata", "tools"}:
        label = f' and {keys.section}.label_key = "label"' if "label" in names else ""
        return f'They look like rows of slime: set {keys.section}.layout = "slime"{label}.'
    return None


def read_record(record: dict[str, Any], row_id: str, keys: Keys) -> PromptRow:
    """One row. Raises BadRow saying what is wrong with the record."""
    prompt_path, prompt = _required(record, keys.prompt, "prompt", keys.section)
    _check_prompt(prompt)
    label_path, label = ((), None) if keys.label is None else _required(record, keys.label, "label", keys.section)
    if keys.tools is not None and record.get(keys.tools):
        raise BadRow(f"the key {keys.tools!r} holds tools, which are not rendered into prompts; take them out")
    if keys.metadata is None:
        metadata = _without(_without(record, prompt_path), label_path)
    else:
        metadata = _metadata(record, keys.metadata, keys.metadata_required)
    taken = [name for name in _RESERVED if name in metadata]
    if taken:
        raise BadRow(f"the key {taken[0]!r} beside the mapped ones: rewards find their own {taken[0]} there; rename it")
    return PromptRow(row_id, prompt, label, metadata)


def _find(record: dict[str, Any], key: str) -> tuple[str, ...] | None:
    """The path of a key into the record, or None."""
    if key in record:
        return (key,)
    parts = tuple(key.split("."))
    place: Any = record
    for part in parts:
        if not isinstance(place, dict) or part not in place:
            return None
        place = place[part]
    return parts


def _get(record: dict[str, Any], path: tuple[str, ...]) -> Any:
    place: Any = record
    for part in path:
        place = place[part]
    return place


def _required(record: dict[str, Any], key: str, what: str, section: str) -> tuple[tuple[str, ...], Any]:
    path = _find(record, key)
    if path is None:
        there = ", ".join(list(record)[:8]) or "no keys"
        hint = did_you_mean(key, record) or f"; {section}.{what}_key names it, and the row has {there}"
        raise _MissingKey(f"no {what}: the key {key!r} is missing{hint}")
    value = _get(record, path)
    if value is None:
        raise BadRow(f"no {what}: {key!r} is null")
    return path, value


def _metadata(record: dict[str, Any], key: str, required: bool) -> dict[str, Any]:
    path = _find(record, key)
    if path is None:
        if required:
            raise BadRow(f"no metadata: the key {key!r} is missing{did_you_mean(key, record)}")
        return {}
    value = _get(record, path)
    if value is not None and not isinstance(value, dict):
        raise BadRow(f"the metadata {key!r} is a {type(value).__name__}; it must be an object")
    return dict(value or {})


def _without(record: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """A copy without what the path leads to; objects it empties are left out as well."""
    if not path:
        return record
    first, *rest = path
    inner = _without(record[first], tuple(rest)) if rest else None
    return {key: inner if key == first else item for key, item in record.items() if key != first or inner}


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise BadRow("the prompt is empty")
        return
    if not isinstance(prompt, list):
        raise BadRow(f"the prompt is a {type(prompt).__name__}; it must be a string or a list of messages")
    if not prompt:
        raise BadRow("the prompt is an empty list of messages")
    for index, message in enumerate(prompt):
        _check_message(message, f"message {index}")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise BadRow(f"{where} is a {type(message).__name__}, not an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        raise BadRow(f"{where} has the role {role!r}; it must be one of {', '.join(ROLES)}{hint}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if not isinstance(content, str) and not (isinstance(content, list) and content and all(map(_is_text, content))):
        raise BadRow(f"{where} has no usable content; it must be a string or a list of text parts")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _report(where: str, problems: list[str], hint: str | None) -> str:
    shown = problems[:_MAX_REPORTED]
    more = len(problems) - len(shown)
    lines = [f"{where} has {len(problems)} bad row{'s' * (len(problems) != 1)}:", *shown]
    if more:
        lines.append(f"... and {more} more")
    return "\n".join([*lines, hint or 'Mend them, or set data.on_bad_row to "skip".'])
