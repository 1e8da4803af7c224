from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from tests.algorithms.ragged import RaggedBatch, all_close, close, gradient_list, ragged_batches
from unison.algorithms.aggregation import token_sum, token_weights
from unison.algorithms.corrections import Corrected, Correction, correct
from unison.core.errors import ConfigError
from unison.observability.metrics import METRICS

NAN, INF = math.nan, math.inf
DOUBLE = torch.float64
TRAINER = [-1.0, -0.5, -2.0, -0.3, -0.9, -1.4]
ROLLOUT = [-1.2, -0.5, -1.0, -0.4, -0.9, -0.2]
MASK = [1, 1, 1, 0, 1, 1]
OWNER = [0, 0, 0, 0, 1, 1]


def run(
    correction: Correction,
    trainer: list[float],
    rollout: list[float],
    mask: list[int] | None = None,
    owner: list[int] | None = None,
    num_trajectories: int | None = None,
) -> Corrected:
    owner = owner if owner is not None else [0] * len(trainer)
    return correct(
        correction,
        trainer_logprobs_T=torch.tensor(trainer, dtype=DOUBLE),
        rollout_logprobs_T=torch.tensor(rollout, dtype=DOUBLE),
        trained_T=torch.tensor(mask if mask is not None else [1] * len(trainer), dtype=torch.bool),
        trajectory_T=torch.tensor(owner, dtype=torch.int64),
        num_trajectories=max(owner, default=-1) + 1 if num_trajectories is None else num_trajectories,
    )


def of_gaps(correction: Correction, gaps: list[float], owner: list[int] | None = None) -> Corrected:
    return run(correction, gaps, [0.0] * len(gaps), owner=owner)


def bounds(lower: float, upper: float) -> dict[str, float]:
    return {"lower": lower, "upper": upper}


def rejects(level: str, lower: float, upper: float, **more: Any) -> dict[str, Any]:
    return {"reject": level, "reject_lower": lower, "reject_upper": upper, **more}


@pytest.mark.parametrize(
    ("settings", "weights", "kept"),
    [
        ({"weight": "token"}, [1.221403, 1, 0.367879, 1, 1, 0.301194], MASK),
        ({"weight": "token", "upper": 1.1}, [1.1, 1, 0.367879, 1, 1, 0.301194], MASK),
        ({"weight": "token", "mode": "clip", **bounds(0.5, 2)}, [1.221403, 1, 0.5, 1, 1, 0.5], MASK),
        (
            {"weight": "token", "mode": "mask", **bounds(0.5, 2)},
            [1.221403, 1, 0.367879, 1, 1, 0.301194],
            [1, 1, 0, 0, 1, 0],
        ),
        ({"weight": "sequence"}, [0.449329] * 3 + [1] + [0.301194] * 2, MASK),
        ({"weight": "geometric"}, [0.765928] * 3 + [1] + [0.548812] * 2, MASK),
        (
            {"weight": "geometric", "mode": "mask", **bounds(0.9, 1.1)},
            [0.765928] * 3 + [1] + [0.548812] * 2,
            [0] * 6,
        ),
        (rejects("token", 0.5, 2), [1] * 6, [1, 1, 0, 0, 1, 0]),
        (rejects("sequence", 0.5, 2), [1] * 6, [0] * 6),
        (rejects("geometric", 0.5, 2, veto=0.35), [1] * 6, [1, 1, 1, 0, 0, 0]),
        ({"veto": 0.35}, [1] * 6, [1, 1, 1, 0, 0, 0]),
        ({"weight": "token", "normalize": True}, [1.569734, 1.285190, 0.472795, 1, 1.285190, 0.387092], MASK),
        ({"weight": "sequence", "normalize": True}, [1.197375] * 3 + [1] + [0.802625] * 2, MASK),
        ({"weight": "geometric", "normalize": True}, [1.165140] * 3 + [1] + [0.834860] * 2, MASK),
    ],
)
def test_published_weights_and_masks(settings: dict[str, Any], weights: list[float], kept: list[int]) -> None:
    trainer, rollout = [*TRAINER], [*ROLLOUT]
    for rubbish in ((-0.3, -0.4), (NAN, 0.0), (INF, INF), (-INF, 1e300)):
        trainer[3], rollout[3] = rubbish
        result = run(Correction(**settings), trainer, rollout, MASK, OWNER)
        assert all_close(result.weights_T.tolist(), weights)
        assert result.kept_T.tolist() == [bool(flag) for flag in kept]
        assert all(math.isfinite(value) for value in result.metrics.values())
        METRICS.check(result.metrics)


def test_published_truncation_and_band() -> None:
    trainer, rollout, owner = [-1.0, -0.5, -2.0], [-1.5, -0.5, -0.5], [0, 0, 1]
    raw = run(Correction(weight="token", upper=9.0), trainer, rollout, owner=owner)
    assert all_close(raw.weights_T.tolist(), [1.648721, 1, 0.223130])
    cut = run(Correction(weight="token", upper=1.5), trainer, rollout, owner=owner)
    assert all_close(cut.weights_T.tolist(), [1.5, 1, 0.223130])
    assert close(cut.metrics["mismatch/weight_truncated_share"], 1 / 3)
    band = run(Correction(weight="token", mode="mask", lower=0.5, upper=1.5), trainer, rollout, owner=owner)
    assert band.kept_T.tolist() == [False, True, False]
    assert close(band.metrics["mismatch/weight_masked_share"], 2 / 3)
    assert close(band.metrics["mismatch/kept_share"], 1 / 3)


def test_capped_weights_scale_the_loss_of_each_token_and_carry_no_gradient() -> None:
    gaps = torch.tensor([0.2, -2.0, 0.05, 1.5], dtype=DOUBLE)
    rollout = torch.full((4,), -3.0, dtype=DOUBLE, requires_grad=True)
    trainer = (gaps + rollout.detach()).requires_grad_()
    ones = torch.ones(4, dtype=torch.bool)
    weights, _, metrics = correct(
        Correction(old="trainer", weight="token", upper=2.0),
        trainer_logprobs_T=trainer,
        rollout_logprobs_T=rollout,
        trained_T=ones,
        trajectory_T=torch.zeros(4, dtype=torch.int64),
        num_trajectories=1,
    )
    assert all_close(weights.tolist(), [1.221403, 0.135335, 1.051271, 2.0]) and not weights.requires_grad
    assert metrics["mismatch/weight_truncated_share"] == 0.25
    losses = torch.tensor([2.0, -1.0, 4.0, 3.0], dtype=DOUBLE, requires_grad=True)
    mean = token_sum(losses * weights, ones) / 4
    assert close(mean.item(), 3.128139) and all_close(gradient_list(mean, losses), (weights / 4).tolist(), 1e-12)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"weight": "token", "mode": "clip", **bounds(0.5, 5)}, [-1.25, -0.25, -0.25, -0.125]),
        ({"weight": "token", "mode": "truncate", "upper": 5.0}, [-1.25, -0.25, -0.25, -0.033834]),
        ({"weight": "token", "mode": "mask", **bounds(0.5, 5)}, [0, -0.25, -0.25, 0]),
        (
            {"weight": "token", "mode": "truncate", "upper": 5.0, **rejects("geometric", 0.5, 5)},
            [-1.25, -0.25, -0.25, -0.033834],
        ),
    ],
)
def test_gradient_of_each_token_under_a_correction(settings: dict[str, Any], expected: list[float]) -> None:
    logprobs = torch.zeros(4, dtype=DOUBLE, requires_grad=True)
    result = of_gaps(Correction(**settings), [4.0, 0.0, 0.0, -2.0])
    factor = result.weights_T * result.kept_T / 4
    assert all_close(gradient_list(token_sum(-logprobs.exp(), factor), logprobs), expected)


def test_bounds_are_of_trainer_over_rollout_and_belong_to_what_is_kept() -> None:
    gaps = [math.log(ratio) for ratio in (0.6, 1.8, 0.45, 1.0)]
    for settings in (rejects("token", 0.5, 1.2), {"weight": "token", "mode": "mask", **bounds(0.5, 1.2)}):
        assert of_gaps(Correction(**settings), gaps).kept_T.tolist() == [True, False, False, True]
    on_bounds = of_gaps(Correction(**rejects("token", math.exp(-0.5), math.exp(0.25))), [-0.5, 0.25])
    assert on_bounds.kept_T.all()


def test_a_veto_drops_its_whole_sequence_and_needs_no_rejection() -> None:
    gaps, owner = [0.0, math.log(1e-5), 0.0, math.log(2e-4)], [0, 0, 1, 1]
    result = of_gaps(Correction(veto=1e-4), gaps, owner)
    assert result.kept_T.tolist() == [False, False, True, True] and result.weights_T.tolist() == [1.0] * 4
    assert result.metrics["mismatch/vetoed_share"] == 0.5
    assert "mismatch/rejected_share" not in result.metrics
    assert of_gaps(Correction(veto=1e-12), [-27.0, -28.0], [0, 1]).kept_T.tolist() == [True, False]


def test_only_what_is_kept_counts_in_the_normalisation() -> None:
    gaps, owner = [math.log(2), 0.0, math.log(50)], [0, 0, 1]
    token = of_gaps(Correction(weight="token", upper=99.0, normalize=True, **rejects("token", 0.5, 3)), gaps, owner)
    assert all_close(token.weights_T.tolist(), [2 / 1.5, 1 / 1.5, 50 / 1.5])
    assert close(token.metrics["mismatch/weight_mean"], 1.0)
    sequence = of_gaps(Correction(weight="sequence", upper=99.0, normalize=True, veto=0.9), gaps, owner)
    assert all_close(sequence.weights_T.tolist(), [2 / 26, 2 / 26, 50 / 26])
    none = of_gaps(Correction(weight="token", normalize=True, **rejects("sequence", 0.9, 1.1)), gaps, owner)
    assert none.kept_T.sum() == 0 and none.weights_T.tolist() == pytest.approx([2.0, 1.0, 2.0])
    assert none.metrics["mismatch/effective_share"] == 0.0


def test_effective_share_counts_what_is_left_out_as_weight_zero() -> None:
    gaps = [math.log(value) for value in (1.0, 3.0, 100.0)]
    clipped = of_gaps(Correction(weight="token", mode="clip", lower=0.5, upper=3.0), gaps)
    assert close(clipped.metrics["mismatch/effective_share"], 7**2 / 19 / 3)
    masked = of_gaps(Correction(weight="token", mode="mask", lower=0.5, upper=3.5), gaps)
    assert close(masked.metrics["mismatch/effective_share"], 4**2 / 10 / 3)


def test_extreme_ratios_stay_finite() -> None:
    gaps = [149.5, -149.5, INF, -INF]
    for level in ("token", "sequence", "geometric"):
        result = of_gaps(Correction(weight=level, upper=INF), gaps, [0, 1, 2, 3])
        big, small = math.exp(20), math.exp(-20)
        assert all_close(result.weights_T.tolist(), [big, small, big, small], 1e-12)
    assert of_gaps(Correction(veto=1e-4), gaps, [0, 1, 2, 3]).kept_T.tolist() == [True, False, True, False]


def test_a_nan_in_a_trained_place_shows_and_is_not_left_out() -> None:
    result = of_gaps(Correction(weight="token", mode="mask", lower=0.5, veto=0.1, reject="token"), [NAN, 0.0])
    assert result.kept_T.tolist() == [True, True] and math.isnan(result.weights_T[0])
    assert math.isnan(result.metrics["mismatch/k3"]) and math.isnan(result.metrics["mismatch/weight_max"])


def test_equal_sides_are_left_exactly_as_they_are() -> None:
    logprobs = [-0.105, -0.223, -3.912]
    for level in ("token", "sequence", "geometric"):
        correction = Correction(
            weight=level,
            mode="mask",
            lower=0.999,
            upper=1.001,
            normalize=True,
            veto=0.99,
            **rejects(level, 0.999, 1.001),
        )
        result = run(correction, logprobs, logprobs, owner=[0, 0, 1])
        assert result.weights_T.tolist() == [1.0] * 3 and result.kept_T.all()
        assert result.metrics["mismatch/effective_share"] == 1.0


def test_nothing_trained_is_no_correction() -> None:
    everything = Correction(weight="sequence", mode="mask", normalize=True, reject="geometric", veto=0.5)
    masked = run(everything, [NAN, 1.0], [INF, NAN], [0, 0], [0, 2], 3)
    assert masked.weights_T.tolist() == [1.0, 1.0] and not masked.kept_T.any()
    assert all(math.isfinite(value) for value in masked.metrics.values())
    assert run(everything, [], [], [], [], 0).weights_T.tolist() == []


LEVELS = ("none", "token", "sequence", "geometric")


def plain_ratio(level: str, gaps: list[float], index: int) -> float:
    if level == "token":
        return math.exp(gaps[index])
    if level == "none":
        return 1.0
    return math.exp(sum(gaps) / (1 if level == "sequence" else len(gaps)))


def plain(
    correction: Correction, gaps: list[float], mask: list[bool], owner: list[int]
) -> tuple[list[float], list[bool]]:
    """From the definition, token by token."""
    members: dict[int, list[int]] = {}
    for token, (row, flag) in enumerate(zip(owner, mask, strict=True)):
        if flag:
            members.setdefault(row, []).append(token)
    weights, kept = [1.0] * len(gaps), [False] * len(gaps)
    for tokens in members.values():
        own = [gaps[token] for token in tokens]
        vetoed = any(math.exp(gap) < correction.veto for gap in own)
        for index, token in enumerate(tokens):
            ratio, other = plain_ratio(correction.weight, own, index), plain_ratio(correction.reject, own, index)
            keep = not vetoed
            if correction.mode == "truncate" and correction.weight != "none":
                ratio = min(ratio, correction.upper)
            elif correction.mode == "clip" and correction.weight != "none":
                ratio = min(max(ratio, correction.lower), correction.upper)
            elif correction.weight != "none":
                keep = keep and correction.lower <= ratio <= correction.upper
            if correction.reject != "none":
                keep = keep and correction.reject_lower <= other <= correction.reject_upper
            weights[token], kept[token] = ratio, keep
    if correction.normalize:
        by_token = [weights[token] for token in range(len(gaps)) if kept[token]]
        by_row = [
            next(weights[token] for token in tokens if kept[token])
            for tokens in members.values()
            if any(kept[token] for token in tokens)
        ]
        values = by_token if correction.weight == "token" else by_row
        scale = sum(values) / len(values) if values else 1.0
        weights = [weight / scale if flag else weight for weight, flag in zip(weights, mask, strict=True)]
    return weights, kept


def random_correction(rng: random.Random) -> Correction:
    weight = rng.choice(LEVELS)
    return Correction(
        old="trainer",
        weight=weight,  # type: ignore[arg-type]
        mode=rng.choice(("truncate", "clip", "mask")),  # type: ignore[arg-type]
        lower=rng.uniform(0.1, 0.9),
        upper=rng.uniform(1.1, 4),
        normalize=weight != "none" and rng.random() < 0.5,
        reject=rng.choice(LEVELS),  # type: ignore[arg-type]
        reject_lower=rng.uniform(0.1, 0.9),
        reject_upper=rng.uniform(1.1, 4),
        veto=rng.choice((0.0, 0.2)),
    )


def of_batch(correction: Correction, batch: RaggedBatch, order: list[int], owner: list[int]) -> Corrected:
    trainer, rollout = [batch.logprobs[i] for i in order], [batch.other_logprobs[i] for i in order]
    mask = [int(batch.weights[i] != 0) for i in order]
    return run(correction, trainer, rollout, mask, [owner[i] for i in order], len(batch.row_ends))


def test_random_ragged_batches_match_the_definition_in_any_order() -> None:
    rng = random.Random(0)
    for batch in ragged_batches(80):
        correction = random_correction(rng)
        owner = [sum(token >= end for end in batch.row_ends) for token in range(len(batch))]
        order = list(range(len(batch)))
        result = of_batch(correction, batch, order, owner)
        gaps = [t - r for t, r in zip(batch.logprobs, batch.other_logprobs, strict=True)]
        weights, kept = plain(correction, gaps, [weight != 0 for weight in batch.weights], owner)
        assert result.kept_T.tolist() == kept
        assert all_close(result.weights_T.tolist(), weights, 1e-9)
        rng.shuffle(order)
        moved = of_batch(correction, batch, order, owner)
        assert moved.weights_T.tolist() == result.weights_T[order].tolist()
        assert moved.kept_T.tolist() == result.kept_T[order].tolist() and moved.metrics == result.metrics


def test_no_cut_changes_a_corrected_loss() -> None:
    rng = random.Random(1)
    for batch in ragged_batches(20):
        correction = random_correction(rng)
        owner = [sum(token >= end for end in batch.row_ends) for token in range(len(batch))]
        result = of_batch(correction, batch, list(range(len(batch))), owner)
        rows = torch.tensor(owner, dtype=torch.int64)
        factor = token_weights(
            "sequence_mean_token_mean",
            weights_T=result.weights_T * result.kept_T,
            counted_T=(torch.tensor(batch.weights) != 0).double(),
            row_T=rows,
            num_rows=len(batch.row_ends),
            trajectory_ids=batch.row_ends,
            group_ids=batch.row_ends,
            fixed_length=1,
        )
        losses = torch.tensor(batch.advantages, dtype=DOUBLE)
        whole = token_sum(losses, factor).item()
        pieces = [token_sum(losses[rows == row], factor[rows == row]).item() for row in range(len(batch.row_ends))]
        assert close(math.fsum(pieces), whole, 1e-12)


def test_what_is_computed_again_and_what_may_be_left_out() -> None:
    assert not Correction().needs_recompute and not Correction().leaves_out
    assert Correction(old="trainer").needs_recompute
    for settings in ({"reject": "token"}, {"veto": 1e-4}, {"weight": "token", "mode": "mask"}):
        assert Correction(**settings).needs_recompute and Correction(**settings).leaves_out
    assert not Correction(weight="token").leaves_out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"weight": "token", "mode": "clip", **bounds(1, 1)},
            r"correction\.lower=1 is not below correction\.upper=1; raise",
        ),
        ({"reject": "token", "reject_lower": 3.0}, r"correction\.reject_lower=3 is not in \[0, 1\]"),
        ({"weight": "token", "upper": 0.8}, r"correction\.upper=0\.8 is below 1"),
        ({"weight": "token", "mode": "mask", **bounds(1.5, 2)}, r"correction\.lower=1\.5 is not in \[0, 1\]"),
        ({"weight": "token", "upper": NAN}, r"correction\.upper=nan"),
        ({"reject": "token", "reject_upper": 0.9}, r"correction\.reject_upper=0\.9 is below 1"),
        ({"veto": 1.0}, r"correction\.veto=1\.0 must be in \[0, 1\)"),
    ],
)
def test_bounds_that_cannot_be_meant_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Correction(**settings)
