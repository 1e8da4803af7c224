from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.data.source import PromptRow, Split, load_source

datasets: Any = pytest.importorskip("datasets")


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    datasets.disable_progress_bars()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    data = datasets.Dataset.from_list([{"q": f"{i}+1=", "a": {"answer": i + 1}, "level": i} for i in range(6)])
    path = tmp_path / "saved"
    datasets.DatasetDict({"train": data, "test": data.select([5, 0])}).save_to_disk(str(path))
    return path


def read(name: object, split: Split = "train", **settings: Any) -> list[PromptRow]:
    keys = {"prompt_key": "q", "label_key": "a.answer", **settings}
    named = {split: str(name)} if split == "train" or "train" in settings else {"eval": str(name)}
    source = load_source(DataConfig(source="datasets", **{**keys, **named}), split, 0)
    return [source[i] for i in range(len(source))]


def test_a_saved_folder_has_its_splits(saved: Path) -> None:
    assert [row.label for row in read(saved)] == [1, 2, 3, 4, 5, 6]
    first = read(saved, "eval")[0]
    assert (first.row_id, first.prompt, first.label, first.metadata) == (f"{saved}:test:0", "5+1=", 6, {"level": 5})
    assert [row.label for row in read(saved / "test")] == [6, 1]
    assert [row.label for row in read(f"{saved}@[1:3]", options={"split": "train"})] == [2, 3]


def test_each_split_has_an_option_of_its_own(saved: Path) -> None:
    both = {"split": "test", "eval_split": "train"}
    assert len(read(saved, options=both)) == 2
    assert len(read(saved, "eval", train=str(saved), options=both)) == 6
    # The training split is never taken for held-out data by mistake; a held-out set of its own has one split.
    assert len(read(saved, "eval", train=str(saved), options={"split": "train"})) == 2
    assert len(read(saved, "eval", options={"split": "train"})) == 6


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("saved", {"split": "tset"}, "no split 'tset'; did you mean test"),
        ("saved", {"spilt": "test"}, "spilt is unknown to the datasets source; did you mean split"),
        ("saved", {"split": 3}, "split=3 must be a text"),
        ("saved", {"revision": "main"}, "revision='main' has no effect"),
        ("saved/train", {"split": "train"}, "holds one split"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(saved: Path, name: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(saved.parent / name, options=options)


def test_a_split_must_be_named_where_it_is_not_clear(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{"q": "a", "a": {"answer": 1}}])
    datasets.DatasetDict({"test": data, "validation": data}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(ConfigError, match=r"splits test, validation; say which by data\.options\.eval_split"):
        read(tmp_path / "d", "eval")
    with pytest.raises(ConfigError, match=r"data\.options\.split"):
        read(tmp_path / "d")


def test_a_folder_of_data_files_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"q": "x", "a": {"answer": 3}}\n' * 2)
    assert [row.label for row in read(tmp_path / "files")] == [3, 3]


def test_what_cannot_be_had_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"cannot be had from a hub(.|\n)*save_to_disk"):
        read("nobody/has-this-one")
    with pytest.raises(DataError, match="is no folder"):
        read(tmp_path / "absent")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{")
    with pytest.raises(DataError, match="cannot be loaded as a data set"):
        read(tmp_path / "broken")


def test_bad_rows_and_images_are_told(tmp_path: Path) -> None:
    rows = [{"q": "a", "a": {"answer": 1}}, {"q": "", "a": {"answer": 2}}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(DataError, match="row 1: the prompt is empty"):
        read(tmp_path / "d")
    assert len(read(tmp_path / "d", on_bad_row="skip")) == 1
    features = datasets.Features({"q": datasets.Value("string"), "pic": datasets.Image()})
    picture = {"q": "a", "pic": {"bytes": b"x", "path": None}}
    datasets.Dataset.from_list([picture], features=features).save_to_disk(str(tmp_path / "p"))
    with pytest.raises(DataError, match="the column 'pic' holds values of type binary"):
        read(tmp_path / "p", label_key=None)


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'unison\[data\]'"):
        read("x/y")
