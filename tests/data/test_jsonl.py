from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.data.jsonl import read_jsonl
from unison.data.rows import Keys
from unison.data.source import load_source

QUIRKS = (
    '\ufeff{"prompt":"one\u2028line","label":"1"}\r\n'
    "\n"
    '{"prompt":"caf\\u00e9 \u0085 \\ud83c\\udf0d","label":2}\n'
    '{"prompt":"no label"}\n'
    '{"prompt":null,"label":"3"}\n'
    '{"prompt":"last","label":"4"}'
)


def write(tmp_path: Path, data: str | bytes) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def problem(tmp_path: Path, line: str | bytes) -> str:
    """What is told of one bad line between two good ones."""
    good = b'{"prompt":"a","label":"1"}'
    source = read_jsonl(
        write(tmp_path, b"\n".join([good, line if isinstance(line, bytes) else line.encode(), good])),
        on_bad_row="skip",
    )
    assert len(source) == 2
    (told,) = source.skipped
    prefix = f"{tmp_path / 'rows.jsonl'}:2: "
    assert told.startswith(prefix)
    return told.removeprefix(prefix)


def test_unusual_but_legal_characters_are_read_and_bad_rows_named(tmp_path: Path) -> None:
    source = read_jsonl(write(tmp_path, QUIRKS), on_bad_row="skip")
    rows = [source[i] for i in range(len(source))]
    assert [row.prompt for row in rows] == ["one\u2028line", "café \u0085 🌍", "last"]
    assert [row.label for row in rows] == ["1", 2, "4"]
    assert [row.row_id for row in rows] == ["rows.jsonl:1", "rows.jsonl:3", "rows.jsonl:6"]
    assert ["rows.jsonl:4: " in source.skipped[0], "rows.jsonl:5: " in source.skipped[1]] == [True, True]
    assert len(source.skipped) == 2


def test_bad_rows_stop_the_run_by_default(tmp_path: Path) -> None:
    with pytest.raises(DataError) as told:
        read_jsonl(write(tmp_path, QUIRKS))
    message = str(told.value)
    assert "2 bad rows" in message
    assert "rows.jsonl:4: no label: the key 'label' is missing" in message
    assert "rows.jsonl:5: no prompt: 'prompt' is null" in message
    assert "on_bad_row" in message


def test_the_first_ten_bad_rows_and_their_number_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError) as told:
        read_jsonl(write(tmp_path, "{}\n" * 25))
    assert "25 bad rows" in str(told.value)
    assert str(told.value).count("rows.jsonl:") == 10
    assert "15 more" in str(told.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{prompt: 1}", "not JSON: .* column 2"),
        ('{"prompt":"a","label":"1"} x', "not JSON"),
        ('["prompt"]', "not an object but a list"),
        (b'{"prompt":"\xff","label":"1"}', "not UTF-8: byte 0xff at column 12"),
        ('{"prompt":"\\ud83c","label":"1"}', "surrogate"),
        ('{"prompt":"a","label":NaN}', "NaN"),
        ('{"prompt":"a","prompt":"b","label":"1"}', "'prompt' occurs twice"),
        ('{"promt":"a","label":"1"}', "no prompt: .*did you mean promt"),
        ('{"prompt":"a","label":null}', "no label: 'label' is null"),
        ('{"prompt":3,"label":"1"}', "the prompt is a int"),
        ('{"prompt":"","label":"1"}', "the prompt is empty"),
        ('{"prompt":[],"label":"1"}', "empty list of messages"),
        ('{"prompt":["a"],"label":"1"}', "message 0 is a str"),
        ('{"prompt":[{"role":"usr","content":"a"}],"label":"1"}', "role 'usr'.*did you mean user"),
        ('{"prompt":[{"role":["user"],"content":"a"}],"label":"1"}', "the role"),
        ('{"prompt":[{"role":"user","content":"a"},{"role":"user"}],"label":"1"}', "message 1 has no usable content"),
        ('{"prompt":[{"role":"user","content":[{"type":"image"}]}],"label":"1"}', "content"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_each_kind_of_bad_row_is_told(tmp_path: Path, line: str | bytes, told: str) -> None:
    import re

    assert re.search(told, problem(tmp_path, line))


def test_messages_and_further_keys_are_kept(tmp_path: Path) -> None:
    line = (
        '{"q":[{"role":"system","content":[{"type":"text","text":"s"}]},{"role":"assistant","content":null,'
        '"tool_calls":[{"id":1}]}],"a":[1,2],"level":3}'
    )
    source = read_jsonl(write(tmp_path, line), Keys(prompt="q", label="a"))
    row = source[0]
    assert isinstance(row.prompt, list)
    assert [message["role"] for message in row.prompt] == ["system", "assistant"]
    assert row.label == [1, 2]
    assert row.metadata == {"level": 3}
    assert row.sample_metadata() == {"level": 3, "row_id": "rows.jsonl:1", "prompt": row.prompt, "label": [1, 2]}


def test_without_label_key_no_label_is_asked_for(tmp_path: Path) -> None:
    source = read_jsonl(write(tmp_path, '{"prompt":"a"}'), Keys(label=None))
    assert source[0].label is None


@pytest.mark.parametrize("data", ["", "\n \n", "\ufeff"])
def test_an_empty_file_is_an_error(tmp_path: Path, data: str) -> None:
    with pytest.raises(DataError, match="no usable row"):
        read_jsonl(write(tmp_path, data))


def test_a_file_of_bad_rows_alone_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no usable row(.|\n)*rows.jsonl:1: "):
        read_jsonl(write(tmp_path, "x\n"), on_bad_row="skip")


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent"):
        read_jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match=r"is a folder, and data\.source is jsonl: name a file"):
        read_jsonl(tmp_path)
    path = write(tmp_path, "{}")
    with pytest.raises(DataError, match=f"name one of its files, like {path}"):
        read_jsonl(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.parquet", b"PAR1\x15\x04", 'a.parquet looks like Parquet: set data.source = "parquet"'),
        ("a.jsonl", b"PAR1\x15\x04", 'a.jsonl looks like Parquet: set data.source = "parquet"'),
        ("a.jsonl", gzip.compress(b'{"prompt":"a"}', mtime=0), "looks like gzip: give it a name that ends in .gz"),
        ("f/state.json", b"{}", 'f looks like a data set that was saved: set data.source = "datasets"'),
        ("f/dataset_info.json", b"{}", 'set data.source = "datasets"'),
        ("f/dataset_dict.json", b"{}", 'set data.source = "datasets"'),
        ("f/train/0.parquet", b"PAR1", 'f is a folder with Parquet files: set data.source = "parquet"'),
    ],
)
def test_what_is_no_jsonl_is_told_with_its_source(tmp_path: Path, name: str, data: bytes, told: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    with pytest.raises(DataError, match=told):
        load_source(DataConfig(train=str(tmp_path / name.split("/")[0])), "train", 0)


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n", ""])
def test_the_column_of_a_cut_line_is_the_one_after_its_end(tmp_path: Path, end: str) -> None:
    line = '{"prompt":"é","label":"1"'
    with pytest.raises(DataError) as told:
        read_jsonl(write(tmp_path, f"{line}{end}"))
    assert f"not JSON: Expecting ',' delimiter at column {len(line) + 1}\n" in str(told.value)


def test_a_source_is_opened_as_configured(tmp_path: Path) -> None:
    config = DataConfig(train=str(write(tmp_path, '{"p":"a"}')), prompt_key="p", label_key=None)
    source = load_source(config, "train", seed=0)
    assert (len(source), source[0].prompt) == (1, "a")
    with pytest.raises(ConfigError, match=r"data\.eval is not set"):
        load_source(config, "eval", seed=0)


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    config = DataConfig(train=str(write(tmp_path, '{"prompt":"a","label":1}')), options={"shots": 1})
    with pytest.raises(ConfigError, match=r"data\.options=.* has no effect"):
        load_source(config, "train", seed=0)
