"""How the coefficient of the KL penalty follows the KL measured: pure functions, one call per training step."""

from __future__ import annotations

import math
from typing import Final

from unison.core.errors import ConfigError

MAX_ERROR: Final = 0.2
"""Relative error of the KL that one step of proportional control reacts to at most."""


def proportional(coef: float, kl: float, target: float, num_samples: int, horizon: int) -> float:
    """The next coefficient: coef (1 + error n / horizon), error = kl / target - 1 clipped to +-MAX_ERROR.

    ``num_samples`` n are those of this step; ``horizon`` is in samples too. Source: Ziegler et al. 2019. A KL that is
    NaN leaves the coefficient as it is. Raises ConfigError for a target or horizon that cannot be meant, among them a
    horizon so short that a step could take the coefficient to 0 or below.
    """
    _check_target(target)
    if not horizon > MAX_ERROR * num_samples:
        raise ConfigError(
            f"kl_horizon={horizon} with {num_samples} samples a step would let one step take the coefficient to 0 or "
            f"below; use more than {MAX_ERROR * num_samples:g}, like {max(10_000, 10 * num_samples)}"
        )
    if math.isnan(kl):
        return coef
    error = min(max(kl / target - 1.0, -MAX_ERROR), MAX_ERROR)
    return coef * (1.0 + error * num_samples / horizon)


def doubling(coef: float, kl: float, target: float) -> float:
    """The next coefficient: half where kl < target / 1.5, twice where kl > 1.5 target, else (and for NaN) the same.

    Source: the adaptive KL penalty of PPO (Schulman et al. 2017, section 4). Raises ConfigError for a target that is
    not positive.
    """
    _check_target(target)
    if kl < target / 1.5:
        return coef / 2
    return coef * 2 if kl > target * 1.5 else coef


def _check_target(target: float) -> None:
    if not 0 < target < math.inf:
        raise ConfigError(f"kl_target={target} must be positive and finite: the KL per token to steer to, like 0.1")
