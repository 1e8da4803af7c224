"""Files that are no files, never end, or cost more than their size: refused by name, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from unison.config.schema import DataConfig
from unison.core.errors import DataError
from unison.data import jsonl
from unison.data.jsonl import read_jsonl
from unison.data.source import PromptSource, load_source

ROW = b'{"prompt": "p", "label": "l"}\n'


def opened(source: str, path: object) -> PromptSource:
    return load_source(DataConfig(source=source, train=str(path)), "train", 0)


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_a_pipe_or_device_is_refused_instead_of_waited_for(source: str, tmp_path: Path) -> None:
    if source == "parquet":
        pytest.importorskip("pyarrow")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(DataError, match="pipe, socket or device"):
            opened(source, path)


def test_links_that_lead_in_a_circle_are_told(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(DataError, match="Too many levels"):
        opened("jsonl", tmp_path / "a")


def test_a_compressed_line_without_end_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(ROW)
        for _ in range(64):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match=":2: the line has over 1 MiB"):
        read_jsonl(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 << 20


def test_many_keys_with_a_late_duplicate_are_read_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    pairs = ",".join(f'"k{i}":1' for i in range(100_000))
    path.write_text(f'{{"prompt":"p","label":"l",{pairs},"k99999":2}}\n')
    began = time.monotonic()
    with pytest.raises(DataError, match="'k99999' occurs twice"):
        read_jsonl(path)
    assert time.monotonic() - began < 5


def test_a_number_beyond_any_float_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    path.write_text('{"prompt":"p","label":-1e999}\n')
    with pytest.raises(DataError, match="-1e999 is beyond any float"):
        read_jsonl(path)


def test_a_name_that_is_no_utf8_makes_row_ids_that_can_be_written(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\xfe\n.jsonl"
    with open(path, "wb") as file:
        file.write(ROW)
    row = opened("jsonl", os.fsdecode(path))[0]
    assert row.row_id.encode() == b"\\xff\\xfe\n.jsonl:1"


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_a_saved_folder_cannot_name_files_elsewhere_and_runs_nothing(name: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    canary = tmp_path / "touched"
    folder = tmp_path / "set"
    folder.mkdir()
    state: dict[str, Any] = {"_data_files": [{"filename": "../secret"}], "_fingerprint": "x", "_split": "train"}
    (tmp_path / "secret").write_text("hidden words")
    (folder / name).write_text(json.dumps(state))
    (folder / "set.py").write_text(f"open({str(canary)!r}, 'w')\n")
    (folder / "train.pkl").write_bytes(b"cposix\nsystem\n(S'touch " + os.fsencode(canary) + b"'\ntR.")
    with pytest.raises(DataError) as failure:
        opened("datasets", folder)
    assert not canary.exists() and "hidden words" not in str(failure.value)
