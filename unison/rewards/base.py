"""Reward functions: what they look like, and how one is found and checked before the run starts.

A reward function has one of two forms, told apart by the name of its first parameter:

    def reward(samples, **options) -> list[float | None]    # first parameter is called `samples`
    def reward(text, label, **options) -> float | None      # any other name: called for each sample

A sample has ``text`` (the response), ``metadata["label"]`` and ``metadata["prompt"]``. None means
"no opinion". Options come from the configuration as keyword arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from unison.config.names import did_you_mean
from unison.config.schema import RewardConfig
from unison.core.errors import RewardError
from unison.core.protocols import Grader
from unison.core.records import Sample
from unison.rewards.plugins import Registry

RewardFunction = Callable[..., Any]

_registry: Registry[RewardFunction] = Registry(
    "reward function", RewardError, {"exact_answer": "unison.rewards.exact:exact_answer"}
)
register_reward: Final = _registry.register


class FunctionGrader:
    """A reward function with its options, as a Grader.

    ``per_sample`` tells that samples are scored one by one anyway, so that one sample's failure is
    known to be its own. What the function raises or returns goes through unchecked: ``score`` judges it.
    """

    def __init__(self, name: str, function: RewardFunction, options: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self._function = function
        self._options = dict(options or {})
        self.per_sample = _check_signature(name, function, self._options) == "per-sample"

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        if not self.per_sample:
            scores: Sequence[float | None] = self._function(samples, **self._options)
            return scores
        return [self._function(sample.text, sample.metadata.get("label"), **self._options) for sample in samples]


def load_reward(config: RewardConfig) -> Grader:
    """The configured reward. Raises RewardError where it cannot be found or called as configured."""
    found = _registry.find(config.function)
    if _is_combined(found):
        if config.options:
            raise RewardError(
                f"the reward {config.function!r} is a combination, which takes no options; "
                "give its parts their settings where they are combined"
            )
        grader: Grader = found
        return grader
    return FunctionGrader(config.function, found, config.options)


def as_grader(name: str, reward: Grader | RewardFunction) -> Grader:
    """A plain function wrapped as a Grader; Graders of ours as they are."""
    if isinstance(reward, FunctionGrader) or _is_combined(reward):
        return reward
    return FunctionGrader(name, reward)


def _is_combined(reward: object) -> bool:
    """Whether it is made by ``combine``, whose parts are scored one by one."""
    return getattr(reward, "parts", None) is not None


def _check_signature(name: str, function: RewardFunction, options: Mapping[str, Any]) -> str:
    """The function's form, ``batch`` or ``per-sample``. Raises RewardError where the call cannot work."""
    if not callable(function) or inspect.isclass(function):
        raise RewardError(f"the reward {name!r} is a {_kind_of(function)}; name a function, or an object to be called")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise RewardError(f"the reward {name!r} is async; make it a plain function")
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise RewardError(f"the reward {name!r} has no readable signature; wrap it in a function") from error
    first = next(iter(signature.parameters), None)
    num_given = 1 if first == "samples" else 2
    _check_options(name, signature, options, num_given)
    try:
        signature.bind(*[None] * num_given, **options)
    except TypeError as error:
        wanted = "(samples, **options)" if num_given == 1 else "(text, label, **options)"
        raise RewardError(
            f"the reward {name!r} has the signature {signature}, which cannot be called as {wanted}: {error}"
        ) from error
    return "batch" if num_given == 1 else "per-sample"


def _check_options(name: str, signature: inspect.Signature, options: Mapping[str, Any], num_given: int) -> None:
    parameters = list(signature.parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    accepted = [
        parameter.name
        for index, parameter in enumerate(parameters)
        if parameter.kind is parameter.KEYWORD_ONLY
        or (parameter.kind is parameter.POSITIONAL_OR_KEYWORD and index >= num_given)
    ]
    for option in options:
        if option not in accepted:
            raise RewardError(
                f"the reward {name!r} takes no option {option!r}{did_you_mean(option, accepted)}"
                f" (it takes {', '.join(accepted) or 'none'})"
            )


def _kind_of(value: object) -> str:
    return "class" if inspect.isclass(value) else type(value).__name__
