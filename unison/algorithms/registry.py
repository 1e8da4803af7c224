"""Advantage estimators and policy losses by name, or as a user's ``module:function``.

The keyword-only parameters of a function are its settings: a key of ``[algorithm]`` with the same name reaches it,
and its default is what holds where neither the user nor the recipe says otherwise.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, Final, Literal, Protocol, TypeVar, cast, get_args

from torch import Tensor

from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.algorithms.trajectories import Estimate, Trajectories
from unison.config.names import did_you_mean
from unison.config.plugins import load_object
from unison.core.errors import ConfigError

Use = Literal["groups", "kl", "values", "greedy"]
"""What an estimator takes of ``Trajectories``: the other samples of a prompt, KL penalties in the reward, a critic's
values, the reward of a greedy answer. What it does not declare is not made for it."""


class AdvantageEstimator(Protocol):
    """Advantages of a batch, and where a critic learns their returns; settings come as keywords."""

    def __call__(self, batch: Trajectories, /, **settings: Any) -> Tensor | Estimate: ...


class PolicyLossFunction(Protocol):
    """The loss of each token to minimise; settings come as keywords."""

    def __call__(self, batch: LossBatch, /, **settings: Any) -> PolicyLoss: ...


_Function = TypeVar("_Function", bound=Callable[..., Any])

_PACKAGES: Final = {"advantage": "unison.algorithms.advantages", "loss": "unison.algorithms.losses"}
_REGISTERED: Final[dict[str, dict[str, Callable[..., Any]]]] = {"advantage": {}, "loss": {}}


def register_advantage(name: str, *, uses: Collection[str] = ()) -> Callable[[_Function], _Function]:
    """Decorator that puts an estimator under ``name``. Raises ConfigError where the name is taken."""
    unknown = sorted(set(uses) - set(get_args(Use)))
    if unknown:
        raise ConfigError(f"advantage {name!r} uses {unknown[0]!r}; known: {', '.join(get_args(Use))}")
    return _register("advantage", name, frozenset(uses))


def register_loss(name: str) -> Callable[[_Function], _Function]:
    """Decorator that puts a policy loss under ``name``. Raises ConfigError where the name is taken."""
    return _register("loss", name, frozenset())


def find_advantage(name: str) -> AdvantageEstimator:
    """The estimator of a registered name or of ``module:function``. Raises ConfigError where there is none."""
    return cast(AdvantageEstimator, _find("advantage", name))


def find_loss(name: str) -> PolicyLossFunction:
    """The policy loss of a registered name or of ``module:function``. Raises ConfigError where there is none."""
    return cast(PolicyLossFunction, _find("loss", name))


def names(kind: str) -> list[str]:
    """All registered names."""
    _load_built_in(kind)
    return sorted(_REGISTERED[kind])


def uses_of(estimator: Callable[..., Any]) -> frozenset[Use]:
    """What an estimator has declared to use; nothing for one that was never registered."""
    return cast(frozenset[Use], getattr(estimator, "uses", frozenset()))


def settings_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The settings a function takes, with their defaults: its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}


def takers_of(setting: str) -> list[str]:
    """Registered functions that take a setting, as ``loss clipped``."""
    return [
        f"{kind} {name}"
        for kind in ("advantage", "loss")
        for name in names(kind)
        if setting in settings_of(_REGISTERED[kind][name])
    ]


def _register(kind: str, name: str, uses: frozenset[str]) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        if name in _REGISTERED[kind]:
            raise ConfigError(f"{kind} {name!r} is registered already; choose another name")
        function.uses = uses  # type: ignore[attr-defined]
        _REGISTERED[kind][name] = function
        return function

    return register


def _find(kind: str, name: str) -> Callable[..., Any]:
    if ":" in name:
        found = load_object(name, kind=kind, error=ConfigError)
        if not callable(found) or isinstance(found, type):
            what = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
            raise ConfigError(f"algorithm.{kind}={name!r} is {what}; name a function")
        _check_signature(found, kind, name)
        return cast(Callable[..., Any], found)
    _load_built_in(kind)
    if name not in _REGISTERED[kind]:
        known = sorted(_REGISTERED[kind])
        raise ConfigError(
            f"algorithm.{kind}={name!r} is unknown{did_you_mean(name, known)}; known: {', '.join(known)}, or "
            "module:function of your own"
        )
    return _REGISTERED[kind][name]


def _check_signature(function: Callable[..., Any], kind: str, name: str) -> None:
    """A function is called with the batch; whatever else it takes is a setting, by keyword and with a default."""
    empty = inspect.Parameter.empty
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"algorithm.{kind}={name!r} does not say what it takes; name a Python function") from error
    first, others = (parameters[0], parameters[1:]) if parameters else (None, [])
    if first is None or first.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise ConfigError(f"algorithm.{kind}={name!r} takes no batch; its first parameter is the batch")
    wrong = [one.name for one in others if one.kind is not inspect.Parameter.KEYWORD_ONLY or one.default is empty]
    if wrong:
        raise ConfigError(
            f"algorithm.{kind}={name!r} has a parameter {wrong[0]!r} that is no setting: after the batch come "
            "keyword-only parameters with defaults, as in (batch, *, scale=1.0)"
        )


@cache
def _load_built_in(kind: str) -> None:
    """Each module of the folder registers what it defines."""
    package = importlib.import_module(_PACKAGES[kind])
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
