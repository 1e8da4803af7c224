"""Keys, layouts and slices, through JSONL files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.data.source import PromptRow, load_source

CHAT = [{"role": "user", "content": "hi"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 7},
}


def rows(tmp_path: Path, records: list[dict[str, Any]], cut: str = "", **settings: Any) -> list[PromptRow]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = load_source(DataConfig(train=f"{path}{cut}", **settings), "train", 0)
    return [source[i] for i in range(len(source))]


def test_verls_layout_keeps_what_its_rewards_are_given(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, [VERL], layout="verl")
    assert (row.prompt, row.label) == (CHAT, "42")
    assert row.metadata == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule"},
        "extra_info": {"split": "train", "index": 7},
    }


def test_slimes_layout_has_its_names_and_no_label(tmp_path: Path) -> None:
    records = [{"input": "a", "label": "1", "metadata": {"rm_type": "math"}, "more": 3}, {"input": "b"}]
    first, second = rows(tmp_path, records, layout="slime")
    assert (first.prompt, first.label, first.metadata) == ("a", None, {"rm_type": "math"})
    assert (second.prompt, second.metadata) == ("b", {})
    (named, *_) = rows(tmp_path, records[:1], layout="slime", label_key="label", metadata_key=None)
    assert (named.label, named.metadata) == ("1", {"metadata": {"rm_type": "math"}, "more": 3})
    with pytest.raises(DataError, match="holds tools, which are not rendered"):
        rows(tmp_path, [{"input": "a", "tools": [{"name": "f"}]}], layout="slime")


def test_rows_of_another_layout_are_told_once(tmp_path: Path) -> None:
    for settings in ({}, {"on_bad_row": "skip"}):
        with pytest.raises(DataError) as told:
            rows(tmp_path, [VERL] * 3, **settings)
        assert str(told.value).count('They look like rows of verl: set data.layout = "verl".') == 1
        assert "Mend them" not in str(told.value)
    with pytest.raises(DataError) as told:
        rows(tmp_path, [{"input": "a", "label": "1", "metadata": {}}] * 2)
    assert str(told.value).count('rows of slime: set data.layout = "slime" and data.label_key = "label".') == 1
    for record in ({"input": "a", "output": "b"}, {"question": "a", "label": "b"}):
        with pytest.raises(DataError, match="Mend them"):
            rows(tmp_path, [record])
    with pytest.raises(DataError, match="Mend them"):
        rows(tmp_path, [{**VERL, "reward_model": {}}], layout="verl")


def test_a_key_given_takes_the_place_of_the_layouts(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, [{**VERL, "answer": 5}], layout="verl", label_key="answer", metadata_key="extra_info")
    assert (row.label, row.metadata) == (5, {"split": "train", "index": 7})


def test_dots_go_into_objects_unless_the_key_is_there_as_written(tmp_path: Path) -> None:
    nested = {"a": {"b": {"c": "deep", "d": 1}, "e": 2}, "label": 0}
    (row,) = rows(tmp_path, [nested], prompt_key="a.b.c")
    assert (row.prompt, row.metadata) == ("deep", {"a": {"b": {"d": 1}, "e": 2}})
    (row,) = rows(tmp_path, [{**nested, "a.b.c": "flat"}], prompt_key="a.b.c")
    assert (row.prompt, row.metadata["a"]) == ("flat", nested["a"])
    (row,) = rows(tmp_path, [{"a": {"b": "alone"}, "label": 0}], prompt_key="a.b")
    assert row.metadata == {}


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"prompt": "a", "label": 1}, "no metadata: the key 'info' is missing"),
        ({"prompt": "a", "label": 1, "info": [1]}, "metadata 'info' is a list"),
        ({"prompt": "a", "label": 1, "info": {"row_id": 3}}, "the key 'row_id' beside the mapped ones"),
    ],
)
def test_unusable_metadata_make_a_bad_row(tmp_path: Path, record: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        rows(tmp_path, [record], metadata_key="info")


def test_null_metadata_are_none(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, [{"prompt": "a", "label": 1, "info": None, "x": 2}], metadata_key="info")
    assert row.metadata == {}


def test_slices_count_usable_rows_and_keep_line_numbers(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"prompt": str(i), "label": i} for i in range(6)]
    records[2] = {"label": "no prompt"}
    found = rows(tmp_path, records, "@[1:-1]", on_bad_row="skip")
    assert [row.row_id for row in found] == ["rows.jsonl:2", "rows.jsonl:4", "rows.jsonl:5"]
    with pytest.raises(DataError, match=r"5 usable rows, so that the slice \[0:6\] reaches beyond"):
        rows(tmp_path, records, "@[0:6]", on_bad_row="skip")
    # A bad row that the slice does not reach is nobody's business; one on the way is.
    assert len(rows(tmp_path, records, "@[0:2]")) == 2
    with pytest.raises(DataError, match="1 bad row"):
        rows(tmp_path, records, "@[0:3]")


def test_compressed_files_are_read_and_broken_ones_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    text = b'{"prompt":"one\xe2\x80\xa8line","label":"1"}\r\n' * 2
    path.write_bytes(gzip.compress(text))
    source = load_source(DataConfig(train=str(path)), "train", 0)
    assert [source[i].row_id for i in (0, 1)] == ["rows.jsonl.gz:1", "rows.jsonl.gz:2"]
    for damaged in (gzip.compress(text)[:-9], text, b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"cannot be read|no usable row"):
            load_source(DataConfig(train=str(path)), "train", 0)


def test_a_split_that_is_not_named_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.eval is not set"):
        load_source(DataConfig(train="x"), "eval", 0)
