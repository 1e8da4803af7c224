"""The KL to the reference as configured: how much of it, where, by which estimator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from unison.algorithms.kl import KlKind

KL_HORIZON: Final = 10_000
"""Samples, where none are given; the value of Ziegler et al. 2019."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlTerm:
    """The KL to the reference: how much of it, where, and by which estimator."""

    coef: float
    place: Literal["loss", "reward"]
    kind: KlKind
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


def kl_kind(chosen: Mapping[str, Any]) -> KlKind:
    """k1 in the reward, where it is unbiased and may fall below 0; k3 in the loss."""
    return cast(KlKind, chosen["kl"] or ("k1" if kl_place(chosen) == "reward" else "k3"))


def kl_term(chosen: Mapping[str, Any]) -> KlTerm:
    return KlTerm(
        coef=chosen["kl_coef"],
        place=kl_place(chosen),
        kind=kl_kind(chosen),
        ratio_weighted=chosen["kl_ratio_weighted"],
        control=chosen["kl_control"],
        target=chosen["kl_target"] or math.inf,
        horizon=chosen["kl_horizon"] or KL_HORIZON,
    )
