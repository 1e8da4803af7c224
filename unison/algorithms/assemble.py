"""From ``[algorithm]`` and its neighbours to the functions of a run: every setting filled in, none without effect."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor

from unison.algorithms.correction_recipes import describe_correction, resolve_correction
from unison.algorithms.corrections import Correction
from unison.algorithms.effects import made_void, refused_by_loss, unmet_needs, without_taker
from unison.algorithms.kl_term import KlTerm, kl_term
from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.algorithms.recipes import Recipe, find_recipe
from unison.algorithms.registry import Use, find_advantage, find_loss, settings_of, uses_of
from unison.algorithms.shaping import Shaping
from unison.algorithms.trajectories import Estimate, Trajectories
from unison.config.algorithm import Aggregation, AlgorithmConfig
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
            lines.append(f"KL             {self.kl.name} in the {self.kl.place}, {self.kl.coef:g}{weighted}{control}")
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
    users = _users_settings(algorithm)
    # What a recipe sets is for its own functions: the same bounds mean something else to another loss.
    of_advantage = _settings(advantage, users, recipe.settings if advantage_name == recipe.advantage else {})
    of_loss = _settings(loss, users, recipe.settings if loss_name == recipe.loss else {})
    _check_recipe(algorithm.name, recipe)
    problems = [
        *refused_by_loss(loss, of_loss),
        *without_taker(algorithm, users, {**of_advantage, **of_loss}, advantage_name, loss_name),
        *made_void(algorithm, chosen, of_advantage | of_loss),
        *unmet_needs(config, chosen, uses_of(advantage), advantage_name),
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
        kl=kl_term(chosen),
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
    return {key: of_recipe.get(key) if value is None else value for key, value in values.items()}


def _users_settings(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """What the user asks of the two functions, by parameter name."""
    listed = sorted(set(algorithm.options) & set(algorithm.__struct_fields__))
    if listed:
        raise ConfigError(f"algorithm.options.{listed[0]} is a key of its own: set algorithm.{listed[0]}")
    values = {key: getattr(algorithm, key) for key in FUNCTION_SETTINGS}
    return {key: value for key, value in values.items() if value is not None} | dict(algorithm.options)


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


def _settings(function: Callable[..., Any], users: Mapping[str, Any], recipes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: users.get(key, recipes.get(key, default)) for key, default in settings_of(function).items()}
