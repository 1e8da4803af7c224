"""Estimators of the KL divergence between policy and reference, one value per sampled token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from unison.core.errors import AlgorithmError, ConfigError

KlKind = Literal["k1", "k2", "k3", "low_var", "abs"]

MAX_LOG_RATIO: Final = 20.0
"""k3 caps reference - policy here before exp, so that value and gradient stay finite."""

MAX_DIFFERENCE: Final = 1e6
"""Largest difference of two log-probs; beyond lie only those of probability 0."""

MAX_LOW_VAR: Final = 10.0


KlFunction = Callable[[Tensor, Tensor], Tensor]
"""An estimator of one's own: (log-probs [T], the reference's [T]) -> [T], differentiable in the first."""


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: KlKind | KlFunction) -> Tensor:
    """KL(policy || reference) from log-probs [T] of tokens the policy sampled -> [T].

    Source: Schulman 2020, "Approximating KL divergence". With d = reference - policy:

    - k1 = -d. Unbiased; its own gradient has mean 0, so it is for rewards.
    - k2 = d^2 / 2. Biased; its gradient is that of the KL of the next token.
    - k3 = exp(d) - d - 1, never negative, 0 for equal inputs. Unbiased; its gradient is that of KL(reference ||
      policy) of the next token.
    - low_var: k3 of d within +-MAX_LOG_RATIO, at most MAX_LOW_VAR.
    - abs = |d|. No KL at all, but what is moved shows.

    Gradients are means over the tokens, each that of the next-token distribution at a state that was visited. The KL
    of whole sequences has another gradient, which also counts what states the policy comes to; k1 in the reward has it.

    Departures: in k3 d is capped at MAX_LOG_RATIO (value 4.85e8), in the others held within +-MAX_DIFFERENCE. Beyond
    a cap or bound the gradient is 0. Computed in float64, because k3 of close policies is a small difference of large
    terms; returned in the widest dtype given, float32 at least. Gradient flows to ``logprobs`` only. Raises
    ConfigError for an unknown kind.
    """
    dtype = torch.promote_types(torch.promote_types(logprobs.dtype, reference.dtype), torch.float32)
    if callable(kind):
        return _own_estimate(kind, logprobs, reference).to(dtype)
    difference = (reference.detach().double() - logprobs.double()).clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)
    if kind == "k1":
        value = -difference
    elif kind == "k2":
        value = difference.square() / 2
    elif kind == "k3":
        value = _k3(difference.clamp(max=MAX_LOG_RATIO))
    elif kind == "low_var":
        value = _k3(difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).clamp(max=MAX_LOW_VAR)
    elif kind == "abs":
        value = difference.abs()
    else:
        raise ConfigError(f"KL estimator {kind!r} is unknown; use one of {', '.join(get_args(KlKind))}")
    return value.to(dtype)


def ratio_weighted_kl(logprobs: Tensor, old_logprobs: Tensor, reference: Tensor, kind: KlKind | KlFunction) -> Tensor:
    """(policy / old policy) KL estimate from log-probs [T] of tokens the *old* policy sampled -> [T].

    The gradient flows through the ratio too. So with k1 or k3 it is, in the mean over samples, the gradient of
    KL(policy || reference) of the next token at the states visited, however far the policy has moved from the old one
    there. The states are those the old policy came to, and it is not the gradient of the KL of whole sequences. Source:
    the unbiased KL estimate of DeepSeek-V3.2 (2025). Departure: the log-ratio is capped at MAX_LOG_RATIO; beyond it the
    ratio is constant.
    """
    dtype = torch.promote_types(torch.promote_types(logprobs.dtype, reference.dtype), torch.float32)
    dtype = torch.promote_types(dtype, old_logprobs.dtype)
    ratio = (logprobs.double() - old_logprobs.detach().double()).clamp(max=MAX_LOG_RATIO).exp()
    return (ratio * kl_estimate(logprobs.double(), reference, kind)).to(dtype)


def _own_estimate(function: KlFunction, logprobs: Tensor, reference: Tensor) -> Tensor:
    value = function(logprobs, reference.detach())
    if not isinstance(value, Tensor) or value.shape != logprobs.shape:
        shape = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise AlgorithmError(f"the KL estimator {function!r} returned {shape}; one value per token is needed")
    return value


def _k3(difference: Tensor) -> Tensor:
    # Rounding may leave -1e-17 where the policies nearly agree.
    return (torch.expm1(difference) - difference).clamp(min=0.0)
