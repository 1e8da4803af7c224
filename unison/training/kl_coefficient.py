"""The weight of the KL to the reference, fixed or steered by what is measured."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unison.algorithms.kl_control import doubling, proportional
from unison.algorithms.kl_term import KlTerm


class KlCoefficient:
    """Holds the present coefficient; under control it is part of what a checkpoint carries."""

    def __init__(self, term: KlTerm) -> None:
        self._term = term
        self.value = term.coef

    def after_step(self, kl: float, *, num_samples: int) -> dict[str, float]:
        """Steer by the mean KL per token of a step; metrics of the coefficient of the next one."""
        term = self._term
        if term.control == "fixed" or term.coef == 0:
            return {}
        if term.control == "proportional":
            self.value = proportional(self.value, kl, term.target, num_samples, term.horizon)
        else:
            self.value = doubling(self.value, kl, term.target)
        return {"train/kl_coef": self.value}

    def state_tensors(self) -> dict[str, Tensor]:
        """A fresh copy: nothing for a fixed coefficient, which the configuration says."""
        if self._term.control == "fixed":
            return {}
        numbers = {"kl_coef": self.value, "kl_coef_configured": self._term.coef}
        return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a saved coefficient, unless algorithm.kl_coef has been set to another one since."""
        begun_at = tensors.get("kl_coef_configured")
        same = begun_at is not None and float(begun_at) == self._term.coef
        self.value = float(tensors["kl_coef"]) if self._term.control != "fixed" and same else self._term.coef
