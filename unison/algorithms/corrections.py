"""Corrections for samples that another policy drew than the one being trained.

Dims: T response tokens of all trajectories of the global batch, N trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from unison.config.algorithm import CorrectionConfig

Level = Literal["none", "token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How samples are weighed and rejected. Bounds are of the ratio trainer / rollout, always."""

    old: Literal["rollout", "trainer"] = "rollout"
    weight: Level = "none"
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    lower: float = 0.0
    upper: float = 2.0
    normalize: bool = False
    reject: Level = "none"
    reject_lower: float = 0.5
    reject_upper: float = 2.0
    veto: float = 0.0
    denominator: Literal["kept", "reduced"] = "kept"

    @property
    def needs_recompute(self) -> bool:
        """Whether the trainer must compute the old log-probs itself."""
        return self.old == "trainer" or self.weight != "none" or self.reject != "none" or self.veto > 0


class Corrected(NamedTuple):
    weights_T: Tensor
    """Float64, without gradient: factor of the policy loss of each token; 1 where there is none to apply."""
    kept_T: Tensor
    """Bool: still in the loss. Tokens that were not trained before are False."""
    metrics: Mapping[str, float]


def correct(
    correction: Correction,
    *,
    trainer_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    trained_T: Tensor,
    trajectory_T: Tensor,
    num_trajectories: int,
) -> Corrected:
    """Weights and rejections of a whole global batch; other places than ``trained_T`` may hold anything."""
    return Corrected(torch.ones(len(trained_T), dtype=torch.float64), trained_T.clone(), {})


def resolve_correction(config: CorrectionConfig) -> Correction:
    """The correction of ``[correction]``, its recipe filled in. Raises ConfigError for a setting without effect."""
    return Correction()
