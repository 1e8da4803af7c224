from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.data.source import PromptRow, PromptSource, Split, load_source, register_source

USER_MODULE = """
from unison.data.source import PromptRow

def letters(config, split, seed):
    return [PromptRow(f"{split}:{seed}:{c}", c) for c in config.options["letters"]]

def nothing(config, split, seed):
    return []

def tuples(config, split, seed):
    return [("a", "b")]

def number(config, split, seed):
    return 3

def broken(config, split, seed):
    return 1 / 0

TABLE = {}
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the current directory, which is on no path."""
    name = "prompts_of_a_user"
    (tmp_path / f"{name}.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    yield name
    sys.modules.pop(name, None)


def test_an_unknown_source_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'jsnl' is unknown; did you mean jsonl"):
        load_source(DataConfig(source="jsnl"), "train", seed=0)


def test_a_registered_source_is_found_and_its_name_is_taken() -> None:
    @register_source("two-words-for-this-test")
    def two_words(config: DataConfig, split: Split, seed: int) -> PromptSource:
        return [PromptRow("a", "one"), PromptRow("b", "two")]

    assert len(load_source(DataConfig(source="two-words-for-this-test"), "eval", seed=0)) == 2
    for name in ("two-words-for-this-test", "jsonl"):
        with pytest.raises(ConfigError, match="registered already"):
            register_source(name)(two_words)


def test_a_source_of_the_users_own_is_found_in_the_current_directory(user_module: str) -> None:
    config = DataConfig(source=f"{user_module}:letters", options={"letters": "xyz"})
    source = load_source(config, "eval", seed=7)
    assert [source[i].row_id for i in range(len(source))] == ["eval:7:x", "eval:7:y", "eval:7:z"]


@pytest.mark.parametrize(
    ("function", "error", "told"),
    [
        ("leters", ConfigError, "did you mean letters"),
        ("TABLE", ConfigError, "name a function"),
        ("number", ConfigError, "returned a int"),
        ("tuples", ConfigError, "PromptRow"),
        ("nothing", DataError, "no prompts for train"),
        ("broken", DataError, "ZeroDivisionError"),
    ],
)
def test_an_unusable_source_of_the_users_own_is_told(
    user_module: str, function: str, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        load_source(DataConfig(source=f"{user_module}:{function}"), "train", seed=0)


def test_a_module_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="importing no_such_module_here failed: ModuleNotFoundError"):
        load_source(DataConfig(source="no_such_module_here:f"), "train", seed=0)


def test_rows_that_would_share_their_noise_are_refused(user_module: str) -> None:
    config = DataConfig(source=f"{user_module}:letters", options={"letters": "abca"})
    with pytest.raises(DataError, match=r"rows 0 and 3 .* share the row_id 'train:0:a'"):
        load_source(config, "train", seed=0)
