from __future__ import annotations

import math

import pytest
import torch

from tests.algorithms.ragged import close, ragged_batches
from unison.algorithms.metrics import mismatch_metrics
from unison.observability.metrics import METRICS

NAN, INF = math.nan, math.inf
DOUBLE = torch.float64
ZERO = ("logp_diff_mean", "logp_diff_max", "k1", "k3", "chi2_token", "chi2_sequence", "catastrophic_share")
ONE = ("ratio_min", "ratio_mean", "ratio_max", "ppl_ratio")


def measure(
    trainer: list[float], rollout: list[float], trained: list[float] | None = None, owner: list[int] | None = None
) -> dict[str, float]:
    owner = owner or [0] * len(trainer)
    figures = mismatch_metrics(
        trainer_logprobs_T=torch.tensor(trainer, dtype=DOUBLE),
        rollout_logprobs_T=torch.tensor(rollout, dtype=DOUBLE),
        trained_T=torch.tensor(trained if trained is not None else [1.0] * len(trainer)),
        trajectory_T=torch.tensor(owner, dtype=torch.int64),
        num_trajectories=max(owner, default=-1) + 1,
    )
    assert all(name.startswith("mismatch/") for name in figures)
    return {name.removeprefix("mismatch/"): value for name, value in figures.items()}


def test_bitwise_equal_sides_differ_by_exactly_nothing_whatever_is_masked() -> None:
    figures = measure([NAN, -0.105, -0.223, -3.912, INF], [-1, -0.105, -0.223, -3.912, -INF], [0, 1, 1, 1, 0])
    assert all(figures[name] == 0 for name in ZERO) and all(figures[name] == 1 for name in ONE)
    assert figures["trainer_ppl"] == figures["rollout_ppl"] and figures["trainer_log_ppl"] == figures["rollout_log_ppl"]


def test_nothing_trained_is_no_difference() -> None:
    for figures in (measure([NAN, 0.0], [0.0, NAN], [0, 0]), measure([], [])):
        assert all(figures[name] == 0 for name in ZERO) and all(figures[name] == 1 for name in ONE)


@pytest.mark.parametrize(
    ("trainer", "rollout", "expected"),
    [
        (
            [-1.0, -0.5, -2.0, -0.3],
            [-1.2, -0.5, -1.0, -0.4],
            {
                "trainer_log_ppl": 1.166667,
                "rollout_log_ppl": 0.9,
                "k3": (0.021403 + 0.367879) / 3,
                "ppl_ratio": 1.305605,
                "chi2_token": -0.124280,
                "chi2_sequence": -0.798103,
            },
        ),
        (
            [-0.9, -1.4],
            [-0.9, -0.2],
            {
                "trainer_log_ppl": 1.15,
                "rollout_log_ppl": 0.55,
                "k3": 0.501194 / 2,
                "ppl_ratio": 1.822119,
                "chi2_token": -0.454641,
                "chi2_sequence": -0.909282,
            },
        ),
    ],
)
def test_published_values_of_one_sequence(
    trainer: list[float], rollout: list[float], expected: dict[str, float]
) -> None:
    figures = measure(trainer, rollout, [1, 1, 1, 0][: len(trainer)])
    for name, value in expected.items():
        assert close(figures[name], value), name


def test_sequences_weigh_alike_in_figures_of_sequences_and_tokens_in_those_of_tokens() -> None:
    trainer, rollout = [-1.0, -0.5, -2.0, -0.3, -0.9, -1.4], [-1.2, -0.5, -1.0, -0.4, -0.9, -0.2]
    figures = measure(trainer, rollout, [1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 1])
    assert close(figures["trainer_log_ppl"], (1.166667 + 1.15) / 2)
    assert close(figures["ppl_ratio"], (1.305605 + 1.822119) / 2)
    assert close(figures["chi2_sequence"], -(0.798103 + 0.909282) / 2)
    assert close(figures["k3"], (0.021403 + 0.367879 + 0.501194) / 5)
    assert close(figures["chi2_token"], (3 * -0.124280 + 2 * -0.454641) / 5)


def test_a_nan_in_a_trained_place_shows() -> None:
    figures = measure([-1.0, -1.0], [-1.0, NAN])
    assert all(math.isnan(figures[name]) for name in (*ZERO[:-1], *ONE, "rollout_ppl"))
    assert figures["trainer_log_ppl"] == 1.0


def test_extreme_differences_stay_finite_and_are_counted() -> None:
    figures = measure([-1.0, -150.0, -1.0, -9.0, -11.0], [-150.0, -1.0, -1.0, -1.0, -1.0], owner=[0, 1, 2, 3, 4])
    assert all(math.isfinite(value) for value in figures.values())
    assert close(figures["ratio_max"], math.exp(20)) and close(figures["ratio_min"], math.exp(-20), 1e-12)
    assert close(figures["catastrophic_share"], 3 / 5, 1e-12)


def test_explosions_dominate_the_difference_and_the_bulk_dominates_k3() -> None:
    bulk = measure([-1.0] * 1000, [-1.5] * 1000)
    rare = measure([-60.0] * 5 + [-1.0] * 995, [-10.0] * 5 + [-1.0] * 995)
    assert close(bulk["logp_diff_mean"], 0.5, 1e-12) and close(rare["logp_diff_mean"], 0.25, 1e-12)
    assert close(bulk["k3"], math.exp(0.5) - 1.5, 1e-12) and close(rare["k3"], 0.005 * 49, 1e-12)


def test_close_policies_keep_their_digits() -> None:
    figures = measure([1e-12], [0.0])
    assert close(figures["chi2_token"] / 2e-12, 1.0, 1e-10) and figures["chi2_token"] == figures["chi2_sequence"]
    assert close(measure([2.0**-20], [0.0])["k3"] * 2.0**41, 1.0, 1e-5)


def test_every_figure_is_registered() -> None:
    METRICS.check(f"mismatch/{name}" for name in measure([-1.0], [-1.0]))


def test_random_ragged_batches_match_plain_formulas() -> None:
    for batch in ragged_batches():
        owner = [sum(token >= end for end in batch.row_ends) for token in range(len(batch))]
        figures = measure(batch.logprobs, batch.other_logprobs, batch.weights, owner)
        rows: dict[int, list[tuple[float, float]]] = {}
        columns = zip(batch.logprobs, batch.other_logprobs, batch.weights, owner, strict=True)
        for trainer, rollout, weight, row in columns:
            if weight != 0:
                rows.setdefault(row, []).append((trainer, rollout))
        if not rows:
            continue
        gaps = [t - r for pairs in rows.values() for t, r in pairs]
        ratios = [math.exp(gap) for gap in gaps]
        n, s = len(gaps), len(rows)
        trainer_nll = [-sum(t for t, _ in pairs) / len(pairs) for pairs in rows.values()]
        rollout_nll = [-sum(r for _, r in pairs) / len(pairs) for pairs in rows.values()]
        expected = {
            "logp_diff_mean": sum(map(abs, gaps)) / n,
            "logp_diff_max": max(map(abs, gaps)),
            "k1": -sum(gaps) / n,
            "k3": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / n,
            "ratio_min": min(ratios),
            "ratio_mean": sum(ratios) / n,
            "ratio_max": max(ratios),
            "catastrophic_share": 0.0,
            "chi2_token": sum(ratio**2 for ratio in ratios) / n - 1,
            "chi2_sequence": sum(math.prod(math.exp(t - r) for t, r in pairs) ** 2 for pairs in rows.values()) / s - 1,
            "trainer_log_ppl": sum(trainer_nll) / s,
            "rollout_log_ppl": sum(rollout_nll) / s,
            "trainer_ppl": sum(map(math.exp, trainer_nll)) / s,
            "rollout_ppl": sum(map(math.exp, rollout_nll)) / s,
            "ppl_ratio": sum(math.exp(t - r) for t, r in zip(trainer_nll, rollout_nll, strict=True)) / s,
        }
        assert set(figures) == set(expected)
        for name, value in expected.items():
            assert close(figures[name], value, 1e-9), name
