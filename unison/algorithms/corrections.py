"""Corrections for samples that another policy drew than the one being trained: stale weights, other kernels.

Dims: T response tokens of all trajectories of the global batch, N trained tokens among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from unison.algorithms.aggregation import exact_sum, exact_sums, select
from unison.algorithms.metrics import capped_exp, mean, mismatch_metrics
from unison.core.describe import describe
from unison.core.errors import AlgorithmError, ConfigError, UnisonError

Level = Literal["none", "token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How samples are weighed and rejected. Bounds are of the ratio trainer / rollout, always, and belong to it.

    Raises ConfigError for bounds that cannot be meant.
    """

    old: Literal["rollout", "trainer"] = "rollout"
    weight: Level = "none"
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    lower: float = 0.0
    """Not of truncate, which cuts above alone."""
    upper: float = 2.0
    normalize: bool = False
    reject: Level = "none"
    reject_lower: float = 0.5
    reject_upper: float = 2.0
    veto: float = 0.0
    denominator: Literal["kept", "reduced"] = "kept"
    function: Callable[..., Corrected] | None = None
    """One of the user's, in place of all but ``old`` and ``denominator``: called with the keywords of ``correct``."""

    def __post_init__(self) -> None:
        if self.weight != "none":
            _check_bounds("", 0.0 if self.mode == "truncate" else self.lower, self.upper)
        if self.reject != "none":
            _check_bounds("reject_", self.reject_lower, self.reject_upper)
        if not 0 <= self.veto < 1:
            raise ConfigError(f"correction.veto={self.veto} must be in [0, 1); 1e-4 is usual, 0 is off")

    @property
    def needs_recompute(self) -> bool:
        """Whether the trainer must compute the old log-probs itself."""
        return self.old == "trainer" or self.weighs or self.leaves_out

    @property
    def weighs(self) -> bool:
        """Whether the loss of a token may have a factor."""
        return self.weight != "none" or self.function is not None

    @property
    def leaves_out(self) -> bool:
        """Whether tokens may be left out of the loss."""
        masks = self.weight != "none" and self.mode == "mask"
        return masks or self.reject != "none" or self.veto > 0 or self.function is not None


class Corrected(NamedTuple):
    weights_T: Tensor
    """Float64, without gradient: factor of the policy loss of each token; 1 where there is none to apply."""
    kept_T: Tensor
    """Bool: still in the loss. Tokens that were not trained before are False."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """Names as they are logged; of a user's function those of the package alone are logged."""


def correct(
    correction: Correction,
    *,
    trainer_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    trained_T: Tensor,
    trajectory_T: Tensor,
    num_trajectories: int,
) -> Corrected:
    """Weights and rejections of a whole global batch; other places than ``trained_T`` may hold anything.

    With d = log pi_trainer - log pi_rollout of a trained token, its ratio is exp(d) at level ``token``, exp(sum of d)
    over the trained tokens of its trajectory at level ``sequence``, and exp(mean of d) at level ``geometric``; the
    exponent is capped at -20 and 20.

    - ``mode`` truncate cuts the weight at ``upper``, clip cuts it to [lower, upper], mask leaves it as it is and the
      token (at the other two levels: the trajectory) out where it is outside.
    - ``reject`` leaves out what is outside [reject_lower, reject_upper] at a level of its own; bounds are inside.
    - ``veto`` leaves out a whole trajectory with any trained token whose exp(d) is below it, for itself alone.
    - ``normalize`` divides the weights by their mean over the batch: over tokens at level token, over trajectories at
      the others. Only what is kept counts in it, so that what is trained weighs 1 on average.

    Sources: truncated importance sampling (Yao et al. 2025), IcePop (Ling team 2025: token, mask), masked importance
    sampling as in slime. Departures from the published implementations: the mean of ``normalize`` is over the global
    batch and not over a micro-batch, leaves out what is rejected, and exists for the geometric level; the veto needs no
    rejection; bounds act on trainer / rollout everywhere. A NaN in a trained place shows in weights and metrics.
    """
    if correction.function is not None:
        return _corrected_by(
            correction.function,
            trainer_logprobs_T=trainer_logprobs_T.detach().clone(),
            rollout_logprobs_T=rollout_logprobs_T.detach().clone(),
            trained_T=trained_T.clone(),
            trajectory_T=trajectory_T.clone(),
            num_trajectories=num_trajectories,
        )
    columns = trainer_logprobs_T.detach().double(), rollout_logprobs_T.detach().double(), trajectory_T
    trainer_N, rollout_N, owner_N = select(trained_T, *columns)
    tokens = _Tokens(trainer_N - rollout_N, owner_N, num_trajectories)
    raw_N = tokens.ratio(correction.weight)
    weight_N = _weights(correction, raw_N)
    out = _left_out(correction, tokens, raw_N)
    kept_N = ~torch.stack([torch.zeros_like(owner_N, dtype=torch.bool), *out.values()]).any(0)
    if correction.normalize:
        weight_N = weight_N / _mean_weight(correction, tokens, weight_N, kept_N)
    figures = mismatch_metrics(
        trainer_logprobs_T=trainer_logprobs_T,
        rollout_logprobs_T=rollout_logprobs_T,
        trained_T=trained_T,
        trajectory_T=trajectory_T,
        num_trajectories=num_trajectories,
    )
    figures |= _weight_metrics(correction, raw_N, weight_N, kept_N)
    figures |= {f"mismatch/{name}_share": _share(flags) for name, flags in out.items()}
    if correction.leaves_out:
        figures["mismatch/kept_share"] = _share(kept_N)
    return Corrected(*_spread(trained_T, weight_N, kept_N), figures)


def _corrected_by(function: Callable[..., Corrected], **columns: Any) -> Corrected:
    """What the user's function says, judged, with the metrics that do not depend on it."""
    try:
        found = function(**columns)
    except UnisonError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise AlgorithmError(f"the correction {function!r} failed: {describe(error)}") from error
    trained_T = columns["trained_T"]
    if not isinstance(found, Corrected) or any(
        not isinstance(part, Tensor) or part.shape != trained_T.shape for part in found[:2]
    ):
        raise AlgorithmError(
            f"the correction {function!r} returned {type(found).__name__}; Corrected(weights_T, kept_T, metrics) is "
            f"needed, with one value for each of the {len(trained_T)} response tokens"
        )
    kept_T = (found.kept_T != 0) & trained_T
    weights_T = torch.where(kept_T, found.weights_T.detach().double(), 1.0)
    if not bool(weights_T.isfinite().all()):
        raise AlgorithmError(f"the correction {function!r} returned a weight that is not finite for a token it keeps")
    return Corrected(weights_T, kept_T, mismatch_metrics(**columns))


class _Tokens(NamedTuple):
    log_ratio_N: Tensor
    owner_N: Tensor
    num_trajectories: int

    def ratio(self, level: Level) -> Tensor:
        """pi_trainer / pi_rollout at a level, at each token [N]; 1 at level none."""
        if level == "none":
            return torch.ones_like(self.log_ratio_N)
        if level == "token":
            return capped_exp(self.log_ratio_N)
        sums = exact_sums(self.log_ratio_N, self.owner_N, self.num_trajectories)
        if level == "geometric":
            sums = sums / torch.bincount(self.owner_N, minlength=self.num_trajectories).clamp(min=1)
        return capped_exp(sums)[self.owner_N]

    def whole(self, flags_N: Tensor) -> Tensor:
        """True at all tokens of a trajectory with any flag."""
        flagged = torch.zeros(self.num_trajectories, dtype=torch.bool, device=flags_N.device)
        flagged[self.owner_N[flags_N]] = True
        return flagged[self.owner_N]


def _weights(correction: Correction, raw_N: Tensor) -> Tensor:
    if correction.weight == "none" or correction.mode == "mask":
        return raw_N
    return raw_N.clamp(max=correction.upper, min=correction.lower if correction.mode == "clip" else None)


def _left_out(correction: Correction, tokens: _Tokens, raw_N: Tensor) -> dict[str, Tensor]:
    """What is left out of the loss and by what, bool [N] each."""
    out = {}
    if correction.weight != "none" and correction.mode == "mask":
        out["weight_masked"] = _outside(raw_N, correction.lower, correction.upper)
    if correction.reject != "none":
        ratio_N = tokens.ratio(correction.reject)
        out["rejected"] = _outside(ratio_N, correction.reject_lower, correction.reject_upper)
    if correction.veto > 0:
        out["vetoed"] = tokens.whole(tokens.log_ratio_N.exp() < correction.veto)
    return out


def _outside(ratio_N: Tensor, lower: float, upper: float) -> Tensor:
    # A NaN is not outside: it stays in the loss, where it shows.
    return (ratio_N < lower) | (ratio_N > upper)


def _mean_weight(correction: Correction, tokens: _Tokens, weight_N: Tensor, kept_N: Tensor) -> float:
    """Mean over what is kept, of tokens or of trajectories; 1 where nothing is."""
    weights = weight_N[kept_N]
    if correction.weight in ("sequence", "geometric"):
        present = torch.bincount(tokens.owner_N[kept_N], minlength=tokens.num_trajectories) > 0
        per_trajectory = torch.ones(tokens.num_trajectories, dtype=torch.float64, device=weights.device)
        per_trajectory[tokens.owner_N[kept_N]] = weights
        weights = per_trajectory[present]
    return mean(weights) if len(weights) else 1.0


def _weight_metrics(correction: Correction, raw_N: Tensor, weight_N: Tensor, kept_N: Tensor) -> dict[str, float]:
    if correction.weight == "none":
        return {}
    kept = weight_N[kept_N]
    figures = {
        "mismatch/weight_min": float(kept.min()) if len(kept) else 1.0,
        "mismatch/weight_mean": mean(kept) if len(kept) else 1.0,
        "mismatch/weight_max": float(kept.max()) if len(kept) else 1.0,
        "mismatch/effective_share": _effective_share(kept, len(weight_N)),
    }
    if correction.mode == "truncate":
        figures["mismatch/weight_truncated_share"] = _share(raw_N > correction.upper)
    if correction.mode == "clip":
        figures["mismatch/weight_clipped_share"] = _share(_outside(raw_N, correction.lower, correction.upper))
    return figures


def _effective_share(kept: Tensor, num_tokens: int) -> float:
    """Effective sample size (sum w)^2 / sum w^2 (Kish 1965) over the trained tokens; what is left out weighs 0."""
    if not len(kept):
        return 0.0
    return exact_sum(kept.tolist()) ** 2 / exact_sum(kept.square().tolist()) / num_tokens


def _share(flags: Tensor) -> float:
    return float(flags.double().mean()) if len(flags) else 0.0


def _spread(trained_T: Tensor, weight_N: Tensor, kept_N: Tensor) -> tuple[Tensor, Tensor]:
    places = trained_T != 0
    weights_T = torch.ones(len(trained_T), dtype=torch.float64, device=weight_N.device)
    weights_T[places] = weight_N
    kept_T = torch.zeros_like(places)
    kept_T[places] = kept_N
    return weights_T, kept_T


def _check_bounds(prefix: str, lower: float, upper: float) -> None:
    low, high = f"correction.{prefix}lower={lower:g}", f"correction.{prefix}upper={upper:g}"
    if not upper >= 1:
        raise ConfigError(f"{high} is below 1, the ratio of two policies that agree; use a bound above 1")
    if not 0 <= lower <= 1:
        raise ConfigError(f"{low} is not in [0, 1]: 1, the ratio of two policies that agree, must be inside the bounds")
    if not lower < upper:
        raise ConfigError(f"{low} is not below {high}; raise the upper bound or lower the other")
