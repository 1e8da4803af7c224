"""The one file against the library: the same losses, gradient norms and weights after every step, to the bit."""

from __future__ import annotations

import ast
import json
import shlex
import sys
from pathlib import Path

import pytest

from examples import grpo_in_one_file
from tests.hygiene.tree import REPO
from unison.cli.main import main

Result = tuple[float, float, str]
"""(loss, gradient norm, digest of the weights) of a step."""


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)


def commands_of_the_file() -> list[list[str]]:
    """What its docstring says to type, as words."""
    text = (grpo_in_one_file.__doc__ or "").replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith("    ")]


def the_library(folder: Path, *flags: str) -> list[Result]:
    """The run that the file says is the same as its own, with ``flags``."""
    _, (program, *words) = commands_of_the_file()
    assert program == "unison"
    quiet = ["--log.plot", "false", "--log.export", "false", "--log.progress", "off"]
    assert main([*words, *quiet, "--run.dir", str(folder), *flags]) == 0
    metrics, ledger = (
        [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("metrics.jsonl", "ledger.jsonl")
    )
    return [
        (step["train/loss"], step["train/grad_norm"], entry["weights_digest"])
        for step, entry in zip(metrics, ledger, strict=True)
    ]


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """The library's run as the docstring spells it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPO)
        return the_library(tmp_path_factory.mktemp("library") / "run")


def the_file(model: str, steps: int, kl_coef: float = 0.0) -> list[Result]:
    done = grpo_in_one_file.train(model, steps, kl_coef)
    return [(step.loss, step.grad_norm, step.digest) for step in done]


def test_three_steps_are_the_same_to_the_bit(three_steps: list[Result]) -> None:
    results = the_file("tiny-random", 3)
    assert results == three_steps
    assert len({digest for _, _, digest in results}) == 3
    assert all(loss != 0 and norm > 0 for loss, norm, _ in results)


def test_they_are_with_a_reference_large_steps_and_clipped_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_in_one_file, "LEARNING_RATE", 1e-2)
    monkeypatch.setattr(grpo_in_one_file, "MAX_GRAD_NORM", 0.5)
    flags = "--algorithm.kl_coef 0.1 --trainer.learning_rate 1e-2 --trainer.max_grad_norm 0.5 --trainer.steps 5"
    results = the_file("tiny-random", 5, kl_coef=0.1)
    assert results == the_library(tmp_path / "run", *flags.split())
    assert all(norm > 0.5 for _, norm, _ in results)
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["train/kl"] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kl_coef", [0.0, 0.001])
def test_they_are_with_the_real_model(tmp_path: Path, smollm2: Path, kl_coef: float) -> None:
    flags = ["--model", str(smollm2), "--trainer.steps", "2", "--algorithm.kl_coef", str(kl_coef)]
    assert the_file(str(smollm2), 2, kl_coef) == the_library(tmp_path / "run", *flags)


def test_the_command_prints_what_each_step_came_to(
    three_steps: list[Result], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (_, path, *words), _ = commands_of_the_file()
    assert REPO / path == Path(grpo_in_one_file.__file__)
    monkeypatch.setattr(sys, "argv", [path, *words])
    grpo_in_one_file.main()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["1/3", "2/3", "3/3"]
    assert [line.split()[-1] for line in printed] == [digest for _, _, digest in three_steps]


def test_the_file_takes_nothing_from_the_librarys_training() -> None:
    tree = ast.parse(Path(grpo_in_one_file.__file__).read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    folders = {module.split(".")[1] for module in modules if module.startswith("unison.")}
    assert folders.isdisjoint({"algorithms", "training", "rollout", "loop", "assembly", "run"})
