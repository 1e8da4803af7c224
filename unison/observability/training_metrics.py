"""The metrics of the optimizer steps of policy and critic."""

from __future__ import annotations

from typing import Final

from unison.observability.registry import Metric


def _metric(name: str, unit: str, description: str, healthy: str, advice: str) -> Metric:
    return Metric(name=name, unit=unit, description=description, healthy=healthy, advice=advice)


_NO_ADVICE: Final = "nothing to do: it describes the run"
_CRITIC_ADVICE: Final = (
    "not so after tens of steps: raise critic.learning_rate, or give critic.only_steps to begin with"
)

TRAIN: Final = (
    _metric(
        "train/loss",
        "-",
        "The loss that was minimised. It is no measure of progress: its expectation on the first update is near 0.",
        "finite, around 0",
        "spikes together with train/grad_norm: lower trainer.learning_rate",
    ),
    _metric(
        "train/kl",
        "nats",
        "Mean KL from the policy to the reference by token, as estimated in the loss.",
        "0 at the first step, then slowly rising; below about 0.5",
        "rising fast: lower trainer.learning_rate, or raise algorithm.kl_coef",
    ),
    _metric(
        "train/entropy",
        "nats",
        "Mean entropy of the next-token distribution at sampled tokens.",
        "falls slowly, stays above 0",
        "collapsing to 0: lower trainer.learning_rate, or raise algorithm.clip_high",
    ),
    _metric(
        "train/ratio_mean",
        "ratio",
        "Mean ratio of a token's probability in training to that in rollout.",
        "exactly 1 with one update for each rollout and exact numerics",
        "see rollout/logp_diff_max",
    ),
    _metric(
        "train/ratio_max",
        "ratio",
        "Largest ratio of a token's probability in training to that in rollout.",
        "exactly 1 with one update for each rollout and exact numerics",
        "see rollout/logp_diff_max",
    ),
    _metric(
        "train/clip_share",
        "share",
        "Share of trained tokens whose ratio was clipped.",
        "0 with one update for each rollout; else below 0.2",
        "lower trainer.learning_rate",
    ),
    _metric(
        "train/grad_norm",
        "-",
        "Norm of the whole gradient before clipping, mean over the optimizer steps.",
        "within a factor of ten of its usual value",
        "spikes: look at that step's rollouts; trainer.max_grad_norm bounds what they do",
    ),
    _metric("train/learning_rate", "-", "Learning rate of the update.", "as scheduled", _NO_ADVICE),
    _metric("train/tokens", "tokens", "Tokens trained on in the step, prompts included.", "steady", _NO_ADVICE),
    _metric(
        "train/trained_tokens", "tokens", "Tokens with a loss weight: the loss's denominator.", "steady", _NO_ADVICE
    ),
    _metric(
        "train/forward_seconds",
        "s",
        "Time of the forward passes that have a backward pass.",
        "about half of backward",
        _NO_ADVICE,
    ),
    _metric("train/backward_seconds", "s", "Time of the backward passes.", "steady", _NO_ADVICE),
    _metric("train/optimizer_seconds", "s", "Time of clipping, update and cast.", "steady", _NO_ADVICE),
    _metric(
        "train/tokens_per_s",
        "tokens/s",
        "Trained tokens, prompts included, by time of forward, backward and update.",
        "steady",
        "raise trainer.micro_batch_tokens if memory allows",
    ),
    _metric(
        "train/seconds",
        "s",
        "Time of forward, backward and update.",
        "steady",
        "growing with equal lengths: see train/tokens_per_s",
    ),
    _metric(
        "train/micro_batches",
        "micro-batches",
        "Forward and backward passes the step was cut into; the gradient does not depend on it.",
        "few",
        "raise trainer.micro_batch_tokens if memory allows",
    ),
    _metric(
        "train/optimizer_steps",
        "steps",
        "Optimizer steps of the policy taken for this rollout.",
        "as planned",
        _NO_ADVICE,
    ),
    _metric(
        "train/grad_norm_max",
        "-",
        "Largest gradient norm of the step's optimizer steps.",
        "within a factor of ten of train/grad_norm",
        "later passes drift away from the rollout: fewer trainer.epochs, or a lower trainer.learning_rate",
    ),
    _metric(
        "train/pass_seconds",
        "s",
        "Time of the passes before the first update: old log-probs, reference, values.",
        "steady",
        _NO_ADVICE,
    ),
    _metric(
        "train/reward_kl",
        "nats",
        "Mean KL from the policy to the reference by token, as taken off the rewards.",
        "0 at the first step, then slowly rising; below about 0.5",
        "rising fast: lower trainer.learning_rate, or raise algorithm.kl_coef",
    ),
    _metric(
        "train/kl_coef",
        "-",
        "Coefficient of the KL for the next step, where algorithm.kl_control moves it.",
        "settles once the KL is near algorithm.kl_target",
        "without end upwards: the target is too low for this learning rate",
    ),
)

CRITIC: Final = (
    _metric("critic/loss", "-", "Loss of the values, mean over the critic's optimizer steps.", "falls", _CRITIC_ADVICE),
    _metric(
        "critic/explained_variance",
        "share",
        "Share of the variance of the returns that the values foretold, over trained tokens.",
        "0 at first, then rising; 1 is perfect",
        _CRITIC_ADVICE,
    ),
    _metric(
        "critic/value_mean", "reward", "Mean value of the trained tokens.", "near critic/return_mean", _CRITIC_ADVICE
    ),
    _metric("critic/return_mean", "reward", "Mean return of the trained tokens.", "as the reward", _NO_ADVICE),
    _metric(
        "critic/clip_share",
        "share",
        "Share of tokens whose value loss was clipped.",
        "below about 0.2",
        "raise critic.value_clip, or lower critic.learning_rate",
    ),
    _metric(
        "critic/grad_norm",
        "-",
        "Norm of the critic's gradient before clipping, mean over its optimizer steps.",
        "within a factor of ten of its usual value",
        "spikes: lower critic.learning_rate",
    ),
    _metric("critic/seconds", "s", "Time of the critic's optimizer steps.", "steady", _NO_ADVICE),
)
