"""The loss with a soft gate in place of a clip. Dims as in base."""

from __future__ import annotations

import math

import torch

from unison.algorithms.losses.base import MAX_LOG_RATIO, LossBatch, PolicyLoss
from unison.algorithms.losses.columns import capped_ratio, columns
from unison.algorithms.registry import register_loss
from unison.core.errors import ConfigError


@register_loss("sapo")
def sapo(batch: LossBatch, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> PolicyLoss:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A of each token -> [N].

    tau is ``temperature_positive`` where A > 0, ``temperature_negative`` where A < 0. The gradient is the policy
    gradient's where ratio = 1, and fades smoothly on both sides, the sooner the larger tau. Nothing is clipped:
    ``clipped`` tells where the log-ratio was capped. Source: SAPO (Gao et al. 2025). Departures: the log-ratio is
    capped at MAX_LOG_RATIO; a zero advantage gives exactly 0.

    Raises ConfigError for temperatures that are not positive.
    """
    settings = {"temperature_positive": temperature_positive, "temperature_negative": temperature_negative}
    for name, value in settings.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}={value} must be positive and finite; 1 is the usual value")
    at = columns(batch)
    # The unused branch is replaced before exp: a gradient of 0 times an infinite exp is NaN.
    ratio_N = torch.where(at.moves_N, at.log_ratio_N, 0.0).clamp(max=MAX_LOG_RATIO).exp()
    up_N, down_N = (4.0 / tau * torch.sigmoid(tau * (ratio_N - 1.0)) for tau in settings.values())
    gate_N = torch.where(at.advantages_N > 0, up_N, down_N)
    capped_N = at.moves_N & (at.log_ratio_N > MAX_LOG_RATIO)
    return PolicyLoss(torch.where(at.moves_N, -at.advantages_N * gate_N, 0.0), capped_ratio(at.log_ratio_N), capped_N)
