"""The algorithm that a page builds, and the errors it says one would meet."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.blocks import blocks
from tests.hygiene.tree import REPO
from unison.cli.main import main

PAGE = REPO / "docs" / "new_algorithm.md"
RIGHT = "return batch.spread(torch.where(batch.valid_N, relative_N, 0.0))"
TRAIN = ["train", "examples/tiny.toml", "--algorithm.name", "my_algorithm:RECIPE", "--eval.problems", "0"]
TRAIN += ["--trainer.steps", "1", "--log.plot", "false", "--run.dir", "run"]


def code() -> str:
    (block,) = (block for block in blocks(PAGE) if block.file == "my_algorithm.py")
    return block.text


def without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def test_the_page_shows_the_example() -> None:
    assert code() == (REPO / "examples" / "my_algorithm.py").read_text(encoding="utf-8")


def test_it_trains_by_its_own_advantages_and_loss(workspace: Path) -> None:
    (workspace / "my_algorithm.py").write_text(code(), encoding="utf-8")
    assert main([*TRAIN, "--trainer.mini_batches", "2", "--algorithm.options.radius", "1e-4"]) == 0
    (metrics,) = map(json.loads, (workspace / "run" / "metrics.jsonl").read_text().splitlines())
    assert metrics["train/optimizer_steps"] == 2 and 0 < metrics["train/clip_share"] < 0.5
    samples = [json.loads(line) for line in (workspace / "run" / "rollouts.jsonl").read_text().splitlines()]
    groups: dict[str, list[dict[str, float]]] = {}
    for sample in samples:
        groups.setdefault(sample["group_id"], []).append(sample)
    for group in groups.values():
        low, high = sorted(sample["reward"] for sample in group)[3:5]
        for sample in group:
            assert sample["advantage"] == pytest.approx(2 * (sample["reward"] - (low + high) / 2), abs=1e-6)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (RIGHT, "return relative_N"),
        (RIGHT, "return batch.spread(relative_N / relative_N)"),
        ("PolicyLoss(loss_N, ratio_N.detach(), outside_N)", "PolicyLoss(loss_N.mean(), ratio_N.detach(), outside_N)"),
    ],
    ids=["one number a trajectory", "not a number", "a mean"],
)
def test_a_mistake_is_told_as_the_page_says(
    right: str, wrong: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert code().count(right) == 1 and f"`{wrong}`" in page
    (workspace / "my_algorithm.py").write_text(code().replace(right, wrong), encoding="utf-8")
    assert main(TRAIN) != 0
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert without_numbers(said) in without_numbers(page)
    assert main(["check", "plugin", "my_algorithm:RECIPE"]) == 1


def test_a_misspelt_setting_is_told_as_the_page_says(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workspace / "my_algorithm.py").write_text(code(), encoding="utf-8")
    assert main([*TRAIN, "--algorithm.options.raduis", "2"]) != 0
    assert capsys.readouterr().err.splitlines()[-1] in PAGE.read_text(encoding="utf-8").splitlines()
