"""Estimators of the KL divergence between policy and reference, one value per sampled token."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from unison.core.errors import ConfigError

KlKind = Literal["k1", "k2", "k3", "low_var", "abs"]

MAX_LOG_RATIO = 20.0
"""k3 caps reference - policy here before exp, so that value and gradient stay finite."""


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: KlKind) -> Tensor:
    """KL(policy || reference) from log-probs [T] of tokens the policy sampled -> [T].

    Source: Schulman 2020, "Approximating KL divergence". With d = reference - policy:
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 (never negative, 0 for equal inputs).

    Departure: in k3 d is capped at MAX_LOG_RATIO (value 4.85e8, gradient 0 beyond). Computed in float64,
    because k3 of close policies is a small difference of large terms; returned in the widest dtype given,
    float32 at least. Gradient flows to ``logprobs`` only. Raises ConfigError for an unknown kind.
    """
    dtype = torch.promote_types(torch.promote_types(logprobs.dtype, reference.dtype), torch.float32)
    policy, fixed = logprobs.double(), reference.detach().double()
    if kind == "k1":
        value = policy - fixed
    elif kind == "k2":
        value = (fixed - policy).square() / 2
    elif kind == "k3":
        difference = (fixed - policy).clamp(max=MAX_LOG_RATIO)
        # Rounding may leave -1e-17 where the policies nearly agree.
        value = (torch.expm1(difference) - difference).clamp(min=0.0)
    else:
        raise ConfigError(f"KL estimator {kind!r} is unknown; use one of {', '.join(get_args(KlKind))}")
    return value.to(dtype)
