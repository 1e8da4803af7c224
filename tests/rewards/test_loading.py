from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.samples import finished
from unison.config.checks import check_config
from unison.config.schema import DataConfig, ModelConfig, RewardConfig, RewardPartConfig, TrainConfig
from unison.core.errors import ConfigError, RewardError
from unison.core.protocols import Grader
from unison.rewards.base import load_reward, register_reward
from unison.rewards.exact import exact_answer
from unison.rewards.scoring import score

USER_MODULE = """
def length(text, label, *, scale=1.0):
    return scale * len(text)

def batch(samples, bonus=0.0):
    return [float(sample.text == sample.metadata["label"]) + bonus for sample in samples]

def anything(text, label, **options):
    return float(len(options))

def needs(text, label, level):
    return level

def alone(text):
    return 1.0

async def later(text, label):
    return 1.0

class Judge:
    def __init__(self, weight=2.0):
        self.weight = weight

    def __call__(self, text, label):
        return self.weight

judge = Judge()
NUMBER = 3

from unison.rewards.scoring import combine
both = combine({"length": (length, 0.5), "anything": (anything, 2.0)})
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "rewards_of_a_user"
    (tmp_path / f"{name}.py").write_text(USER_MODULE)
    (tmp_path / "breaks_at_import.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield name
    for module in (name, "breaks_at_import"):
        sys.modules.pop(module, None)


def test_the_default_reward_compares_the_first_line() -> None:
    grader = load_reward(RewardConfig())
    assert isinstance(grader, Grader)
    assert list(grader([finished("12\n7+9=16", label="12"), finished("13", label="12")])) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        ("12", "12", 1.0),
        (" 12 \n7+9=16\n", "12", 1.0),
        ("12\r\nmore", "12", 1.0),
        ("12", 12, 1.0),
        ("012", "12", 0.0),
        ("12.", "12", 0.0),
        ("\n12", "12", 0.0),
        ("", "12", 0.0),
        ("Paris", " Paris\n", 1.0),
    ],
)
def test_exact_answer(text: str, label: object, expected: float) -> None:
    assert exact_answer(text, label) == expected


def test_exact_answer_needs_a_label() -> None:
    with pytest.raises(ValueError, match="label"):
        exact_answer("12", None)


@pytest.mark.parametrize(
    ("label", "told"),
    [
        ({"dataset": "chain_sum", "entry": {"answer": "4"}}, 'set reward.function = "reasoning_gym"'),
        ({"answer": "4"}, "a dict as label; give a text or a number"),
        (["4"], "a list as label"),
    ],
)
def test_exact_answer_has_no_opinion_of_what_is_no_answer(label: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        exact_answer(str(label), label)


def test_functions_of_the_users_own_get_their_options(user_module: str) -> None:
    samples = [finished("abc", label="abc"), finished("ab", label="abc")]
    scaled = load_reward(RewardConfig(function=f"{user_module}:length", options={"scale": 0.5}))
    assert list(scaled(samples)) == [1.5, 1.0]
    batch = load_reward(RewardConfig(function=f"{user_module}:batch", options={"bonus": 1}))
    assert list(batch(samples)) == [2.0, 1.0]
    free = load_reward(RewardConfig(function=f"{user_module}:anything", options={"a": 1, "b": 2}))
    assert list(free(samples)) == [2.0, 2.0]
    assert list(load_reward(RewardConfig(function=f"{user_module}:judge"))(samples)) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        ("length", {"scal": 2}, "no option 'scal'; did you mean scale"),
        ("length", {"text": "a"}, "no option 'text'"),
        ("batch", {"label": "a"}, "no option 'label'.*it takes bonus"),
        ("needs", {}, "level"),
        ("alone", {}, r"signature \(text\)"),
        ("later", {}, "async"),
        ("Judge", {}, "is a class"),
        ("NUMBER", {}, "is a int"),
        ("lenght", {}, "did you mean length"),
    ],
)
def test_a_function_that_cannot_be_called_as_configured_is_refused(
    user_module: str, function: str, options: dict[str, int | float | str | bool], told: str
) -> None:
    for isolation in ("process", "none"):
        with pytest.raises(RewardError, match=told):
            load_reward(RewardConfig(function=f"{user_module}:{function}", options=options, isolation=isolation))


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        ("math_answer", {"fallback": "nmber"}, "fallback = 'nmber' is unknown; did you mean number"),
        ("math_answer", {"relative_tolerance": 1}, "less than 1"),
        ("math_answer", {"relative_tolerance": "0.1"}, "must be a number"),
        ("exact_match", {"source": "boxed"}, "did you mean box"),
        ("exact_match", {"case": 0}, "case = 0; it must be true or false"),
        ("f1", {"tag": "<answer>"}, "no name of a tag"),
        ("reasoning_gym", {"source": "tags"}, "did you mean tag"),
        ("multiple_choice", {"num_options": 1}, "from 2 to 26"),
        ("format_tags", {"tags": "think,think"}, "different names"),
        ("format_tags", {"opened": "yes"}, "true or false"),
        ("code_tests", {"fence": "optionel"}, "did you mean optional"),
        ("code_tests", {"wall_s": 0}, "wall_s = 0"),
        ("code_tests", {"memory_mib": 1}, "at least 32"),
        ("code_tests", {"output_mib": 1.5}, "must be an integer"),
        ("code_tests", {"partial": 1}, "partial = 1; it must be true or false"),
        ("json_schema", {"schema": "{"}, "schema that is no JSON"),
        ("json_schema", {"schema": '{"type": "objekt"}'}, "schema that cannot be used at"),
        ("http", {"url": 5}, "must be a text"),
        ("http", {"url": "http://a", "batch": 1}, "true or false"),
    ],
)
def test_wrong_values_of_a_graders_options_are_refused_as_it_is_loaded(
    function: str, options: dict[str, int | float | str | bool], told: str
) -> None:
    with pytest.raises(RewardError, match=told) as refused:
        load_reward(RewardConfig(function=function, options=options, isolation="none"))
    assert str(refused.value).startswith("reward.options: ")
    part = RewardPartConfig(function=function, options=options)
    with pytest.raises(RewardError, match=r"^reward\.parts\.one\.options: "):
        load_reward(RewardConfig(parts={"one": part}, isolation="none"))


def test_the_options_of_the_documents_are_taken() -> None:
    for function, options in {
        "math_answer": {"fallback": "number", "relative_tolerance": 0},
        "format_tags": {"tags": "think,answer", "opened": True},
        # Whether there is a sandbox here is another test's question.
        "code_tests": {"wall_s": 5, "memory_mib": 512, "partial": False, "allow_unsandboxed": True},
        "json_schema": {"schema": '{"type": "object"}'},
    }.items():
        load_reward(RewardConfig(function=function, options=options, isolation="none"))


def test_a_wrong_option_is_told_by_a_process_of_its_own_as_well() -> None:
    with pytest.raises(RewardError, match="did you mean number"):
        load_reward(RewardConfig(function="math_answer", options={"fallback": "nmber"}))


def test_an_import_that_fails_names_module_and_cause(user_module: str) -> None:
    with pytest.raises(RewardError, match=r"failed: RuntimeError: no licence \(at breaks_at_import.py:1\)"):
        load_reward(RewardConfig(function="breaks_at_import:f"))
    with pytest.raises(RewardError, match="importing absent_module failed: ModuleNotFoundError"):
        load_reward(RewardConfig(function="absent_module:f"))


@pytest.mark.parametrize("function", ["exact_anser", "mymodule.function", ":f", "m:"])
def test_an_unknown_name_is_refused(function: str) -> None:
    with pytest.raises(RewardError, match=r"unknown|module:object"):
        load_reward(RewardConfig(function=function))


def test_an_unknown_name_brings_the_nearest_to_mind() -> None:
    with pytest.raises(RewardError, match="did you mean exact_answer"):
        load_reward(RewardConfig(function="exact_anser"))


def test_a_registered_reward_is_found_by_name() -> None:
    @register_reward("always-half-for-this-test")
    def half(text: str, label: object) -> float:
        return 0.5

    grader = load_reward(RewardConfig(function="always-half-for-this-test", isolation="none"))
    assert list(grader([finished("a")])) == [0.5]
    with pytest.raises(RewardError, match="registered in this process alone"):
        load_reward(RewardConfig(function="always-half-for-this-test"))


def test_a_combination_keeps_its_parts(user_module: str) -> None:
    (sample,) = samples = [finished("four")]
    score(samples, load_reward(RewardConfig(function=f"{user_module}:both")))
    assert (sample.reward, sample.reward_parts) == (2.0, {"length": 4.0, "anything": 0.0})


def test_a_combination_takes_no_options(user_module: str) -> None:
    with pytest.raises(RewardError, match="is a combination, which takes no options"):
        load_reward(RewardConfig(function=f"{user_module}:both", options={"scale": 2.0}))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"function": "m:f", "parts": {"a": RewardPartConfig(function="m:g")}},
            "reward.function='m:f' and reward.parts",
        ),
        ({"options": {"x": 1}, "parts": {"a": RewardPartConfig(function="m:g")}}, "reward.options.*and reward.parts"),
        ({"isolation": "none", "timeout_s": 3.0}, "reward.timeout_s=3.0 has no effect"),
        ({"isolation": "none", "workers": 3}, "reward.workers=3 has no effect"),
        (
            {"isolation": "none", "parts": {"a": RewardPartConfig(function="m:g", timeout_s=1.0)}},
            "reward.parts.a.timeout_s=1.0 has no effect",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_reward(RewardConfig(**settings))
    with pytest.raises(ConfigError, match=told):
        check_config(
            TrainConfig(model=ModelConfig(path="m"), data=DataConfig(train="t"), reward=RewardConfig(**settings))
        )


def test_a_part_that_is_a_combination_is_refused(user_module: str) -> None:
    config = RewardConfig(parts={"a": RewardPartConfig(function=f"{user_module}:both")})
    with pytest.raises(RewardError, match=r"reward.parts.a.function='rewards_of_a_user:both' is itself a combination"):
        load_reward(config)
