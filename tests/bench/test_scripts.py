from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.bench.workloads import load, multiturn, requests, write
from tests.hygiene.tree import REPO
from unison.models.families.llama import read_spec
from unison.models.tiny_random import CONFIG

BENCHMARKS = REPO / "benchmarks"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("limits")
    del sys.modules["limits"]


def bill(limits: ModuleType, folder: Path, document: object, max_running: int = 64, **rates: float) -> Any:
    given = limits.Rates(rates.get("flops", 1e30), rates.get("bytes_per_s", 1e30), {1: 1.0, 3: 3.0}, {1: 0.5})
    return limits.bill_of(load(folder, document), read_spec(CONFIG), given, "float32", max_running)


def test_a_shared_prompt_is_computed_once(limits: ModuleType, tmp_path: Path) -> None:
    prompts = requests({"n": 4}, {"prompt_ids": [1, 2, 9, 9]})
    cost = bill(limits, tmp_path, prompts)
    assert (cost.prefill_tokens, cost.output_tokens, cost.num_steps) == (3 + 2, 20, 4)


def test_a_turn_prefills_what_it_brings_and_the_token_before_it(limits: ModuleType, tmp_path: Path) -> None:
    cost = bill(limits, tmp_path, multiturn(1))
    assert (cost.prefill_tokens, cost.output_tokens, cost.num_steps) == (4 + 2, 5, 5)


def test_no_more_samples_run_together_than_allowed(limits: ModuleType, tmp_path: Path) -> None:
    assert bill(limits, tmp_path, requests({"n": 4}), max_running=2).num_steps == 8


def test_a_bound_by_memory_is_the_bytes_of_all_steps_over_the_rate(limits: ModuleType, tmp_path: Path) -> None:
    cost = bill(limits, tmp_path, requests({"max_new_tokens": 2}), bytes_per_s=1.0)
    spec = read_spec(CONFIG)
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    weights = 4 * (spec.num_parameters() - norms)
    # Three tokens of context in the first step, four in the second.
    kv = 2 * 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    assert cost.bound_s == pytest.approx(2 * weights + (3 + 4) * kv)
    assert cost.compute_bound_s == 0


def test_measured_times_are_interpolated_between_rows(limits: ModuleType) -> None:
    measured = {2: 1.0, 4: 2.0, 8: 3.0}
    assert [limits.interpolated(measured, rows) for rows in (1, 2, 3, 6, 8, 16)] == [1.0, 1.0, 1.5, 2.5, 3.0, 6.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "keys"),
    [
        ("limits.py", ["--workload", "W", "--rows", "1,8", "--seconds", "0.01"], {"rates", "limits"}),
        (
            "breakdown.py",
            ["--dtype", "float32", "--batches", "1,4", "--context", "16", "--shape", "2x16:8"],
            {"seconds"},
        ),
        (
            "curves.py",
            ["--dtype", "float32", "--steps", "2", "--batches", "1,4", "--contexts", "32,64", "--shares", "0,50"],
            {"us_per_token"},
        ),
    ],
)
def test_scripts_run_on_a_small_model(tmp_path: Path, script: str, words: list[str], keys: set[str]) -> None:
    workload, out = write(tmp_path, requests({"n": 2})), tmp_path / "out.json"
    words = [str(workload) if word == "W" else word for word in words]
    command = [sys.executable, str(BENCHMARKS / script), "--model", "tiny-random", *words, "--json", str(out)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert keys <= set(json.loads(out.read_text()))
