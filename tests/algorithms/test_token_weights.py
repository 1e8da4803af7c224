from __future__ import annotations

import math
import random
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import all_close, close, gradient_list
from unison.algorithms.aggregation import exact_sum, exact_sums, token_sum, token_weights
from unison.config.algorithm import Aggregation
from unison.core.errors import ConfigError

NAN, INF = math.nan, math.inf
DOUBLE = torch.float64
ALL: tuple[Aggregation, ...] = get_args(Aggregation)


def factors(
    aggregation: Aggregation,
    lengths: list[int],
    weights: list[float] | None = None,
    counted: list[float] | None = None,
    *,
    trajectories: list[str] | None = None,
    groups: list[str] | None = None,
    fixed_length: int = 4,
) -> Tensor:
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    weight = weights if weights is not None else [1.0] * len(rows)
    return token_weights(
        aggregation,
        weights_T=torch.tensor(weight),
        counted_T=torch.tensor(counted if counted is not None else weight),
        row_T=torch.tensor(rows, dtype=torch.int64),
        num_rows=len(lengths),
        trajectory_ids=trajectories or [str(row) for row in range(len(lengths))],
        group_ids=groups or ["g"] * len(lengths),
        fixed_length=fixed_length,
    )


def batch_loss(losses: list[float], factor_T: Tensor) -> float:
    return token_sum(torch.tensor(losses, dtype=DOUBLE), factor_T).item()


def plain_factors(
    aggregation: Aggregation,
    rows: list[int],
    weights: list[float],
    counted: list[float],
    trajectories: list[str],
    groups: list[str],
    fixed_length: int,
) -> list[float]:
    """From the definition: the mean over units of the token mean (or sum) of each."""
    unit_of = {
        "token_mean": lambda row: "all",
        "sequence_mean_token_mean": lambda row: row,
        "sequence_mean_token_sum": lambda row: row,
        "fixed_length": lambda row: row,
        "trajectory_mean": lambda row: trajectories[row],
        "prompt_mean": lambda row: groups[row],
    }
    if aggregation == "token_sum":
        return weights
    key = unit_of[aggregation]
    units: dict[object, float] = {}
    for row, count in zip(rows, counted, strict=True):
        units[key(row)] = units.get(key(row), 0.0) + count
    alive = sum(1 for total in units.values() if total > 0)
    result = []
    for row, weight in zip(rows, weights, strict=True):
        total = units[key(row)]
        if aggregation == "sequence_mean_token_sum":
            result.append(weight / alive if alive else 0.0)
        elif aggregation == "fixed_length":
            result.append(weight / alive / fixed_length if alive else 0.0)
        else:
            result.append(weight / total / alive if total > 0 else 0.0)
    return result


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", 1),
        ("token_sum", 6),
        ("sequence_mean_token_sum", 3),
        ("sequence_mean_token_mean", 1),
        ("fixed_length", 0.75),
        ("trajectory_mean", 1),
        ("prompt_mean", 1),
    ],
)
@pytest.mark.parametrize("width", [4, 8])
def test_published_losses_of_two_sequences_and_padding_changes_none(
    aggregation: Aggregation, expected: float, width: int
) -> None:
    mask = [1.0] * 2 + [0.0] * (width - 2) + [1.0] * 4 + [0.0] * (width - 4)
    losses = [1.0 if weight else NAN for weight in mask]
    assert close(batch_loss(losses, factors(aggregation, [width, width], mask)), expected, 1e-12)


def test_published_sums_of_twelve_tokens() -> None:
    losses, lengths = [float(value) for value in range(1, 13)], [3, 3, 3, 3]
    assert close(4 * batch_loss(losses, factors("sequence_mean_token_mean", lengths)), 26, 1e-12)
    one_trajectory = factors("trajectory_mean", lengths, trajectories=["a", "a", "a", "b"])
    assert close(2 * batch_loss(losses, one_trajectory), 16, 1e-12)
    assert close(batch_loss(losses, factors("token_sum", lengths)), 78, 1e-12)


def test_tokens_left_out_may_stay_in_the_denominator_or_not() -> None:
    losses, trained = [2.0, NAN, 4.0, INF], [1.0, 0.0, 1.0, 0.0]
    assert close(batch_loss(losses, factors("token_mean", [2, 2], trained)), 3.0, 1e-12)
    assert close(batch_loss(losses, factors("token_mean", [2, 2], trained, [1.0] * 4)), 1.5, 1e-12)
    gone = [1.0, 1.0, 0.0, 0.0]
    reduced = factors("sequence_mean_token_mean", [2, 2], gone)
    kept = factors("sequence_mean_token_mean", [2, 2], gone, [1.0] * 4)
    assert reduced.tolist() == [0.5, 0.5, 0, 0] and kept.tolist() == [0.25, 0.25, 0, 0]


def test_truncated_rows_leave_the_denominator() -> None:
    lengths = [6, 9, 4, 9, 5, 7, 9, 3]
    advantages = [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, 0.75, -0.25]
    weights = [0.0 if row in (1, 6) else 1.0 for row, length in enumerate(lengths) for _ in range(length)]
    losses = [-advantage for advantage, length in zip(advantages, lengths, strict=True) for _ in range(length)]
    assert close(batch_loss(losses, factors("token_mean", lengths, weights)), -1.75 / 34, 1e-12)


def test_every_target_of_the_mask_and_no_other_is_averaged() -> None:
    nll = [5.0, 0.7, 1.1, 0.2]
    assert close(batch_loss(nll, factors("token_mean", [4], [0.0, 1.0, 1.0, 1.0])), 2 / 3, 1e-12)


@pytest.mark.parametrize("cut", [[[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]]])
def test_no_cut_changes_loss_or_gradient(cut: list[list[int]]) -> None:
    lengths, values = [4, 1, 3], torch.tensor([1.0] * 4 + [5.0] + [7.0] * 3, dtype=DOUBLE, requires_grad=True)
    factor_T = factors("token_mean", lengths, [1.0] * 5 + [0.0] * 3)
    rows = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)])
    total = torch.zeros((), dtype=DOUBLE)
    for piece in cut:
        chosen = torch.isin(rows, torch.tensor(piece))
        total = total + token_sum(values[chosen], factor_T[chosen])
    assert close(total.item(), 1.8, 1e-12)
    assert all_close(gradient_list(total, values), [0.2] * 5 + [0.0] * 3, 1e-12)


def test_rows_of_a_trajectory_and_of_a_prompt_count_as_one() -> None:
    losses = [1.0, 1.0, 4.0, 7.0]
    settings = {"trajectories": ["a", "a", "b"], "groups": ["p", "q", "q"]}
    assert close(batch_loss(losses, factors("trajectory_mean", [2, 1, 1], **settings)), (2 + 7) / 2, 1e-12)
    assert close(batch_loss(losses, factors("prompt_mean", [2, 1, 1], **settings)), (1 + 5.5) / 2, 1e-12)


@pytest.mark.parametrize("aggregation", ALL)
def test_nothing_counted_is_zero_everywhere(aggregation: Aggregation) -> None:
    assert factors(aggregation, [2, 0, 1], [0.0] * 3).tolist() == [0.0] * 3
    assert factors(aggregation, [0, 0]).tolist() == [] and factors(aggregation, []).tolist() == []


@pytest.mark.parametrize("aggregation", ALL)
def test_random_ragged_batches_match_the_definition_in_any_order(aggregation: Aggregation) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        lengths = [rng.choice([0, 1, 1, 2, 5, 17]) for _ in range(rng.randint(1, 7))]
        rows = [row for row, length in enumerate(lengths) for _ in range(length)]
        counted = [0.0 if row % 3 == 2 else rng.choice([0.0, 1.0, 1.0, 0.3]) for row in rows]
        weights = [rng.choice([0.0, 1.0]) * count for count in counted]
        trajectories, groups = [str(row // 2) for row in range(len(lengths))], [rng.choice("pq") for _ in lengths]
        expected = plain_factors(aggregation, rows, weights, counted, trajectories, groups, 16)
        order = list(range(len(rows)))
        results = []
        for _ in range(3):
            factor_T = token_weights(
                aggregation,
                weights_T=torch.tensor([weights[i] for i in order], dtype=DOUBLE),
                counted_T=torch.tensor([counted[i] for i in order], dtype=DOUBLE),
                row_T=torch.tensor([rows[i] for i in order], dtype=torch.int64),
                num_rows=len(lengths),
                trajectory_ids=trajectories,
                group_ids=groups,
                fixed_length=16,
            ).tolist()
            results.append(dict(zip(order, factor_T, strict=True)))
            rng.shuffle(order)
        assert results[0] == results[1] == results[2]
        assert all_close([results[0][i] for i in range(len(rows))], expected, 1e-12)


def test_renumbered_rows_change_no_bit() -> None:
    counted = [0.1, 0.2, 0.3, 0.7, 1.0, 0.9]
    first = factors("prompt_mean", [1, 2, 3], counted, groups=["p", "q", "q"]).tolist()
    moved = [*counted[3:], counted[0], *counted[1:3]]
    second = factors("prompt_mean", [3, 1, 2], moved, groups=["q", "p", "q"]).tolist()
    assert first == [second[3], *second[4:], *second[:3]]


def test_an_aggregation_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="fixed_length=0 cannot divide"):
        factors("fixed_length", [2], fixed_length=0)
    with pytest.raises(ConfigError, match="aggregation='mean' is unknown; use one of token_mean"):
        factors("mean", [2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 ids given for 2 rows"):
        factors("prompt_mean", [2, 1], groups=["p"])


def test_sums_by_key_are_exact_and_keep_what_is_not_finite() -> None:
    values, keys = torch.tensor([1e16, 1.0, -1e16, 0.5], dtype=DOUBLE), torch.tensor([2, 2, 2, 0])
    assert exact_sums(values, keys, 4).tolist() == [0.5, 0.0, 1.0, 0.0]
    assert exact_sum([INF, 1.0]) == INF and math.isnan(exact_sum([INF, -INF])) and math.isnan(exact_sum([NAN, 1.0]))
    assert exact_sum([1e308, 1e308]) == INF and exact_sum([]) == 0.0
