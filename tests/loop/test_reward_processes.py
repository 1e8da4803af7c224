"""A run whose rewards live in processes of their own."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from tests.loop.test_run_training import TinyModelDir, metrics_of, run
from unison.core.errors import ConfigError, DataError


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_grader_that_hangs_costs_its_samples_and_the_run_goes_on(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    before = children()
    parts: dict[str, Any] = {
        "hangs": {"function": "tests.loop.rewards:hangs_on_copy_one", "timeout_s": 0.4},
        "low": {"function": "tests.loop.rewards:low_ids", "weight": 0.5},
    }
    # The configuration of these tests names a function, which parts replace.
    reward = {"function": "exact_answer", "parts": parts}
    run(tiny_model_dir(), tmp_path / "run", reward=reward, trainer={"steps": 1})
    step = metrics_of(tmp_path / "run")[-1]
    # The whole batch once, then the second copy of each of three prompts.
    assert (step["reward/timeouts"], step["reward/workers_restarted"], step["reward/crashes"]) == (4, 4, 0)
    assert (step["rollout/unscorable"], step["rollout/samples"]) == (3, 12)
    assert step["rollout/reward_mean"] == pytest.approx(1.5 * step["reward/part/hangs/mean"])
    assert "reward/part/low/std" in step
    assert children() == before


def test_a_run_that_cannot_begin_leaves_no_process(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    before = children()
    with pytest.raises((ConfigError, DataError)):
        run(tiny_model_dir(), tmp_path / "run", data={"source": "jsonl", "train": "absent.jsonl", "options": {}})
    gc.collect()
    assert children() == before
