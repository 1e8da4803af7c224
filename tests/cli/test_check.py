from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from unison.cli.main import main

Capture = pytest.CaptureFixture[str]


@dataclass
class Report:
    passed: bool


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of a fake exactness check, which passes for the model called ``good``."""
    made: list[dict[str, Any]] = []

    def run_exactness(model: str, **options: Any) -> Report:
        made.append({"model": model, **options})
        return Report(model == "good")

    module = ModuleType("unison.checks.exactness")
    module.run_exactness = run_exactness  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unison.checks.exactness", module)
    return made


def test_the_exit_code_tells_whether_all_was_exact(calls: list[dict[str, Any]]) -> None:
    assert main(["check", "exactness", "--model", "good"]) == 0
    assert main(["check", "exactness", "--model", "bad", "--dtype", "float32", "--quick"]) == 1
    assert calls == [
        {"model": "good", "dtype": "auto", "quick": False},
        {"model": "bad", "dtype": "float32", "quick": True},
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["exactnes", "--model", "x"], "unknown check 'exactnes'; did you mean exactness?"),
        (["exactness"], "required: --model"),
        (["exactness", "--model", "x", "--dtype", "bf16"], "invalid choice: 'bf16'"),
        (["exactness", "--model", "x", "--fast"], "unknown flag --fast"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    calls: list[dict[str, Any]], capsys: Capture, words: list[str], complaint: str
) -> None:
    assert main(["check", *words]) == 2
    assert complaint in capsys.readouterr().err
    assert calls == []


def test_without_a_name_the_checks_are_listed(capsys: Capture) -> None:
    assert main(["check"]) == 2
    assert "exactness  every log-prob" in capsys.readouterr().out


def test_the_real_check_takes_what_the_command_gives() -> None:
    import inspect

    from unison.checks.exactness import run_exactness

    inspect.signature(run_exactness).bind("model", dtype="auto", quick=False)
