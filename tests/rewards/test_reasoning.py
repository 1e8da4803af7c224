"""Tasks of reasoning-gym: each data set's own answer scores as it says, and hostile text is not evaluated."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from unison.rewards.reasoning import BROKEN, EVALUATED, EVALUATED_ROWS, may_be_evaluated, needs_sandbox, reasoning_gym

factory = pytest.importorskip("reasoning_gym.factory")
NAMES = sorted(set(factory.DATASETS) - {"composite", *BROKEN})
UNDONE = {"intermediate_integration"}
"""Their entries may carry an answer that was not worked out, an Integral, which is not accepted."""


def label_of(name: str, entry: dict[str, Any]) -> Any:
    """As it comes out of a file of rows."""
    return json.loads(json.dumps({"dataset": name, "entry": entry}))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_own_answer_scores_as_the_data_set_says_and_a_wrong_one_less(name: str) -> None:
    dataset = factory.create_dataset(name, seed=3, size=3)
    for entry in (dataset[i] for i in range(3)):
        answer = entry["answer"]
        if answer is None or (name in UNDONE and "Integral" in answer):
            continue
        label = label_of(name, entry)
        own = reasoning_gym(f"so <answer>{answer}</answer>", label)
        assert own == dataset.score_answer(answer, entry) == 1.0
        assert reasoning_gym("<answer>certainly wrong</answer>", label) < own
        assert reasoning_gym(answer, label) < own, "an answer outside the tags"


def test_scorers_that_evaluate_are_listed() -> None:
    evaluating = set()
    for name, (dataset, _) in factory.DATASETS.items():
        source = inspect.getsource(inspect.getmodule(dataset)) if name != "composite" else ""
        scorer = inspect.getsource(dataset.score_answer)
        if (
            any(call in scorer for call in ("eval(", "exec(", "parse_expr(", "sympify("))
            and "def parse_expr" not in source
        ):
            evaluating.add(name)
    # Its scorer calls a function of its module, which evaluates the row.
    assert evaluating | {"bitwise_arithmetic"} == {*EVALUATED, *EVALUATED_ROWS}
    assert all(needs_sandbox(name) for name in evaluating)
    assert not needs_sandbox("base_conversion")


@pytest.mark.parametrize("name", sorted(EVALUATED))
@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os')",
        "open('x')",
        "x.y",
        "9**9**9**9",
        "N(1)",
        "(lambda: 1)()",
        "f'{1}'",
        "exec",
        "1e999999999",
        "[" * 60,
        "1;2",
    ],
)
def test_only_plain_expressions_reach_a_scorer_that_evaluates(name: str, answer: str) -> None:
    assert not may_be_evaluated(name, answer)


def test_a_row_that_would_be_evaluated_is_checked() -> None:
    entry = factory.create_dataset("bitwise_arithmetic", seed=1, size=1)[0]
    entry["metadata"]["problem"] = "__import__('os')"
    with pytest.raises(ValueError, match="no plain expression"):
        reasoning_gym("<answer>1</answer>", label_of("bitwise_arithmetic", entry))


@pytest.mark.parametrize(
    "label",
    [
        None,
        "no json",
        {"dataset": "gcd"},
        {"dataset": "no_such", "entry": {"answer": "1"}},
        {"dataset": "composite", "entry": {"answer": "1"}},
        {"dataset": "game_of_life_halting", "entry": {"answer": "False"}},
        {"dataset": "gcd", "entry": {"question": "?"}},
        {"dataset": "gcd", "entry": {"answer": "1"}, "confg": {}},
        {"dataset": "gcd", "entry": {"answer": "1"}, "config": {"no_such": 1}},
    ],
)
def test_a_label_that_cannot_be_scored_raises(label: object) -> None:
    with pytest.raises(ValueError):
        reasoning_gym("<answer>1</answer>", label)
