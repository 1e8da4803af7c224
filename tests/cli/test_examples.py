"""The examples that need no download, run as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hygiene.tree import REPO
from unison.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)


def train(folder: Path, *flags: str) -> list[dict[str, Any]]:
    assert main(["train", "examples/tiny.toml", "--run.dir", str(folder), "--log.plot", "false", *flags]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_tiny_model_learns_to_write_digits(tmp_path: Path, capsys: Capture) -> None:
    before, *steps = train(tmp_path / "run", "--trainer.steps", "16")
    assert steps[0]["rollout/reward_mean"] < 0.2
    assert steps[-1]["rollout/reward_mean"] > steps[0]["rollout/reward_mean"] + 0.3
    assert steps[-1]["eval/accuracy"] > before["eval/accuracy"] + 0.5
    assert steps[-1]["eval/accuracy_ci_low"] > before["eval/accuracy_ci_high"]
    assert {step["rollout/logp_diff_max"] for step in steps} == {0.0}
    assert "kl      -" in capsys.readouterr().out  # there is no reference, so no number stands for it
    assert main(["generate", "--model", str(tmp_path / "run" / "model"), "--prompt", "Page ", "--seed", "1"]) == 0


def test_chat_messages_and_a_reward_of_the_second_form_take_the_same_way(tmp_path: Path) -> None:
    flags = "--data.train=examples/data/chat.jsonl --data.prompt_key=messages --data.label_key=characters"
    reward = "--reward.function=examples.rewards:wanted_share --reward.options.weight=2.0"
    (step,) = train(tmp_path / "run", *flags.split(), *reward.split(), "--trainer.steps=1", "--eval.problems=0")
    assert step["rollout/unscorable"] == 0 and 0 < step["rollout/reward_mean"] < 0.4
    records = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    record = next(record for record in records if record["reward"] > 0)
    found = sum(character in "0123456789" for character in record["response"])
    assert record["reward"] == 2.0 * found / len(record["response"])
    assert record["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
