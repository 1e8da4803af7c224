"""What holds for every policy loss."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.loss_batches import batch_of, random_sequences, sequence, values_and_slopes
from tests.algorithms.ragged import all_close, gradient, gradient_list
from unison.algorithms.losses.base import PolicyLoss
from unison.algorithms.registry import find_loss, names, settings_of
from unison.core.errors import ConfigError

INF, NAN = math.inf, math.nan
LOSSES = names("loss")
TOKEN_LOSSES = ["cispo", "clipped", "dppo", "policy_gradient", "sapo"]
SEQUENCE_LOSSES = ["gmpo", "gspo", "mirror"]
"""One value per sequence."""


def test_the_families_are_there() -> None:
    assert {*TOKEN_LOSSES, *SEQUENCE_LOSSES, "gspo_token", "opsm"} <= set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_the_cut_into_batches_changes_nothing(name: str) -> None:
    loss = find_loss(name)
    for sequences in random_sequences():
        values, slopes = values_and_slopes(loss, sequences)
        for size in (1, 2):
            pieces = [values_and_slopes(loss, sequences[i : i + size]) for i in range(0, len(sequences), size)]
            assert all_close([value for piece, _ in pieces for value in piece], values, 1e-12)
            assert all_close([slope for _, piece in pieces for slope in piece], slopes, 1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_the_order_of_sequences_changes_nothing(name: str) -> None:
    loss = find_loss(name)
    for sequences in random_sequences():
        values, slopes = values_and_slopes(loss, sequences)
        turned = values_and_slopes(loss, sequences[::-1])
        ends = [len(one.new) for one in sequences[::-1]]
        for column, back in zip((values, slopes), turned, strict=True):
            cut = [back[sum(ends[:i]) : sum(ends[: i + 1])] for i in range(len(ends))]
            assert all_close([value for piece in cut[::-1] for value in piece], column, 1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_flows_to_the_log_probs_only(name: str) -> None:
    batch = batch_of([sequence([-1.0, -2.0], [-1.1, -2.0]), sequence([-0.3], [-0.2], -2.0)])
    others = {
        column: getattr(batch, column).clone().requires_grad_()
        for column in ("old_logprobs_N", "advantages_N", "rollout_logprobs_N")
    }
    out = find_loss(name)(dataclasses.replace(batch, **others))
    assert gradient(out.loss, batch.logprobs_N) is not None
    assert all(gradient(out.loss, column) is None for column in others.values())
    assert not out.ratio.requires_grad and out.clipped.dtype == torch.bool
    assert out.loss.shape == out.ratio.shape == out.clipped.shape == (3,)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_float64_stays_and_anything_else_becomes_float32(name: str, dtype: torch.dtype) -> None:
    out = find_loss(name)(batch_of([sequence([-1.0, -2.0], [-1.1, -2.0])], dtype))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert out.loss.dtype == out.ratio.dtype == expected


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ratio_is_exactly_one_on_the_policy_that_sampled(name: str, dtype: torch.dtype) -> None:
    batch = batch_of([sequence([-0.1 * i for i in range(1, 50)]), sequence([-3.3], advantages=-1.0)], dtype)
    out = find_loss(name)(batch)
    assert bool((out.ratio == 1.0).all()) and not bool(out.clipped.any())


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "mirror"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_step_is_the_policy_gradient(name: str, dtype: torch.dtype) -> None:
    sequences = [sequence([-0.5, -1.5, -0.01], advantages=0.7), sequence([-2.5], advantages=-1.3)]
    batch = batch_of(sequences, dtype)
    assert all_close(gradient_list(find_loss(name)(batch).loss, batch.logprobs_N), [-0.7] * 3 + [1.3], 1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_without_a_token_is_nothing(name: str) -> None:
    for sequences in ([], [sequence([])]):
        batch = batch_of(sequences)
        out = find_loss(name)(batch)
        assert out.loss.shape == (0,) and gradient_list(out.loss, batch.logprobs_N) == []


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "mirror"])
@pytest.mark.parametrize("old", [0.0, 1e4, -1e4, INF, -INF, NAN])
def test_sequences_of_zero_advantage_have_exactly_no_loss_and_no_gradient(name: str, old: float) -> None:
    idle = sequence([-1.0, -0.5], [old, -0.5], 0.0)
    batch = batch_of([idle, sequence([-2.0]), idle], torch.float32)
    out = find_loss(name)(batch)
    assert out.loss.tolist()[:2] == [0.0, 0.0] == out.loss.tolist()[3:]
    slopes = gradient_list(out.loss, batch.logprobs_N)
    assert slopes == [0.0, 0.0, -1.0, 0.0, 0.0]
    assert not bool(out.clipped[[0, 1, 3, 4]].any())


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("value", [1e4, -1e4, INF, -INF, NAN])
def test_tokens_of_zero_advantage_have_exactly_no_loss_and_no_gradient(name: str, value: float) -> None:
    for column in ("new", "old", "rollout"):
        odd = dataclasses.replace(sequence([-1.0, -1.0], None, [0.0, 1.0]), **{column: [value, -1.0]})
        batch = batch_of([odd], torch.float32)
        out = find_loss(name)(batch)
        assert out.loss[0].item() == 0.0 and math.isfinite(out.loss[1].item())
        assert gradient_list(out.loss, batch.logprobs_N) == [0.0, -1.0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_ratios_have_finite_values_and_gradients(name: str, advantage: float, dtype: torch.dtype) -> None:
    for gap in (150.0, -150.0, 1e4, -1e4):
        new, old = (-0.1, -0.1 - gap) if gap > 0 else (-0.1 + gap, -0.1)
        for extra in ([], [-1.0, -2.0]):
            batch = batch_of([sequence([new, *extra], [old, *extra], advantage)], dtype)
            out = find_loss(name)(batch)
            assert bool(out.loss.isfinite().all()) and bool(out.ratio.isfinite().all())
            assert all(math.isfinite(slope) for slope in gradient_list(out.loss, batch.logprobs_N))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_the_old_policy_could_not_sample_is_finite(name: str, advantage: float) -> None:
    batch = batch_of([sequence([-0.5, -1.0], [-INF, -1.0], advantage)], torch.float32)
    out = find_loss(name)(batch)
    assert bool(out.loss.isfinite().all()) and float(out.ratio.max()) <= math.exp(20) * 1.0001
    assert all(math.isfinite(slope) for slope in gradient_list(out.loss, batch.logprobs_N))


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("policy_gradient", "cispo")])
def test_a_token_the_policy_gives_up_is_finite(name: str) -> None:
    batch = batch_of([sequence([-INF, -1.0], [-0.5, -1.0], -1.0)], torch.float32)
    out = find_loss(name)(batch)
    assert bool(out.loss.isfinite().all())
    assert all(math.isfinite(slope) for slope in gradient_list(out.loss, batch.logprobs_N))


@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
def test_a_sequence_has_one_value_at_all_of_its_tokens(name: str) -> None:
    for sequences in random_sequences():
        batch = batch_of(sequences)
        out = find_loss(name)(batch)
        for i in range(batch.num_sequences):
            assert len(set(out.loss[batch.sequence_N == i].tolist())) <= 1


@pytest.mark.parametrize("name", LOSSES)
def test_a_long_sequence_of_extreme_tokens_stays_finite(name: str) -> None:
    batch = batch_of([sequence([-0.1] * 3000, [-1e4] * 3000, -1.0)], torch.float32)
    out = find_loss(name)(batch)
    assert bool(out.loss.isfinite().all())
    assert all(math.isfinite(slope) for slope in gradient_list(out.loss, batch.logprobs_N))


DIFFERENTIABLE = ["clipped", "gmpo", "gspo", "mirror", "policy_gradient", "sapo", "opsm"]
"""Without a stopped gradient, which finite differences cannot see."""


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    loose: dict[str, Any] = {"clip_low": 0.5, "clip_high": 0.9} if name in ("gspo", "gmpo", "clipped") else {}
    batch = batch_of(
        [
            sequence([-1.0, -0.2, -3.0], [-1.1, -0.9, -2.0], 0.5),
            sequence([-1.0], [-1.25], -1.0),
            sequence([-0.7, -2.0, -0.1], [-2.7, -2.0, -0.3], [-0.3, 0.0, 0.6]),
            sequence([-1.0, -1.0], [-2.0, -1.5], 0.0),
        ]
    )

    def loss(logprobs_N: Tensor) -> Tensor:
        out: PolicyLoss = find_loss(name)(dataclasses.replace(batch, logprobs_N=logprobs_N), **loose)
        return out.loss

    assert torch.autograd.gradcheck(loss, (batch.logprobs_N,))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gspo", {"clip_low": 1.0}),
        ("gspo", {"clip_high": -0.1}),
        ("gspo_token", {"clip_low": -0.1}),
        ("gmpo", {"clip_low": -0.1}),
        ("gmpo", {"clip_high": NAN}),
        ("cispo", {"clip_low": 1.1}),
        ("cispo", {"clip_low": NAN}),
        ("cispo", {"clip_high": -1.0}),
        ("sapo", {"temperature_positive": 0.0}),
        ("sapo", {"temperature_negative": INF}),
        ("mirror", {"tau": 0.0}),
        ("mirror", {"tau": NAN}),
        ("dppo", {"mask_threshold": 0.0}),
        ("dppo", {"mask_threshold": 1.0}),
        ("dppo", {"divergence": "hellinger"}),
        ("opsm", {"mask_threshold": -0.1}),
        ("opsm", {"dual_clip": 0.5}),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name_and_value(name: str, settings: dict[str, Any]) -> None:
    ((key, value),) = settings.items()
    assert key in settings_of(find_loss(name))
    with pytest.raises(ConfigError, match=f"{key}={value!r}"):
        find_loss(name)(batch_of([sequence([-1.0])]), **settings)
