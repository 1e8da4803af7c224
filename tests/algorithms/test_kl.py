from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import all_close, gradient, gradient_list, ragged_batches
from unison.algorithms.kl import KlKind, kl_estimate, ratio_weighted_kl
from unison.core.errors import ConfigError

KINDS: tuple[KlKind, ...] = ("k1", "k2", "k3", "low_var", "abs")


def estimate(policy: list[float], reference: list[float], kind: KlKind) -> list[float]:
    return kl_estimate(torch.tensor(policy), torch.tensor(reference), kind).tolist()


def test_published_values() -> None:
    policy, reference = [-1.0, -0.5, -2, -0.1], [-1.2, -0.4, -1, -0.1]
    assert all_close(estimate(policy, reference, "k1"), [0.2, -0.1, -1, 0])
    assert all_close(estimate(policy, reference, "k2"), [0.02, 0.005, 0.5, 0])
    assert all_close(estimate(policy, reference, "k3"), [0.018731, 0.005171, 0.718282, 0])
    assert all_close(estimate(policy, reference, "low_var"), [0.018731, 0.005171, 0.718282, 0])
    assert all_close(estimate(policy, reference, "abs"), [0.2, 0.1, 1, 0])
    assert all_close(estimate([-20.0, 0.0], [0.0, -20.0], "low_var"), [10, 10])
    assert all_close(estimate([-20.0, 0.0], [0.0, -20.0], "k2"), [200, 200])
    assert all_close(estimate([-20.0, 0.0], [0.0, -20.0], "k3"), [485165152, 19])


def test_values_and_slopes_of_ordinary_differences() -> None:
    policy = torch.tensor([-1.0, -2.0, -0.3, -3.0], requires_grad=True)
    reference = torch.tensor([-1.2, -1.0, -0.3, -0.5])
    assert all_close(kl_estimate(policy, reference, "k1").tolist(), [0.2, -1, 0, -2.5])
    assert all_close(kl_estimate(policy, reference, "k2").tolist(), [0.02, 0.5, 0, 3.125])
    value = kl_estimate(policy, reference, "k3")
    assert value.dtype == torch.float32
    assert all_close(value.tolist(), [0.018731, 0.718282, 0, 8.682494])
    assert all_close(gradient_list(value, policy), [0.181269, -1.718282, 0, -11.182494])


@pytest.mark.parametrize("policy_logprob", [-21.0, -120.0, -1e4, -math.inf])
def test_a_reference_far_above_the_policy_is_finite_forward_and_backward(policy_logprob: float) -> None:
    policy = torch.tensor([policy_logprob], requires_grad=True)
    value = kl_estimate(policy, torch.tensor([-0.1]), "k3")
    assert 0 < value.item() < math.inf
    (slope,) = gradient_list(value, policy)
    assert slope <= 0 and math.isfinite(slope)


def test_far_apart_values_of_the_other_estimators() -> None:
    assert all_close(estimate([-120.0], [-0.1], "k1"), [-119.9])
    assert all_close(estimate([-120.0], [-0.1], "k2"), [7188.005])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_inputs_give_exactly_zero(kind: KlKind) -> None:
    logprobs = -torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 50
    assert bool((kl_estimate(logprobs, logprobs.clone(), kind) == 0).all())


def test_k3_is_never_negative_even_for_the_closest_policies() -> None:
    policy = -torch.rand(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 20
    scales = 10.0 ** torch.linspace(-18, 1, 5000, dtype=torch.float64)
    for sign in (-1, 1):
        assert bool((kl_estimate(policy, policy + sign * scales, "k3") >= 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_random_ragged_batches_match_the_textbook_formula(kind: KlKind) -> None:
    formulas = {
        "k1": lambda d: -d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(d) - 1 - d,
        "low_var": lambda d: min(math.exp(d) - 1 - d, 10.0),
        "abs": lambda d: abs(d),
    }
    for batch in ragged_batches():
        policy = torch.tensor(batch.logprobs, dtype=torch.float64)
        reference = torch.tensor(batch.other_logprobs, dtype=torch.float64)
        expected = [formulas[kind](r - p) for p, r in zip(batch.logprobs, batch.other_logprobs, strict=True)]
        assert all_close(kl_estimate(policy, reference, kind).tolist(), expected, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_agrees_with_finite_differences(kind: KlKind) -> None:
    policy = torch.tensor([-1.0, -0.3, -4.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.2, -2.3, -0.5, -1.9], dtype=torch.float64)

    def value(x: Tensor) -> Tensor:
        return kl_estimate(x, reference, kind)

    assert torch.autograd.gradcheck(value, (policy,))


def test_the_reference_gets_no_gradient_and_unknown_kinds_are_refused() -> None:
    policy, reference = torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)
    value = kl_estimate(policy, reference, "k3")
    assert gradient(value, policy) is not None and gradient(value, reference) is None
    with pytest.raises(ConfigError, match="'k4' is unknown; use one of k1, k2, k3"):
        kl_estimate(policy, reference, "k4")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_differences_are_finite_forward_and_backward(kind: KlKind, dtype: torch.dtype) -> None:
    extremes = [150.0, -150.0, 1e4, -1e4, 1e30, -1e30, math.inf, -math.inf]
    for old in (0.0, 150.0, -150.0, -math.inf):
        policy = torch.tensor([-0.1] * len(extremes), dtype=dtype, requires_grad=True)
        reference, sampler = torch.tensor(extremes, dtype=dtype), torch.full((len(extremes),), old, dtype=dtype)
        for value in (kl_estimate(policy, reference, kind), ratio_weighted_kl(policy, sampler, reference, kind)):
            assert value.dtype == dtype and bool(value.isfinite().all())
            assert all(math.isfinite(slope) for slope in gradient_list(value, policy))


@pytest.mark.parametrize("kind", ["k3", "low_var"])
def test_beyond_its_cap_an_estimator_has_no_slope(kind: KlKind) -> None:
    policy = torch.tensor([-1.0, -30.0], dtype=torch.float64, requires_grad=True)
    value = kl_estimate(policy, torch.tensor([-1.0, -1.0], dtype=torch.float64), kind)
    assert gradient_list(value, policy) == [0.0, 0.0]


PROBABILITIES = [0.5, 0.25, 0.125, 0.0625, 0.0625]
REFERENCE = [0.2, 0.2, 0.2, 0.3, 0.1]
SAMPLER = [0.1, 0.3, 0.2, 0.1, 0.3]


def expected_slopes(kind: KlKind, weighted: bool, sampler: list[float]) -> list[float]:
    """Slope of the mean loss over all tokens that ``sampler`` may draw, with respect to the logits of the policy."""
    logits = torch.tensor(PROBABILITIES, dtype=torch.float64).log().requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    reference = torch.tensor(REFERENCE, dtype=torch.float64).log()
    drawn = torch.tensor(sampler, dtype=torch.float64)
    loss = (
        ratio_weighted_kl(logprobs, drawn.log(), reference, kind)
        if weighted
        else kl_estimate(logprobs, reference, kind)
    )
    return gradient_list(drawn * loss, logits)


def slope_of_reverse_kl() -> list[float]:
    """d KL(policy || reference) / d logit_j = p_j (log p_j / r_j - KL)."""
    gaps = [math.log(p / r) for p, r in zip(PROBABILITIES, REFERENCE, strict=True)]
    kl = math.fsum(p * gap for p, gap in zip(PROBABILITIES, gaps, strict=True))
    return [p * (gap - kl) for p, gap in zip(PROBABILITIES, gaps, strict=True)]


def test_k1_as_a_loss_moves_the_policy_nowhere() -> None:
    assert all_close(expected_slopes("k1", False, PROBABILITIES), [0.0] * 5, 1e-12)


def test_k3_as_a_loss_follows_the_kl_of_the_other_direction() -> None:
    forward = [p - r for p, r in zip(PROBABILITIES, REFERENCE, strict=True)]
    assert all_close(expected_slopes("k3", False, PROBABILITIES), forward, 1e-12)
    assert not all_close(forward, slope_of_reverse_kl(), 1e-2)


def test_k2_as_a_loss_follows_the_kl_itself() -> None:
    assert all_close(expected_slopes("k2", False, PROBABILITIES), slope_of_reverse_kl(), 1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("sampler", [PROBABILITIES, SAMPLER])
def test_weighted_by_the_ratio_k1_and_k3_follow_the_kl_itself_whoever_sampled(
    kind: KlKind, sampler: list[float]
) -> None:
    assert all_close(expected_slopes(kind, True, sampler), slope_of_reverse_kl(), 1e-12)


def test_values_of_k1_and_k3_average_to_the_kl_and_those_of_k2_do_not() -> None:
    policy, reference = torch.tensor(PROBABILITIES, dtype=torch.float64), torch.tensor(REFERENCE, dtype=torch.float64)
    kl = math.fsum(p * math.log(p / r) for p, r in zip(PROBABILITIES, REFERENCE, strict=True))
    means = {kind: (policy * kl_estimate(policy.log(), reference.log(), kind)).sum().item() for kind in KINDS}
    assert all_close([means["k1"], means["k3"]], [kl, kl], 1e-12) and abs(means["k2"] - kl) > 1e-2


def test_published_values_weighted_by_the_ratio() -> None:
    policy, reference = torch.tensor([-1.0, -0.5, -2, -0.1]), torch.tensor([-1.2, -0.4, -1, -0.1])
    old = policy - torch.tensor([1.1, 0.9, 1.0, 2.0]).log()
    assert all_close(ratio_weighted_kl(policy, old, reference, "k3").tolist(), [0.020604, 0.004654, 0.718282, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_random_ragged_batches_weighted_by_the_ratio_match_the_formula(kind: KlKind) -> None:
    for batch in ragged_batches():
        policy = torch.tensor(batch.logprobs, dtype=torch.float64, requires_grad=True)
        reference = torch.tensor(batch.other_logprobs, dtype=torch.float64)
        old = policy.detach() + torch.linspace(-1, 1, len(batch), dtype=torch.float64)
        estimates = kl_estimate(policy, reference, kind)
        value, slopes = ratio_weighted_kl(policy, old, reference, kind), gradient_list(estimates, policy)
        ratios = [math.exp(new - was) for new, was in zip(batch.logprobs, old.tolist(), strict=True)]
        rows = list(zip(ratios, estimates.tolist(), slopes, strict=True))
        assert all_close(value.tolist(), [ratio * kl for ratio, kl, _ in rows], 1e-12)
        assert all_close(gradient_list(value, policy), [ratio * (kl + slope) for ratio, kl, slope in rows], 1e-12)


def test_the_ratio_is_of_the_policy_and_only_that_gets_gradient() -> None:
    policy, old, reference = (torch.tensor([-1.0 - i], requires_grad=True) for i in range(3))
    value = ratio_weighted_kl(policy, old, reference, "k3")
    assert [gradient(value, tensor) is None for tensor in (policy, old, reference)] == [False, True, True]
