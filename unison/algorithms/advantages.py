"""Advantage estimators, found by registered name or as a user's ``module:function``."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from unison.config.names import did_you_mean
from unison.core.errors import ConfigError, RewardError
from unison.core.records import MAX_ABS_REWARD


class AdvantageEstimator(Protocol):
    """Turns the rewards of a batch into one advantage per sample, in the order given."""

    def __call__(
        self,
        rewards: Tensor,
        group_ids: Sequence[Hashable],
        valid: Tensor,
        *,
        normalize_std: bool,
        epsilon: float,
    ) -> Tensor: ...


ADVANTAGES: dict[str, AdvantageEstimator] = {}

_Estimator = TypeVar("_Estimator", bound=AdvantageEstimator)


def register_advantage(name: str) -> Callable[[_Estimator], _Estimator]:
    """Decorator that puts an estimator under ``name``. Raises ConfigError where the name is taken."""

    def register(estimator: _Estimator) -> _Estimator:
        if name in ADVANTAGES:
            raise ConfigError(f"advantage estimator {name!r} is registered already; choose another name")
        ADVANTAGES[name] = estimator
        return estimator

    return register


def get_advantage(name: str) -> AdvantageEstimator:
    """The estimator of a registered name or of ``module:function``. Raises ConfigError where there is none."""
    if ":" in name:
        return _load_estimator(name)
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    raise ConfigError(
        f"algorithm.name={name!r} is no advantage estimator{did_you_mean(name, ADVANTAGES)}; "
        f"known: {', '.join(sorted(ADVANTAGES))}, or module:function of your own"
    )


def _load_estimator(path: str) -> AdvantageEstimator:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"algorithm.name={path!r}: importing {module_name!r} failed ({type(error).__name__}: {error}); "
            "the module must be importable from where the run is started"
        ) from error
    estimator = getattr(module, attribute, None)
    if not callable(estimator):
        raise ConfigError(
            f"algorithm.name={path!r}: {module_name!r} has no function {attribute!r}"
            f"{did_you_mean(attribute, vars(module))}"
        )
    return cast(AdvantageEstimator, estimator)


@register_advantage("grpo")
def group_advantages(
    rewards: Tensor,
    group_ids: Sequence[Hashable],
    valid: Tensor,
    *,
    normalize_std: bool,
    epsilon: float,
) -> Tensor:
    """Rewards [N] relative to their own group's mean -> float64 advantages [N], in the order given.

    Source: GRPO, outcome supervision (Shao et al. 2024, DeepSeekMath, section 4.1.2): (r - mean) / (std + epsilon);
    with ``normalize_std`` off r - mean alone (Dr. GRPO, Liu et al. 2025, section 3.2). Departures:

    - std is the sample standard deviation (divides by n - 1).
    - Groups are the samples of one id, in any order and of any size; sums are correctly rounded, so the
      result does not depend on the order of the samples.
    - Equal rewards (max = min) give exactly 0, decided on the rewards and not on the std.
    - ``valid`` [N] bool: other samples get 0 and stay out of the statistics (their reward may be NaN); a
      group with fewer than two valid samples gives 0.

    Raises RewardError for a valid reward that is not finite, ConfigError for a non-positive epsilon.
    """
    if not epsilon > 0:
        raise ConfigError(f"epsilon={epsilon} must be positive; 1e-6 is the usual value")
    if not len(rewards) == len(group_ids) == len(valid):
        raise ValueError(f"{len(rewards)} rewards, {len(group_ids)} group ids and {len(valid)} valid flags given")
    values: list[float] = rewards.detach().double().tolist()
    members: dict[Hashable, list[int]] = {}
    for index, (group, is_valid) in enumerate(zip(group_ids, valid.tolist(), strict=True)):
        if is_valid:
            _check_reward(index, values[index])
            members.setdefault(group, []).append(index)
    advantages = [0.0] * len(values)
    for indices in members.values():
        relative = _relative_to_group([values[i] for i in indices], normalize_std, epsilon)
        for index, advantage in zip(indices, relative, strict=True):
            advantages[index] = advantage
    return torch.tensor(advantages, dtype=torch.float64, device=rewards.device)


def _relative_to_group(rewards: list[float], normalize_std: bool, epsilon: float) -> list[float]:
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + epsilon) for value in centred]


def _check_reward(index: int, reward: float) -> None:
    if not abs(reward) <= MAX_ABS_REWARD:
        raise RewardError(
            f"sample {index} of the batch has reward {reward}, which cannot be averaged; "
            "mark it unscorable, or return a finite number of ordinary size"
        )
