"""Settings of an algorithm that would have no effect, or that do not fit together: a sentence for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch

from unison.algorithms.kl_control import proportional
from unison.algorithms.kl_term import KL_HORIZON, kl_name, kl_place
from unison.algorithms.losses.base import MAX_LOG_RATIO, LossBatch
from unison.algorithms.registry import Use, find_loss, settings_of, takers_of
from unison.config.algorithm import AlgorithmConfig, ReferenceConfig
from unison.config.schema import TrainConfig
from unison.core.errors import ConfigError


def without_taker(
    algorithm: AlgorithmConfig, users: Mapping[str, Any], taken: Mapping[str, Any], advantage: str, loss: str
) -> Iterator[str]:
    for key, value in users.items():
        own = key in algorithm.options
        if key in taken:
            continue
        takers = takers_of(key)
        hint = f" (these take it: {', '.join(takers)})" if takers else ""
        yield (
            f"algorithm.{'options.' if own else ''}{key}={value!r} has no effect: neither the advantage {advantage} "
            f"nor the loss {loss} takes it{hint}; leave it out"
        )


def refused_by_loss(loss: Callable[..., Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """Bounds that a loss of the package refuses: it would do so at its first batch, after a whole rollout."""
    if not str(getattr(loss, "__module__", "")).startswith("unison."):
        return
    nothing = torch.zeros(0)
    batch = LossBatch(
        logprobs_N=nothing,
        old_logprobs_N=nothing,
        advantages_N=nothing,
        sequence_N=nothing.long(),
        num_sequences=0,
        rollout_logprobs_N=nothing,
    )
    try:
        loss(batch, **settings)
    except ConfigError as error:
        yield f"algorithm.{error}"


def made_void(algorithm: AlgorithmConfig, chosen: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """Settings that another one makes void."""
    if settings.get("normalize_std") is False:
        for key in ("std", "std_epsilon"):
            if getattr(algorithm, key) is not None:
                yield (
                    f"algorithm.{key}={getattr(algorithm, key)!r} has no effect with normalize_std=false; leave it "
                    "out, or set normalize_std=true"
                )
    if settings.get("whiten") is False and "normalize_std" not in settings and algorithm.std is not None:
        yield f"algorithm.std={algorithm.std!r} has no effect with whiten=false; leave it out, or set whiten=true"
    tau_of_loss = "tau" in settings_of(find_loss(chosen["loss"]))
    if settings.get("baseline") == "mean" and algorithm.tau is not None and not tau_of_loss:
        yield (
            f'algorithm.tau={algorithm.tau:g} has no effect with baseline="mean"; leave it out, or set '
            'baseline="log_mean_exp"'
        )
    if settings.get("bootstrap") is True and algorithm.bootstrap and chosen["truncated"] == "mask":
        yield (
            'algorithm.bootstrap=true has no effect with truncated="mask", which leaves out of the loss what would '
            'bootstrap; set truncated="keep", or leave it out'
        )
    for key, room, usual in (("clip_high", 1.0, 0.28), ("dual_clip", 0.0, 3.0)):
        if (settings.get(key) or 0.0) > math.exp(MAX_LOG_RATIO) - room:
            yield (
                f"algorithm.{key}={settings[key]:g} has no effect: the ratio is capped at e^{MAX_LOG_RATIO:g} = "
                f"{math.exp(MAX_LOG_RATIO):.3g} anyway; use a value like {usual}"
            )
    if settings.get("gamma") == 0 and algorithm.lam is not None:
        yield f"algorithm.lam={algorithm.lam:g} has no effect with gamma=0; leave it out, or raise gamma"
    if settings.get("gamma") == 1 and "lam" not in settings and algorithm.observations is not None:
        yield (
            f"algorithm.observations={algorithm.observations!r} has no effect with gamma=1, which discounts no step; "
            "leave it out, or lower gamma"
        )
    if settings.get("clip_low") == 0 and settings.get("clip_high") == 0:
        yield (
            "algorithm.clip_low=0 and algorithm.clip_high=0 leave the ratio no room: a token whose log-prob has moved "
            "at all in the direction of its advantage is not trained; use values like 0.2 and 0.28"
        )
    neutral = AlgorithmConfig()
    for key, needs, is_on in (
        ("correct_reward", "length_weight", algorithm.length_weight > 0),
        ("overlong_penalty", "overlong_buffer", algorithm.overlong_buffer > 0),
        ("kl", "kl_coef", algorithm.kl_coef > 0),
        ("kl_in", "kl_coef", algorithm.kl_coef > 0),
        ("kl_ratio_weighted", "kl_coef", algorithm.kl_coef > 0),
        ("kl_control", "kl_coef", algorithm.kl_coef > 0),
        ("kl_target", "kl_control", algorithm.kl_control != "fixed"),
        ("kl_horizon", 'kl_control="proportional"', algorithm.kl_control == "proportional"),
    ):
        value = getattr(algorithm, key)
        if value != getattr(neutral, key) and not is_on:
            yield f"algorithm.{key}={value!r} has no effect without algorithm.{needs}; set it, or leave this out"
    if algorithm.kl_coef > 0:
        yield from _kl_problems(chosen)


def _kl_problems(chosen: Mapping[str, Any]) -> Iterator[str]:
    place, kind, weighted = kl_place(chosen), kl_name(chosen), chosen["kl_ratio_weighted"]
    if place == "reward" and weighted:
        yield "algorithm.kl_ratio_weighted=true has no effect on a KL in the reward; leave it out"
    if place == "loss" and kind == "k1" and not weighted:
        yield (
            'algorithm.kl="k1" in the loss has a gradient of mean 0, so it holds the policy nowhere; use k2, or k3, '
            'or kl_ratio_weighted=true, or kl_in="reward"'
        )
    if chosen["kl_control"] != "fixed" and chosen["kl_target"] is None:
        yield f"algorithm.kl_control={chosen['kl_control']!r} needs algorithm.kl_target, the KL per token to steer to"


def unmet_needs(config: TrainConfig, chosen: Mapping[str, Any], uses: frozenset[Use], advantage: str) -> Iterator[str]:
    samples = config.rollout.samples_per_prompt
    if "groups" in uses and samples == 1:
        yield (
            f"rollout.samples_per_prompt=1 with the advantage {advantage}: a group of one has no contrast, so nothing "
            "would be learnt; use at least 2"
        )
    if "greedy" in uses and config.algorithm.length_weight > 0:
        yield (
            f"algorithm.length_weight={config.algorithm.length_weight:g} compares the samples of a group with each "
            f"other, and the advantage {advantage} each with a greedy answer; leave it out"
        )
    if config.correction.denominator is not None and chosen["aggregation"] == "token_sum":
        yield (
            f"correction.denominator={config.correction.denominator!r} has no effect with "
            'algorithm.aggregation="token_sum", which divides by nothing; leave it out'
        )
    if config.algorithm.length_weight > 0 and samples == 1:
        yield "algorithm.length_weight compares the lengths of a group; rollout.samples_per_prompt=1 leaves none"
    if config.algorithm.kl_coef > 0 and kl_place(chosen) == "reward" and "kl" not in uses:
        yield (
            f'algorithm.kl_coef={config.algorithm.kl_coef:g} with kl_in="reward" has no effect: the advantage '
            f'{advantage} does not look at it; use kl_in="loss"'
        )
    if "values" not in uses:
        changed = _changed(config.critic)
        if changed:
            yield f"critic.{changed} has no effect: the advantage {advantage} has no critic; leave it out, or use gae"
    yield from _reference_problems(config.reference)
    if config.algorithm.kl_control == "proportional":
        yield from _horizon_problems(config)
    if config.algorithm.kl_coef == 0:
        changed = _changed(config.reference)
        if changed:
            yield f"reference.{changed} has no effect without algorithm.kl_coef; set it, or leave this out"
    if 0 < config.rollout.max_new_tokens <= config.algorithm.overlong_buffer:
        yield (
            f"algorithm.overlong_buffer={config.algorithm.overlong_buffer} is not below rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens}: every response would cost reward"
        )


def _reference_problems(reference: ReferenceConfig) -> Iterator[str]:
    for key, update in (("every", "refreshed"), ("decay", "moving_average")):
        value = getattr(reference, key)
        if value != getattr(ReferenceConfig(), key) and reference.update != update:
            yield (
                f"reference.{key}={value} has no effect with reference.update={reference.update!r}; leave it out, or "
                f"set reference.update={update!r}"
            )


def _horizon_problems(config: TrainConfig) -> Iterator[str]:
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    try:
        proportional(1.0, 1.0, 1.0, samples, config.algorithm.kl_horizon or KL_HORIZON)
    except ConfigError as error:
        yield f"algorithm.{error}"


def _changed(section: msgspec.Struct) -> str | None:
    """The first key of a section that is not at its default, as ``key=value``."""
    neutral = type(section)()
    keys = [key for key in section.__struct_fields__ if getattr(section, key) != getattr(neutral, key)]
    return f"{keys[0]}={getattr(section, keys[0])!r}" if keys else None
