"""What is learnt from samples: the sections of the algorithm, its corrections, reference and critic."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from unison.config.section import Options, Schedule, Section

Rate = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Aggregation = Literal[
    "token_mean",
    "token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "fixed_length",
    "trajectory_mean",
    "prompt_mean",
]


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """Keys that are null take the recipe's value, or the default of the function they belong to."""

    name: Annotated[
        str,
        Meta(
            description="Recipe that fills in what is null below: grpo, dr_grpo, dapo, rloo, reinforce, reinforce_pp, "
            "reinforce_pp_baseline, remax, ppo, gspo, gmpo, cispo, sapo, mirror, dppo, or module:object of your own."
        ),
    ] = "grpo"
    advantage: Annotated[
        str | None,
        Meta(
            description="Advantage estimator: grpo, grpo_leave_one_out, grpo_turns, rloo, opo, maxrl, reinforce, "
            "reinforce_pp, reinforce_pp_baseline, remax, gae, mirror, or module:function of your own."
        ),
    ] = None
    loss: Annotated[
        str | None,
        Meta(
            description="Policy loss: clipped, gspo, gspo_token, gmpo, cispo, policy_gradient, sapo, mirror, dppo, "
            "opsm, or module:function of your own."
        ),
    ] = None
    aggregation: Annotated[
        Aggregation | None, Meta(description="How the losses of tokens add up to the loss of a batch.")
    ] = None
    options: Annotated[Options, Meta(description="Settings of your own functions, by parameter name.")] = {}
    normalize_std: Annotated[
        bool | None, Meta(description="Divide the group advantage by the group's standard deviation.")
    ] = None
    std: Annotated[
        Literal["sample", "population"] | None,
        Meta(description="The group's deviation over n - 1 (sample), or over n."),
    ] = None
    std_epsilon: Annotated[Positive | None, Meta(description="Added to the standard deviation.")] = None
    gamma: Annotated[Rate | None, Meta(description="Discount of the rewards of later tokens.")] = None
    lam: Annotated[Rate | None, Meta(description="Lambda of generalised advantage estimation.")] = None
    observations: Annotated[
        Literal["across", "over"] | None,
        Meta(
            description="Tokens the policy did not write, such as a tool's: gamma and lam pass them by (across), or "
            "count them as steps (over)."
        ),
    ] = None
    bootstrap: Annotated[
        bool | None, Meta(description="A truncated trajectory ends in the critic's value, not in 0.")
    ] = None
    whiten: Annotated[
        bool | None,
        Meta(description="Scale advantages to mean 0 and deviation 1 over the trained tokens of the batch."),
    ] = None
    length_weight: Annotated[
        NonNegative, Meta(description="Weight of a reward for being shorter than the rest of the group; 0 is off.")
    ] = 0.0
    correct_reward: Annotated[
        float, Meta(description="With length_weight: an answer with at least this reward counts as correct.")
    ] = 1.0
    overlong_buffer: Annotated[
        int, Meta(ge=0, description="Last tokens before rollout.max_new_tokens that cost reward; 0 is off.")
    ] = 0
    overlong_penalty: Annotated[
        Positive, Meta(description="With overlong_buffer: what a response of full length costs.")
    ] = 1.0
    truncated: Annotated[
        Literal["mask", "keep"],
        Meta(description="Truncated samples count in their group; mask leaves them out of the loss."),
    ] = "mask"
    clip_low: Annotated[
        Rate | None, Meta(description="Lower bound of the ratio, 1 - clip_low; of the log-ratio in gmpo.")
    ] = None
    clip_high: Annotated[
        NonNegative | None, Meta(description="Upper bound of the ratio, 1 + clip_high; of the log-ratio in gmpo.")
    ] = None
    dual_clip: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        Meta(description="Where the advantage is negative, the ratio counts as at most this."),
    ] = None
    mask_threshold: Annotated[
        Positive | None,
        Meta(description="Divergence from the rollout above which dppo leaves out a token, opsm a sequence."),
    ] = None
    divergence: Annotated[
        Literal["total_variation", "kl"] | None,
        Meta(description="What mask_threshold bounds, of this token against all others."),
    ] = None
    temperature_positive: Annotated[
        Positive | None, Meta(description="Temperature of the soft gate where the advantage is positive.")
    ] = None
    temperature_negative: Annotated[
        Positive | None, Meta(description="Temperature of the soft gate where the advantage is negative.")
    ] = None
    tau: Annotated[Positive | None, Meta(description="Regularisation of the squared mirror-descent loss.")] = None
    baseline: Annotated[
        Literal["mean", "log_mean_exp"] | None,
        Meta(description="Baseline of mirror descent: mean reward of the group, or tau ln mean exp(reward / tau)."),
    ] = None
    entropy_coef: Annotated[NonNegative, Meta(description="Weight of the entropy bonus in the loss; 0 is off.")] = 0.0
    kl_coef: Annotated[NonNegative, Meta(description="Weight of the KL to the reference; 0 is off.")] = 0.0
    kl_in: Annotated[
        Literal["loss", "reward"] | None, Meta(description="Where the KL to the reference acts; null is the loss.")
    ] = None
    kl: Annotated[
        str | None,
        Meta(
            description="Estimator of that KL: k1, k2, k3, low_var, abs, or module:function of your own; null is k3 in "
            "the loss, k1 in the reward."
        ),
    ] = None
    kl_ratio_weighted: Annotated[
        bool, Meta(description="Multiply the KL in the loss by the ratio to the old policy, which sampled the tokens.")
    ] = False
    kl_control: Annotated[
        Literal["fixed", "proportional", "doubling"], Meta(description="How kl_coef follows the KL measured.")
    ] = "fixed"
    kl_target: Annotated[Positive | None, Meta(description="KL per token that kl_control steers to.")] = None
    kl_horizon: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Samples over which proportional control corrects an error (10000)."),
    ] = None


class CorrectionConfig(Section, frozen=True, kw_only=True):
    """For samples that another policy drew than the one being trained: stale weights, other kernels."""

    name: Annotated[
        str,
        Meta(
            description="Recipe, or module:function of your own: none, recompute, tis, icepop, mis, "
            "mis_geometric, sequence_tis, sequence_mask; or module:function of your own."
        ),
    ] = "none"
    old: Annotated[
        Literal["rollout", "trainer"] | None,
        Meta(
            description="Old policy of the ratio: log-probs as sampled (rollout), or computed once more by the trainer."
        ),
    ] = None
    weight: Annotated[
        Literal["none", "token", "sequence", "geometric"] | None,
        Meta(description="Level of the importance weight, old policy of the trainer over the rollout's."),
    ] = None
    mode: Annotated[
        Literal["truncate", "clip", "mask"] | None,
        Meta(description="Outside the bounds: weights are cut above, cut on both sides, or their tokens left out."),
    ] = None
    lower: Annotated[Positive | None, Meta(description="Lower bound of the weight; null is 1 / upper.")] = None
    upper: Annotated[Positive | None, Meta(description="Upper bound of the weight.")] = None
    normalize: Annotated[bool | None, Meta(description="Divide weights by their mean over the global batch.")] = None
    reject: Annotated[
        Literal["none", "token", "sequence", "geometric"] | None,
        Meta(description="Level of the ratio outside whose bounds tokens or sequences are left out."),
    ] = None
    reject_lower: Annotated[
        Positive | None, Meta(description="Lower bound of the ratio; null is 1 / reject_upper.")
    ] = None
    reject_upper: Annotated[Positive | None, Meta(description="Upper bound of the ratio.")] = None
    veto: Annotated[
        Annotated[float, Meta(ge=0, lt=1)] | None,
        Meta(description="A sequence with a token whose ratio is below this is left out; 0 is off."),
    ] = None
    denominator: Annotated[
        Literal["kept", "reduced"] | None,
        Meta(description="Whether what is left out still counts where the loss is averaged."),
    ] = None


class ReferenceConfig(Section, frozen=True, kw_only=True):
    update: Annotated[
        Literal["fixed", "refreshed", "moving_average"],
        Meta(description="The model the run began with, a copy of the policy now and then, or its moving average."),
    ] = "fixed"
    every: Annotated[int, Meta(ge=1, description="With refreshed: steps between two copies of the policy.")] = 1
    decay: Annotated[
        Annotated[float, Meta(gt=0, lt=1)],
        Meta(description="With moving_average: share of the old average in the new."),
    ] = 0.99


class CriticConfig(Section, frozen=True, kw_only=True):
    path: Annotated[
        str | None, Meta(description="Model the critic begins as, under a new value head; null takes model.path.")
    ] = None
    learning_rate: Annotated[float, Meta(ge=0, le=1, description="Peak learning rate of the critic's AdamW.")] = 1e-5
    schedule: Annotated[Schedule, Meta(description="Course of its learning rate after warm-up.")] = "constant"
    warmup_steps: Annotated[int, Meta(ge=0, description="Its optimizer steps of linear warm-up.")] = 0
    min_learning_rate: Annotated[float, Meta(ge=0, description="Where its linear and cosine schedules end.")] = 0.0
    weight_decay: Annotated[float, Meta(ge=0, description="As trainer.weight_decay, for the critic.")] = 0.0
    max_grad_norm: Annotated[float, Meta(ge=0, description="As trainer.max_grad_norm, for the critic.")] = 1.0
    value_clip: Annotated[
        NonNegative,
        Meta(description="Most that a value may move from the old one before its loss is clipped; 0 is off."),
    ] = 0.2
    only_steps: Annotated[
        int, Meta(ge=0, description="Training steps from the critic's first on in which it learns alone.")
    ] = 0
