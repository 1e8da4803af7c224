"""The KL to the reference as configured: how much of it, where, by which estimator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

from unison.algorithms.kl import KlFunction, KlKind
from unison.config.names import did_you_mean
from unison.config.plugins import load_object
from unison.core.errors import ConfigError

KL_HORIZON: Final = 10_000
"""Samples, where none are given; the value of Ziegler et al. 2019."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlTerm:
    """The KL to the reference: how much of it, where, and by which estimator."""

    coef: float
    place: Literal["loss", "reward"]
    kind: KlKind | KlFunction
    name: str
    """Of the estimator."""
    ratio_weighted: bool
    control: Literal["fixed", "proportional", "doubling"]
    target: float
    horizon: int

    def in_loss(self) -> bool:
        return self.coef > 0 and self.place == "loss"

    def in_reward(self) -> bool:
        return self.coef > 0 and self.place == "reward"


def kl_place(chosen: Mapping[str, Any]) -> Literal["loss", "reward"]:
    return cast(Literal["loss", "reward"], chosen["kl_in"] or "loss")


def kl_name(chosen: Mapping[str, Any]) -> str:
    """k1 in the reward, where it is unbiased and may fall below 0; k3 in the loss."""
    return cast(str, chosen["kl"] or ("k1" if kl_place(chosen) == "reward" else "k3"))


def find_kl(name: str) -> KlKind | KlFunction:
    """The estimator of a name, or a function at ``module:function``. Raises ConfigError where there is none."""
    if ":" in name:
        found = load_object(name, kind="KL estimator", error=ConfigError)
        if not callable(found) or isinstance(found, type):
            raise ConfigError(f"algorithm.kl={name!r} is no function; name one of (logprobs, reference) -> values")
        return cast(KlFunction, found)
    if name not in get_args(KlKind):
        known = get_args(KlKind)
        raise ConfigError(
            f"algorithm.kl={name!r} is unknown{did_you_mean(name, known)}; known: {', '.join(known)}, or "
            "module:function of your own"
        )
    return cast(KlKind, name)


def kl_term(chosen: Mapping[str, Any]) -> KlTerm:
    return KlTerm(
        coef=chosen["kl_coef"],
        place=kl_place(chosen),
        kind=find_kl(kl_name(chosen)),
        name=kl_name(chosen),
        ratio_weighted=chosen["kl_ratio_weighted"],
        control=chosen["kl_control"],
        target=chosen["kl_target"] or math.inf,
        horizon=chosen["kl_horizon"] or KL_HORIZON,
    )
