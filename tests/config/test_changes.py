"""What of a configuration may change while a run goes on: every key has a fate, and it is the declared one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from unison.config.changes import FIXED, check_changes, describe
from unison.config.dump import MISSING
from unison.config.fields import Field, fields, named_tables, sections
from unison.config.schema import TrainConfig
from unison.core.errors import ConfigError

BASE: dict[str, Any] = {
    "model": {"path": "tiny-random"},
    "data": {"mix": {"a": {"train": "a.jsonl"}}, "options": {"n": 1}},
    "reward": {"parts": {"a": {"function": "f"}}, "options": {"n": 1}},
    "eval": {"sets": {"a": {"path": "a.jsonl"}}},
}


def config(**changes: Any) -> TrainConfig:
    """The base with dotted keys (``trainer__steps``) set."""
    tree: dict[str, Any] = msgspec.to_builtins(msgspec.convert(BASE, TrainConfig))
    for path, value in changes.items():
        *place, key = path.split("__")
        inner = tree
        for part in place:
            inner = inner[part]
        inner[key] = value
    return msgspec.convert(tree, TrainConfig)


def place_of(field: Field) -> str:
    """The key's place in the base, which names each entry of a named table ``a``."""
    return field.path if field.named is None else f"{field.named}.a.{field.key}"


CANDIDATES: tuple[Any, ...] = (
    True,
    False,
    {"n": 2},
    ["x"],
    [1],
    "other",
    "zero",
    "none",
    "process",
    "warn",
    "fast",
    "exact",
    "float32",
    "verl",
    "skip",
    "parse",
    "success_rate",
    "no_replay",
    "priority",
    "keep",
    "linear",
    "on",
    3,
    128,
    4096,
    0.25,
    0.5,
    1.5,
    12.5,
    "token_mean",
    "sample",
    "over",
    "kl",
    "reward",
    "abs",
    "doubling",
    "trainer",
    "token",
    "clip",
    "reduced",
    "refreshed",
    "log_mean_exp",
    "server",
    "own_cores",
    "in_place",
    "group",
)


def with_another_value(path: str) -> TrainConfig:
    """The base with this one key changed to whatever its type allows."""
    base = config()
    for value in CANDIDATES:
        try:
            found = config(**{path.replace(".", "__"): value})
        except msgspec.ValidationError:
            continue
        if found != base:
            return found
    raise AssertionError(f"no other value is known for {path}: add one to CANDIDATES")


def declared(path: str) -> str | None:
    """Why the key is fixed, by the table alone."""
    parts = path.split(".")
    return next((FIXED[name] for i in range(len(parts)) if (name := ".".join(parts[: i + 1])) in FIXED), None)


EVERY_KEY = sorted(place_of(field) for field in fields().values())


@pytest.mark.parametrize("path", EVERY_KEY)
def test_every_key_changes_or_stays_as_the_table_says(path: str) -> None:
    old, new = config(), with_another_value(path)
    why = declared(path)
    if path == "run.dir":
        assert check_changes(old, new) == {}
    elif why is None:
        assert set(check_changes(old, new)) == {path}
    else:
        with pytest.raises(ConfigError) as caught:
            check_changes(old, new)
        assert f"but {path} differs ({why})" in str(caught.value)


@pytest.mark.parametrize("path", EVERY_KEY)
def test_in_the_middle_of_a_rollout_its_settings_stay_too(path: str) -> None:
    old, new = config(), with_another_value(path)
    if path.startswith("rollout.") and path != "rollout.engine":
        with pytest.raises(ConfigError, match=r"differs \(a rollout is half done under the old settings"):
            check_changes(old, new, has_pending=True)
    elif declared(path) is None:
        check_changes(old, new, has_pending=True)


def test_the_table_names_nothing_that_is_no_key() -> None:
    known = {*sections(), *fields(), *named_tables()}
    assert set(FIXED) <= known, set(FIXED) - known


def test_all_changes_are_shown_and_the_refused_ones_marked() -> None:
    new = config(run__seed=7, trainer__steps=9, data__shuffle=False, log__plot=False)
    with pytest.raises(ConfigError) as caught:
        check_changes(config(), new)
    message = str(caught.value)
    assert "  run.seed: 0 -> 7   <- cannot change\n" in message
    assert "  data.shuffle: true -> false   <- cannot change\n" in message
    assert "  trainer.steps: 20 -> 9\n" in message and "  log.plot: true -> false\n" in message
    assert "--run.dir NEW, with --run.fork RUN" in message


def test_no_change_is_no_change() -> None:
    assert check_changes(config(), config()) == {}


def test_lists_tables_nothing_and_named_entries_are_shown_as_one_writes_them() -> None:
    new = config(
        rollout__stop=["a\n", '"'],
        rollout__filter="no_contrast",
        data__eval=None,
        reward__options={"n": 2, "text": "x"},
        reward__parts={"b": {"function": "g", "weight": 0.5}},
        trainer__learning_rate=1e-05,
    )
    shown = describe(check_changes(config(), new))
    assert shown["rollout.stop"] == r'rollout.stop: [] -> ["a\n", "\""]'
    assert shown["rollout.filter"] == 'rollout.filter: null -> "no_contrast"'
    assert shown["reward.options"] == 'reward.options: {n = 1} -> {n = 2, text = "x"}'
    assert shown["reward.parts.a.function"] == f'reward.parts.a.function: "f" -> {MISSING}'
    assert shown["reward.parts.b.weight"] == f"reward.parts.b.weight: {MISSING} -> 0.5"
    assert shown["trainer.learning_rate"] == "trainer.learning_rate: 1e-06 -> 1e-05"
    assert "data.eval" not in shown


def test_a_part_of_the_mixture_that_comes_or_goes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.mix\.b\.train: \(not there\) -> \"b.jsonl\"   <- cannot change"):
        check_changes(config(), config(data__mix={"a": {"train": "a.jsonl"}, "b": {"train": "b.jsonl"}}))
