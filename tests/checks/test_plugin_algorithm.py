"""Advantages, losses and recipes of users against their contract."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unison.algorithms import registry
from unison.algorithms.recipes import RECIPES
from unison.algorithms.registry import find_advantage, find_loss, names
from unison.checks.plugin import KINDS, guess_kind, run_plugin_check
from unison.checks.plugin_report import Report

HEADER = """
import torch
from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.algorithms.recipes import Recipe
from unison.algorithms.registry import register_advantage
from unison.algorithms.trajectories import Estimate, Trajectories
"""
RATIO = "ratio = (batch.logprobs_N - batch.old_logprobs_N.detach()).clamp(max=20).exp()\n "
OTHERS = "ratio.detach(), ratio.detach() < 0)"
REST = f"batch.advantages_N.detach(), {OTHERS}"


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file of a user's module; what it registers is forgotten at the end."""
    for kind in ("advantage", "loss"):
        names(kind)
    monkeypatch.setattr(registry, "_REGISTERED", {kind: dict(own) for kind, own in registry._REGISTERED.items()})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outside_algorithm", raising=False)
    yield tmp_path / "outside_algorithm.py"
    sys.modules.pop("outside_algorithm", None)


def checked(outside: Path, code: str, kind: str | None = None, **options: object) -> tuple[bool, str]:
    sys.modules.pop("outside_algorithm", None)
    outside.write_text(HEADER + code)
    importlib.invalidate_caches()
    lines: list[str] = []
    report = run_plugin_check("outside_algorithm:mine", kind, options, write=lines.append)
    assert all("fix: " in line for line in lines if line.startswith("problem"))
    return report.passed, "\n".join(lines)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("advantage", "loss") for name in names(kind)] + [("recipe", r) for r in RECIPES],
)
def test_everything_of_the_package_keeps_the_contract(kind: str, name: str) -> None:
    found = {"advantage": find_advantage, "loss": find_loss, "recipe": RECIPES.__getitem__}[kind](name)
    lines: list[str] = []
    report = Report(lines.append)
    KINDS[kind](report, name, found, {})
    assert report.passed and report.num_ok >= 6, "\n".join(lines)


BAD_ADVANTAGES = [
    ("def mine(batch, strength=1.0): return batch.rewards_T", "its parameter 'strength' is no setting"),
    ("def mine(batch, *, strength): return batch.rewards_T", "its parameter 'strength' is no setting"),
    ("def mine(): return 0", "it takes no batch"),
    ("async def mine(batch): return batch.rewards_T", "it is async"),
    ("mine = 3", "it is a int"),
    ("def mine(batch): return batch.outcomes_N", "advantages of shape (9,) for 39 response tokens of 9 trajectories"),
    ("def mine(batch): return batch.rewards_T.tolist()", "advantages of type list"),
    (
        "def mine(batch): return batch.spread(batch.outcomes_N - batch.outcomes_N.mean())",
        "advantages: nan at a trained",
    ),
    ("def mine(batch): return batch.rewards_T / batch.rewards_T", "advantages: nan at a trained token"),
    ("def mine(batch): return batch.rewards_T - batch.values_T", "it raised TypeError"),
    ("def mine(batch):\n batch.rewards_T.fill_(1)\n return batch.rewards_T", "it changed the batch"),
    ("def mine(batch): return torch.rand(len(batch.sampled_T))", "called again: the advantages of trained"),
    (
        "def mine(batch): return batch.spread(torch.where(batch.valid_N, batch.outcomes_N.nan_to_num().mean(), 0.0))",
        "other numbers where a sample has no reward",
    ),
    ("def mine(batch): return batch.rewards_T.cumsum(0)", "trajectories in another order"),
    (
        "@register_advantage('mine', uses=('values',))\ndef mine(batch): return batch.rewards_T",
        "it uses values and returned no returns",
    ),
]


@pytest.mark.parametrize(("code", "complaint"), BAD_ADVANTAGES, ids=[text for _, text in BAD_ADVANTAGES])
def test_an_advantage_is_told_what_is_wrong(code: str, complaint: str, outside: Path) -> None:
    passed, said = checked(outside, code, "advantage")
    assert not passed and complaint in said, said


BAD_LOSSES = [
    ("def mine(batch): return batch.logprobs_N", "it returned a Tensor of shape (14,) for 14 tokens"),
    (f"def mine(batch):\n {RATIO}return PolicyLoss(-(ratio * 1).mean() * {REST}.loss.mean()", "it returned a Tensor"),
    (f"def mine(batch):\n {RATIO}return PolicyLoss((-ratio).sum(), {OTHERS}", "PolicyLoss of (), (14,), (14,)"),
    (f"def mine(batch):\n {RATIO}return PolicyLoss(-ratio.detach() * {REST}", "the loss must carry a gradient"),
    (f"def mine(batch):\n {RATIO}return PolicyLoss(-ratio * batch.advantages_N, {OTHERS}", "goes to advantages_N"),
    (
        "def mine(batch):\n ratio = (batch.logprobs_N - batch.old_logprobs_N.detach()).exp()\n "
        f"return PolicyLoss(-ratio * {REST}",
        "ratios of e^200 and e^-200: loss, ratio or gradient is not finite",
    ),
    (f"def mine(batch):\n {RATIO}ratio = ratio * 2\n return PolicyLoss(-ratio * {REST}", "a ratio is not exactly 1"),
    (f"def mine(batch):\n {RATIO}return PolicyLoss(-ratio / len(ratio) * {REST}", "each sequence alone: other losses"),
    ("def mine(batch): return 1 / 0", "it raised ZeroDivisionError"),
]


@pytest.mark.parametrize(("code", "complaint"), BAD_LOSSES, ids=[text for _, text in BAD_LOSSES])
def test_a_loss_is_told_what_is_wrong(code: str, complaint: str, outside: Path) -> None:
    passed, said = checked(outside, code, "loss")
    assert not passed and complaint in said, said


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        (
            "mine = Recipe(advantage='grppo', loss='clipped')",
            "algorithm.advantage='grppo' is unknown; did you mean grpo",
        ),
        ("mine = Recipe(advantage='rloo', loss='clipped', settings={'tau': 1.0, 'cilp_low': 1})", "sets 'cilp_low'"),
        (
            "def bad(batch): return batch.outcomes_N\nmine = Recipe(advantage='outside_algorithm:bad', loss='clipped')",
            "advantages of shape (9,)",
        ),
    ],
)
def test_a_recipe_is_told_what_is_wrong(code: str, complaint: str, outside: Path) -> None:
    passed, said = checked(outside, code)
    assert not passed and complaint in said and "since it is a Recipe" in said, said


def test_settings_are_given_as_options_and_unknown_ones_refused(outside: Path) -> None:
    code = (
        "def mine(batch: Trajectories, *, strength=1.0): return batch.spread(batch.outcomes_N.nan_to_num() / strength)"
    )
    assert checked(outside, code, strength=2.0)[0]
    passed, said = checked(outside, code, strenght=2.0)
    assert not passed and "takes no setting 'strenght'; did you mean strength?" in said
    passed, said = checked(outside, code, strength=0.0)
    assert not passed and "advantages: inf" in said


def test_what_an_estimator_declares_is_made_for_it(outside: Path) -> None:
    code = """
@register_advantage("mine", uses=("values", "kl", "greedy"))
def mine(batch: Trajectories):
    baselines = batch.spread(batch.baselines_N.nan_to_num())
    return Estimate(batch.net_rewards_T - baselines, batch.values_T.nan_to_num() + batch.penalties_T)
"""
    passed, said = checked(outside, code)
    assert passed and "it uses greedy, kl, values" in said and "checked as an advantage, since it takes Traj" in said


def test_functions_without_annotations_are_not_guessed() -> None:
    assert guess_kind(lambda batch: batch) is None
