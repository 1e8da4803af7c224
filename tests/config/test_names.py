from __future__ import annotations

import random
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from unison.config import names
from unison.config.fields import fields, sections
from unison.config.load import load_config
from unison.config.names import edit_distance, explain_unknown, nearest, synonyms
from unison.core.errors import ConfigError

PLAIN_KEYS = [name for name, field in fields().items() if field.named is None]


def one_letter_changed(path: str, rng: random.Random) -> Iterator[str]:
    """Each letter of ``path`` once changed, dropped, doubled by another, and swapped with its neighbour."""
    for i, letter in enumerate(path):
        if letter == ".":
            continue
        other = rng.choice(string.ascii_lowercase)
        yield path[:i] + other + path[i + 1 :]
        yield path[:i] + path[i + 1 :]
        yield path[:i] + other + path[i:]
        if i + 1 < len(path) and path[i + 1] != ".":
            yield path[:i] + path[i + 1] + letter + path[i + 2 :]


def typos(path: str) -> list[str]:
    return [typo for typo in one_letter_changed(path, random.Random(path)) if typo not in fields()]


@pytest.mark.parametrize("path", PLAIN_KEYS)
def test_one_wrong_letter_in_any_flag_fails_and_the_right_key_is_named(path: str) -> None:
    for typo in typos(path)[::5]:  # four kinds for each letter: the fifth is of the next kind
        with pytest.raises(ConfigError) as caught:
            load_config([], [f"--{typo}=1"])
        assert f"--{path}" in str(caught.value), (typo, str(caught.value))


@pytest.mark.parametrize("path", PLAIN_KEYS)
def test_one_wrong_letter_in_any_file_key_fails_and_the_right_key_is_named(path: str, tmp_path: Path) -> None:
    file = tmp_path / "conf.toml"
    for typo in typos(path)[::3]:
        section, _, key = typo.partition(".")
        if not section or not key:
            continue
        file.write_text(f"[{section}]\n{key} = 1\n")
        with pytest.raises(ConfigError) as caught:
            load_config([file])
        assert str(caught.value).startswith(f"{file}:2: key {typo} "), str(caught.value)
        assert path in str(caught.value), (typo, str(caught.value))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("trainer.lr", "trainer.learning_rate"),
        ("warmup", "trainer.warmup_steps"),
        ("optimizer.lr", "trainer.learning_rate"),
        ("rollout.learning_rate", "trainer.learning_rate"),
        ("rollout.group_size", "rollout.samples_per_prompt"),
        ("trainer.temperature", "rollout.temperature or eval.temperature"),
        ("eval.temp", "eval.temperature"),
        ("trainer.learning-rate", "trainer.learning_rate"),
        ("Trainer.Steps", "trainer.steps"),
        ("trainer.beta3", "trainer.beta1 or trainer.beta2"),
        ("algorithm.kl_coefficient", "algorithm.kl_coef"),
        ("algorithm.kl_coefficent", "algorithm.kl_coef, algorithm.kl_control or algorithm.kl_in"),
    ],
)
def test_what_was_probably_meant_is_named(written: str, meant: str) -> None:
    assert explain_unknown(written).rstrip("?").endswith(f" {meant}")


def test_a_word_like_nothing_lists_what_there_is() -> None:
    assert explain_unknown("algorithm.zzzzzz").startswith(
        "is unknown; the keys of [algorithm] are name, advantage, loss"
    )
    assert explain_unknown("zzzzzz.qqqqqq") == f"is unknown; the sections are {', '.join(sections())}"


def test_synonyms_lead_to_keys_that_exist_and_hide_none() -> None:
    assert {path for found in synonyms().values() for path in found} <= set(fields())
    assert not set(synonyms()) & {field.key for field in fields().values()}


def test_a_moved_key_says_where_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.MOVED, "trainer.group", "rollout.samples_per_prompt")
    with pytest.raises(ConfigError, match=r"--trainer\.group has moved: it is --rollout\.samples_per_prompt now"):
        load_config([], ["--trainer.group", "8"])


def test_keys_that_moved_are_gone_and_lead_to_keys_that_exist() -> None:
    assert not set(names.MOVED) & set(fields())
    assert set(names.MOVED.values()) <= set(fields())


@pytest.mark.parametrize(
    ("left", "right", "distance"),
    [("", "", 0), ("", "ab", 2), ("abc", "abc", 0), ("abc", "acb", 1), ("abc", "ab", 1), ("kitten", "sitting", 3)],
)
def test_edit_distance_counts_inserted_dropped_changed_and_swapped_letters(
    left: str, right: str, distance: int
) -> None:
    assert edit_distance(left, right) == edit_distance(right, left) == distance


def test_names_one_letter_away_crowd_out_vaguer_ones() -> None:
    assert nearest("tran", ["train", "generate", "trace", "check"]) == ["train"]
    assert nearest("gen", ["green", "generate", "genesis"]) == ["generate", "genesis"]
    assert nearest("xyzzy", ["train", "generate"]) == []
