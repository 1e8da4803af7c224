"""From ``[algorithm]`` and its neighbours to the functions of a run: every setting filled in, none without effect."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import msgspec
from torch import Tensor

from unison.algorithms.correction_recipes import describe_correction, resolve_correction
from unison.algorithms.corrections import Correction
from unison.algorithms.kl import KlKind
from unison.algorithms.kl_control import proportional
from unison.algorithms.losses.base import MAX_LOG_RATIO, LossBatch, PolicyLoss
from unison.algorithms.recipes import Recipe, find_recipe
from unison.algorithms.registry import Use, find_advantage, find_loss, settings_of, takers_of, uses_of
from unison.algorithms.shaping import Shaping
from unison.algorithms.trajectories import Estimate, Trajectories
from unison.config.algorithm import Aggregation, AlgorithmConfig, ReferenceConfig
from unison.config.schema import TrainConfig
from unison.core.errors import ConfigError

FUNCTION_SETTINGS: Final = (
    "normalize_std",
    "std",
    "std_epsilon",
    "gamma",
    "lam",
    "observations",
    "bootstrap",
    "whiten",
    "clip_low",
    "clip_high",
    "dual_clip",
    "mask_threshold",
    "divergence",
    "temperature_positive",
    "temperature_negative",
    "tau",
    "baseline",
)
"""Keys that reach the advantage or the loss, whichever takes a parameter of the name."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What a run does with its samples."""

    name: str
    advantage_name: str
    loss_name: str
    estimate: Callable[[Trajectories], Tensor | Estimate]
    loss: Callable[[LossBatch], PolicyLoss]
    uses: frozenset[Use]
    aggregation: Aggregation
    fixed_length: int
    """Tokens that the aggregation fixed_length divides by."""
    truncated: Literal["mask", "keep"]
    entropy_coef: float
    kl: KlTerm
    shaping: Shaping
    correction: Correction
    settings: Mapping[str, Any]
    """Of the two functions, all filled in."""

    def describe(self) -> list[str]:
        """Lines for people: what was chosen, by whom ever."""
        settings = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        lines = [
            f"algorithm      {self.name}: advantage {self.advantage_name}, loss {self.loss_name}, "
            f"{self.aggregation}" + (f" ({settings})" if settings else "")
        ]
        if self.kl.coef > 0:
            weighted = ", ratio-weighted" if self.kl.ratio_weighted else ""
            control = "" if self.kl.control == "fixed" else f", {self.kl.control} control to {self.kl.target:g}"
            lines.append(f"KL             {self.kl.kind} in the {self.kl.place}, {self.kl.coef:g}{weighted}{control}")
        if self.correction.needs_recompute:
            lines.append(f"correction     {describe_correction(self.correction)}")
        return lines


def assemble(config: TrainConfig) -> Algorithm:
    """The algorithm of a run. Raises ConfigError naming a setting that nothing would take, or that cannot be meant."""
    algorithm = config.algorithm
    recipe = find_recipe(algorithm.name)
    chosen = _chosen(algorithm, recipe)
    advantage_name, loss_name = chosen["advantage"], chosen["loss"]
    advantage, loss = find_advantage(advantage_name), find_loss(loss_name)
    given = _given_settings(algorithm, chosen)
    of_advantage = _settings(advantage, given)
    of_loss = _settings(loss, given)
    _check_recipe(algorithm.name, recipe)
    problems = [
        *_without_taker(algorithm, given, {**of_advantage, **of_loss}, advantage_name, loss_name),
        *_coupled(algorithm, chosen, of_advantage | of_loss),
        *_use_problems(config, chosen, uses_of(advantage), advantage_name),
    ]
    if problems:
        raise ConfigError("settings that do not fit together:\n" + "\n".join(f"- {problem}" for problem in problems))
    return Algorithm(
        name=algorithm.name,
        advantage_name=advantage_name,
        loss_name=loss_name,
        estimate=functools.partial(advantage, **of_advantage),
        loss=functools.partial(loss, **of_loss),
        uses=uses_of(advantage),
        aggregation=chosen["aggregation"],
        fixed_length=config.rollout.max_new_tokens,
        truncated=chosen["truncated"],
        entropy_coef=chosen["entropy_coef"],
        kl=_kl_term(chosen),
        shaping=Shaping(
            length_weight=chosen["length_weight"],
            correct_reward=chosen["correct_reward"],
            overlong_buffer=chosen["overlong_buffer"],
            overlong_penalty=chosen["overlong_penalty"],
            max_tokens=config.rollout.max_new_tokens,
        ),
        correction=resolve_correction(config.correction),
        settings=of_advantage | of_loss,
    )


def _chosen(algorithm: AlgorithmConfig, recipe: Recipe) -> dict[str, Any]:
    """All keys of ``[algorithm]``: the user's, else the recipe's; null where neither says anything."""
    of_recipe = {
        "advantage": recipe.advantage,
        "loss": recipe.loss,
        "aggregation": recipe.aggregation,
        **recipe.settings,
    }
    values = {key: getattr(algorithm, key) for key in algorithm.__struct_fields__}
    return {
        **{key: of_recipe.get(key) if value is None else value for key, value in values.items()},
        "options": {key: value for key, value in of_recipe.items() if key not in values} | algorithm.options,
    }


def _given_settings(algorithm: AlgorithmConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What user or recipe ask of the two functions, by parameter name."""
    listed = sorted(set(algorithm.options) & set(algorithm.__struct_fields__))
    if listed:
        raise ConfigError(f"algorithm.options.{listed[0]} is a key of its own: set algorithm.{listed[0]}")
    return {key: chosen[key] for key in FUNCTION_SETTINGS if chosen[key] is not None} | dict(chosen["options"])


def _check_recipe(name: str, recipe: Recipe) -> None:
    """What a recipe sets must be a key, or a parameter of its own functions."""
    own = {*settings_of(find_advantage(recipe.advantage)), *settings_of(find_loss(recipe.loss))}
    unknown = [key for key in recipe.settings if key not in AlgorithmConfig.__struct_fields__ and key not in own]
    if unknown:
        raise ConfigError(
            f"the recipe {name} sets {unknown[0]!r}, which is no key of [algorithm] and no parameter of "
            f"{recipe.advantage} or {recipe.loss}"
        )
    neutral = AlgorithmConfig()
    void = [key for key in recipe.settings if getattr(neutral, key, None) is not None]
    if void:
        raise ConfigError(
            f"the recipe {name} sets {void[0]!r}, which would have no effect: algorithm.{void[0]} is never null, and a "
            "recipe fills in what is null; set it in the configuration"
        )


def _settings(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: given.get(key, default) for key, default in settings_of(function).items()}


def _without_taker(
    algorithm: AlgorithmConfig, given: Mapping[str, Any], taken: Mapping[str, Any], advantage: str, loss: str
) -> Iterator[str]:
    for key, value in given.items():
        own = key in algorithm.options
        is_users = own or getattr(algorithm, key, None) is not None
        if key in taken or not is_users:
            continue
        takers = takers_of(key)
        hint = f" (these take it: {', '.join(takers)})" if takers else ""
        yield (
            f"algorithm.{'options.' if own else ''}{key}={value!r} has no effect: neither the advantage {advantage} "
            f"nor the loss {loss} takes it{hint}; leave it out"
        )


def _coupled(algorithm: AlgorithmConfig, chosen: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
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
    if settings.get("clip_high", 0.0) > math.exp(MAX_LOG_RATIO) - 1:
        yield (
            f"algorithm.clip_high={settings['clip_high']:g} has no effect: the ratio is capped at e^{MAX_LOG_RATIO:g} "
            f"= {math.exp(MAX_LOG_RATIO):.3g} anyway; use a value like 0.28"
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
    place, kind, weighted = _kl_place(chosen), _kl_kind(chosen), chosen["kl_ratio_weighted"]
    if place == "reward" and weighted:
        yield "algorithm.kl_ratio_weighted=true has no effect on a KL in the reward; leave it out"
    if place == "loss" and kind == "k1" and not weighted:
        yield (
            'algorithm.kl="k1" in the loss has a gradient of mean 0, so it holds the policy nowhere; use k2, or k3, '
            'or kl_ratio_weighted=true, or kl_in="reward"'
        )
    if chosen["kl_control"] != "fixed" and chosen["kl_target"] is None:
        yield f"algorithm.kl_control={chosen['kl_control']!r} needs algorithm.kl_target, the KL per token to steer to"


def _use_problems(
    config: TrainConfig, chosen: Mapping[str, Any], uses: frozenset[Use], advantage: str
) -> Iterator[str]:
    samples = config.rollout.samples_per_prompt
    if "groups" in uses and samples == 1:
        yield (
            f"rollout.samples_per_prompt=1 with the advantage {advantage}: a group of one has no contrast, so nothing "
            "would be learnt; use at least 2"
        )
    if config.algorithm.length_weight > 0 and samples == 1:
        yield "algorithm.length_weight compares the lengths of a group; rollout.samples_per_prompt=1 leaves none"
    if config.algorithm.kl_coef > 0 and _kl_place(chosen) == "reward" and "kl" not in uses:
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


def _kl_place(chosen: Mapping[str, Any]) -> Literal["loss", "reward"]:
    return cast(Literal["loss", "reward"], chosen["kl_in"] or "loss")


def _kl_kind(chosen: Mapping[str, Any]) -> KlKind:
    """k1 in the reward, where it is unbiased and may fall below 0; k3 in the loss."""
    return cast(KlKind, chosen["kl"] or ("k1" if _kl_place(chosen) == "reward" else "k3"))


def _kl_term(chosen: Mapping[str, Any]) -> KlTerm:
    return KlTerm(
        coef=chosen["kl_coef"],
        place=_kl_place(chosen),
        kind=_kl_kind(chosen),
        ratio_weighted=chosen["kl_ratio_weighted"],
        control=chosen["kl_control"],
        target=chosen["kl_target"] or math.inf,
        horizon=chosen["kl_horizon"] or KL_HORIZON,
    )
