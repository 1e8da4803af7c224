"""What a model writes is data: it runs nothing, raises nothing, and costs a bounded time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hygiene.tree import REPO
from tests.rewards.hostile_answers import answers

pytest.importorskip("math_verify")
pytest.importorskip("reasoning_gym")
pytest.importorskip("jsonschema")
LIMIT_S = 240


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All graders over all answers, in a process of their own with a hard limit."""
    canary = tmp_path_factory.mktemp("canary") / "touched"
    command = [sys.executable, "-m", "tests.rewards.hostile_answers", str(canary)]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    found["touched"] = canary.exists() or any(canary.parent.iterdir())
    return found


def test_there_are_enough_answers() -> None:
    assert len(set(answers("x"))) == len(answers("x")) >= 60


def test_no_answer_runs_code(outcome: dict[str, Any]) -> None:
    assert not outcome["touched"]
    assert not outcome["asked"], "\n".join(outcome["asked"])


def test_every_registered_grader_was_tried(outcome: dict[str, Any]) -> None:
    assert not outcome["missing"]


def test_no_exception_leaves_a_grader(outcome: dict[str, Any]) -> None:
    assert not outcome["raised"], "\n".join(outcome["raised"][:20])


def test_no_grader_is_kept_busy(outcome: dict[str, Any]) -> None:
    assert not outcome["slow"], "\n".join(outcome["slow"])


def test_no_hostile_answer_is_right(outcome: dict[str, Any]) -> None:
    assert not outcome["right"], "\n".join(outcome["right"])


def test_the_canary_would_be_touched_by_evaluation(tmp_path: Path) -> None:
    canary = tmp_path / "touched"
    program = "import sys; eval(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, answers(str(canary))[0]], check=True, timeout=60)
    assert canary.exists()
