"""The metrics of how far the policy that sampled is from the one being trained, and of what corrects for it."""

from __future__ import annotations

from typing import Final

from unison.observability.registry import Metric


def _metric(name: str, unit: str, description: str, healthy: str, advice: str) -> Metric:
    return Metric(name=f"mismatch/{name}", unit=unit, description=description, healthy=healthy, advice=advice)


_EXACT: Final = "exactly 0 with exact numerics and fresh weights"
_EXACT_RATIO: Final = "exactly 1 with exact numerics and fresh weights"
_TRACE: Final = "run `unison check exactness --model ...`; with stale samples train on fresher ones"
_TREND: Final = "growing from step to step: see mismatch/k3 for the bulk, mismatch/logp_diff_max for single tokens"
_BOUNDS: Final = "higher: widen the bounds of the correction, or train on fresher samples"

MISMATCH: Final = (
    _metric(
        "logp_diff_mean",
        "nats",
        "Mean over trained tokens of the absolute difference between the log-probs of the trainer's old policy and of "
        "the rollout. Rare explosions dominate it.",
        f"{_EXACT}; else below about 0.02",
        _TRACE,
    ),
    _metric("logp_diff_max", "nats", "Largest of these differences.", f"{_EXACT}; else below about 1", _TRACE),
    _metric(
        "k1",
        "nats",
        "Mean over trained tokens of log rollout - log trainer, an unbiased estimate of the KL from the rollout's "
        "policy to the trainer's that may fall below 0.",
        f"{_EXACT}; else near 0",
        _TREND,
    ),
    _metric(
        "k3",
        "nats",
        "The same KL by r - 1 - log r, where r = trainer / rollout: never negative, it shows the bulk.",
        f"{_EXACT}; else 1e-5 to 1e-3 for dense models, up to 1e-1 for mixtures of experts",
        _TRACE,
    ),
    _metric("ratio_min", "ratio", "Smallest trainer / rollout of a trained token.", _EXACT_RATIO, _TREND),
    _metric(
        "ratio_mean", "ratio", "Mean trainer / rollout over trained tokens.", f"{_EXACT_RATIO}; else near 1", _TREND
    ),
    _metric("ratio_max", "ratio", "Largest trainer / rollout of a trained token.", _EXACT_RATIO, _TREND),
    _metric(
        "catastrophic_share",
        "share",
        "Share of trained tokens whose trainer / rollout is below 1e-4 or above 1e4.",
        "0",
        "look for tokens that were not sampled as they stand: edited text, another tokenizer; set correction.veto",
    ),
    _metric(
        "chi2_token",
        "-",
        "Mean over trained tokens of r^2, less 1: the chi-squared divergence, which bounds the noise of token weights. "
        "An estimate from few tokens may fall below 0.",
        f"{_EXACT}; else below about 0.1",
        _TREND,
    ),
    _metric(
        "chi2_sequence",
        "-",
        "Mean over sequences of the squared product of r over trained tokens, less 1: the noise of sequence weights.",
        f"{_EXACT}; else below about 1",
        "higher: weights of whole sequences are noise; use weight or reject at level token or geometric",
    ),
    _metric(
        "trainer_log_ppl",
        "nats",
        "Mean over sequences of the mean negative log-prob of trained tokens under the trainer.",
        "near mismatch/rollout_log_ppl",
        _TREND,
    ),
    _metric(
        "rollout_log_ppl",
        "nats",
        "Mean over sequences of the mean negative log-prob of trained tokens as sampled.",
        "falls slowly",
        "collapsing to 0: see train/entropy",
    ),
    _metric(
        "trainer_ppl",
        "-",
        "Mean over sequences of the perplexity under the trainer; each at most e^20.",
        "near mismatch/rollout_ppl",
        _TREND,
    ),
    _metric(
        "rollout_ppl",
        "-",
        "Mean over sequences of the perplexity as sampled; each at most e^20.",
        "falls slowly, stays above 1",
        "collapsing to 1: see train/entropy",
    ),
    _metric(
        "ppl_ratio",
        "ratio",
        "Mean over sequences of the trainer's perplexity over the rollout's.",
        f"{_EXACT_RATIO}; else 0.99 to 1.01",
        _TREND,
    ),
    _metric(
        "weight_min",
        "ratio",
        "Smallest weight of a token in the loss, corrected and normalised.",
        "above 0.1",
        "lower: the rollout's policy drew much that the trainer's would not; train on fresher samples",
    ),
    _metric(
        "weight_mean",
        "ratio",
        "Mean weight of the tokens in the loss, corrected and normalised.",
        "near 1",
        "far below 1: the loss is scaled down; set correction.normalize",
    ),
    _metric(
        "weight_max",
        "ratio",
        "Largest weight of a token in the loss, corrected and normalised.",
        "at most correction.upper, unless normalised",
        _BOUNDS,
    ),
    _metric(
        "effective_share",
        "share",
        "Effective sample size of the weights, (sum w)^2 / sum w^2, by the number of trained tokens; what is left out "
        "weighs 0.",
        "above 0.9",
        "low: few tokens carry the update; train on fresher samples, or lower correction.upper",
    ),
    _metric(
        "weight_truncated_share",
        "share",
        "Share of trained tokens whose weight was cut at correction.upper, in mode truncate.",
        "below 0.01",
        _BOUNDS,
    ),
    _metric(
        "weight_clipped_share",
        "share",
        "Share of trained tokens whose weight was cut at either bound, in mode clip.",
        "below 0.01",
        _BOUNDS,
    ),
    _metric(
        "weight_masked_share",
        "share",
        "Share of trained tokens left out because their weight was outside its bounds, in mode mask.",
        "below 0.01 at level token",
        _BOUNDS,
    ),
    _metric(
        "rejected_share",
        "share",
        "Share of trained tokens left out because the ratio was outside the bounds of correction.reject.",
        "below 0.01 at level token; below 0.5 at the others",
        _BOUNDS,
    ),
    _metric(
        "vetoed_share",
        "share",
        "Share of trained tokens that stand in a sequence left out by correction.veto.",
        "below 0.01",
        "higher: see mismatch/catastrophic_share",
    ),
    _metric(
        "kept_share",
        "share",
        "Share of trained tokens that are still in the loss after masks, rejections and vetoes.",
        "above 0.9 at level token; above 0.5 at the others",
        _BOUNDS,
    ),
)
