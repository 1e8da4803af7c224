"""How a reward is found by name and checked before the run starts. ``unison.rewards.forms`` says what it looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from unison.config.checks import check_reward
from unison.config.schema import RewardConfig, RewardPartConfig
from unison.core.errors import RewardError
from unison.rewards.combined import CombinedReward, WeightedReward, as_grader
from unison.rewards.forms import FunctionGrader, RewardFunction
from unison.rewards.plugins import Registry

__all__ = ["FunctionGrader", "PartSpec", "RewardFunction", "as_grader", "load_reward", "open_reward", "register_reward"]

_registry: Registry[RewardFunction] = Registry(
    "reward function",
    RewardError,
    {
        "exact_answer": "unison.rewards.exact:exact_answer",
        "code_tests": "unison.rewards.code:code_tests",
        "exact_match": "unison.rewards.words:exact_match",
        "f1": "unison.rewards.words:f1",
        "format_tags": "unison.rewards.tags:format_tags",
        "http": "unison.rewards.remote:http",
        "json_schema": "unison.rewards.schema:json_schema",
        "math_answer": "unison.rewards.mathematics:math_answer",
        "multiple_choice": "unison.rewards.choice:multiple_choice",
        "reasoning_gym": "unison.rewards.reasoning:reasoning_gym",
    },
)
register_reward: Final = _registry.register


class PartSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One part as configured, in plain data: what a worker process needs to load it."""

    function: str
    weight: float = 1.0
    options: dict[str, int | float | str | bool] = {}
    label_column: str | None = None


def load_reward(config: RewardConfig, label_column: str | None = None) -> WeightedReward:
    """The configured reward: in processes of its own, or with ``isolation="none"`` in this one.

    ``label_column`` is what the data calls its labels. Raises RewardError where a function cannot be found or called as
    configured, ConfigError for settings that contradict each other. Whoever loads a reward closes it.
    """
    check_reward(config)
    named = bool(config.parts)
    parts = config.parts or {config.function: RewardPartConfig(function=config.function, options=config.options)}
    specs = {
        name: PartSpec(function=part.function, options=part.options, weight=part.weight, label_column=label_column)
        for name, part in parts.items()
    }
    if config.isolation == "none":
        return open_reward(specs, named=named)
    from unison.rewards.pooled import PooledReward

    specs = {name: msgspec.structs.replace(spec, function=_portable(spec.function)) for name, spec in specs.items()}
    timeouts_s = {name: part.timeout_s for name, part in config.parts.items() if part.timeout_s is not None}
    return PooledReward(config, specs, named=named, timeouts_s=timeouts_s)


def open_reward(specs: Mapping[str, PartSpec], *, named: bool) -> CombinedReward:
    """The functions of the parts, loaded here. Raises RewardError."""
    if not named:
        ((name, spec),) = specs.items()
        found = _registry.find(spec.function)
        if isinstance(found, CombinedReward):
            _refuse_options(name, spec)
            return found
        return CombinedReward({name: (_grader(name, spec, found), spec.weight)}, named=False)
    graders = {}
    for name, spec in specs.items():
        found = _registry.find(spec.function)
        if isinstance(found, CombinedReward):
            raise RewardError(
                f"reward.parts.{name}.function={spec.function!r} is itself a combination; name its parts one by one"
            )
        graders[name] = (_grader(spec.function, spec, found, f"reward.parts.{name}"), spec.weight)
    return CombinedReward(graders)


def _grader(name: str, spec: PartSpec, found: RewardFunction, section: str = "reward") -> FunctionGrader:
    return FunctionGrader(name, found, spec.options, spec.label_column, section)


def _refuse_options(name: str, spec: PartSpec) -> None:
    if spec.options:
        raise RewardError(
            f"the reward {name!r} is a combination, which takes no options; "
            "give its parts their settings where they are combined"
        )


def _portable(name: str) -> str:
    """The name under which a worker process finds it: what was registered in this process has its module's."""
    registered = _registry.parts.get(name)
    if registered is None:
        return name
    module, qualified = getattr(registered, "__module__", None), getattr(registered, "__qualname__", "<none>")
    if module in (None, "__main__") or "<" in qualified:
        raise RewardError(
            f"the reward {name!r} is registered in this process alone, where no grader process finds it; define it at "
            'the top of a module, or set reward.isolation="none"'
        )
    return f"{module}:{qualified}"
