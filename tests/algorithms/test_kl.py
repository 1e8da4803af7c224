from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import all_close, gradient, gradient_list, ragged_batches
from unison.algorithms.kl import KlKind, kl_estimate
from unison.core.errors import ConfigError

KINDS: tuple[KlKind, ...] = ("k1", "k2", "k3")


def estimate(policy: list[float], reference: list[float], kind: KlKind) -> list[float]:
    return kl_estimate(torch.tensor(policy), torch.tensor(reference), kind).tolist()


def test_published_values() -> None:
    policy, reference = [-1.0, -0.5, -2, -0.1], [-1.2, -0.4, -1, -0.1]
    assert all_close(estimate(policy, reference, "k1"), [0.2, -0.1, -1, 0])
    assert all_close(estimate(policy, reference, "k2"), [0.02, 0.005, 0.5, 0])
    assert all_close(estimate(policy, reference, "k3"), [0.018731, 0.005171, 0.718282, 0])
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
    formulas = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}
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
