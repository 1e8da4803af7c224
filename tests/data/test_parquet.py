from __future__ import annotations

import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.data.parquet import read_parquet
from unison.data.rows import Keys
from unison.data.source import PromptRow, load_source

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path: Path, rows: list[dict[str, Any]], schema: Any = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, **options)
    return path


def numbered(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "label": i} for i in range(start, stop)]


def read(name: object, **settings: Any) -> list[PromptRow]:
    source = load_source(DataConfig(source="parquet", train=str(name), **settings), "train", 0)
    return [source[i] for i in range(len(source))]


def test_a_file_of_another_layout_is_told(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "data_source": "x", "reward_model": {"style": "rule", "ground_truth": "1"}}] * 3
    path = write(tmp_path / "a.parquet", rows)
    with pytest.raises(DataError) as told:
        read(path)
    assert str(told.value).count('set data.layout = "verl"') == 1
    assert [row.label for row in read(path, layout="verl")] == ["1"] * 3
    path = write(tmp_path / "b.parquet", [{"input": "a", "metadata": {"b": 1}}])
    with pytest.raises(DataError, match=r"no column 'prompt'.*They look like rows of slime: set data\.layout"):
        read(path)


def test_a_file_of_many_row_groups_is_read_in_order(tmp_path: Path) -> None:
    found = read(write(tmp_path / "a.parquet", numbered(0, 700), row_group_size=13))
    assert [(row.row_id, row.prompt, row.label) for row in found] == [
        (f"a.parquet:{i}", f"p{i}", i) for i in range(700)
    ]
    assert [row.label for row in read(f"{tmp_path / 'a.parquet'}@[-3:-1]")] == [697, 698]


def test_folders_and_globs_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "data/b.parquet", numbered(2, 4))
    write(tmp_path / "data/a/z.parquet", numbered(0, 2))
    (tmp_path / "data/readme.txt").write_text("x")
    expected = ["a/z.parquet:0", "a/z.parquet:1", "b.parquet:0", "b.parquet:1"]
    for name in (tmp_path / "data", tmp_path / "data/**/*.parquet"):
        assert [row.row_id for row in read(name)] == expected
    with pytest.raises(DataError, match="no file matches"):
        read(tmp_path / "data/*.pq")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no \*\.parquet file"):
        read(tmp_path / "empty")


def test_verls_files_are_read(tmp_path: Path) -> None:
    """Lists of messages come as numpy arrays in other readers, and structs give each message every key."""
    messages = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "q", "name": "n"}]
    path = write(
        tmp_path / "train.parquet",
        [
            {
                "data_source": "d",
                "prompt": messages,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "4"},
                "extra_info": {"index": 0, "tools": None},
            }
        ],
    )
    (row,) = read(path, layout="verl")
    assert (row.prompt, row.label) == (messages, "4")
    assert set(row.metadata) == {"data_source", "ability", "reward_model", "extra_info"}


def test_values_become_json(tmp_path: Path) -> None:
    schema = pa.schema(
        {
            "prompt": pa.large_string(),
            "label": pa.decimal128(10, 2),
            "when": pa.timestamp("us", tz="UTC"),
            "day": pa.date32(),
            "kind": pa.dictionary(pa.int8(), pa.string()),
            "table": pa.map_(pa.string(), pa.int32()),
            "deep": pa.list_(pa.struct({"x": pa.list_(pa.float32())})),
        }
    )
    record = {
        "prompt": "p",
        "label": Decimal("1.50"),
        "when": datetime(2024, 5, 6, 7, tzinfo=UTC),
        "day": date(2024, 5, 6),
        "kind": "k",
        "table": [("a", 1)],
        "deep": [{"x": [0.5, None]}],
    }
    (row,) = read(write(tmp_path / "a.parquet", [record], schema))
    assert row.label == "1.50"
    assert row.metadata == {
        "when": "2024-05-06T07:00:00+00:00",
        "day": "2024-05-06",
        "kind": "k",
        "table": {"a": 1},
        "deep": [{"x": [0.5, None]}],
    }


def test_a_column_with_a_dot_in_its_name_is_not_a_step_into_a_struct(tmp_path: Path) -> None:
    table = pa.table({"a.b": ["x"], "label": [1], "t": pa.array([1], pa.timestamp("ns"))})
    pq.write_table(table, tmp_path / "a.parquet")
    (row,) = read(tmp_path / "a.parquet", prompt_key="a.b")
    assert (row.prompt, row.metadata) == ("x", {"t": "1970-01-01T00:00:00.000000001"})


def test_columns_without_a_json_form_are_refused_by_name_unless_they_are_not_needed(tmp_path: Path) -> None:
    record = {"prompt": "p", "label": 1, "image": {"bytes": b"\x00", "path": "x"}, "info": {"level": 2}}
    path = write(tmp_path / "a.parquet", [record])
    with pytest.raises(DataError, match="the column 'image' holds values of type binary"):
        read(path)
    (row,) = read(path, metadata_key="info")
    assert row.metadata == {"level": 2}
    with pytest.raises(DataError, match="no column 'promt'; did you mean prompt"):
        read(path, prompt_key="promt")


def test_bad_rows_are_named_by_file_and_number(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "label": 1.0}, {"prompt": None, "label": 2.0}, {"prompt": "c", "label": float("nan")}]
    path = write(tmp_path / "a.parquet", rows)
    with pytest.raises(DataError) as told:
        read(path)
    assert f"{path}: row 1: no prompt: 'prompt' is null" in str(told.value)
    assert f"{path}: row 2: label holds nan" in str(told.value)
    source = read_parquet(str(path), Keys(), on_bad_row="skip")
    assert (len(source), len(source.skipped)) == (1, 2)


def test_text_that_is_not_utf_8_costs_its_own_row_only(tmp_path: Path) -> None:
    prompts = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": prompts, "label": [1, 2, 3]}), tmp_path / "a.parquet")
    source = read_parquet(str(tmp_path / "a.parquet"), Keys(), on_bad_row="skip")
    assert [source[i].prompt for i in range(len(source))] == ["good", "fine"]
    assert "row 1: it cannot be read" in source.skipped[0]


def test_damaged_files_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", numbered(0, 2000), row_group_size=500, compression="gzip")
    whole = path.read_bytes()
    damages = (whole[:-20], b"", b"PAR1 nothing PAR1", whole[:2000] + b"\x00" * 200 + whole[2200:])
    for damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be read"):
            read(path)
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "absent.parquet")


def test_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"options=.* has no effect"):
        read(write(tmp_path / "a.parquet", numbered(0, 1)), options={"split": "train"})


def test_a_missing_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'unison\[data\]'"):
        read(tmp_path / "a.parquet")
