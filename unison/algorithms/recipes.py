"""Recipes: one word that selects an advantage, a loss, an aggregation and settings that belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from unison.config.algorithm import Aggregation
from unison.config.names import did_you_mean
from unison.config.plugins import load_object
from unison.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Values for the keys of ``[algorithm]`` that the user leaves null. Names are as the config takes them."""

    advantage: str
    loss: str
    aggregation: Aggregation = "token_mean"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``[algorithm]``, or parameters of functions of one's own."""


RECIPES: Final[dict[str, Recipe]] = {
    "grpo": Recipe(advantage="grpo", loss="clipped", settings={"clip_low": 0.2, "clip_high": 0.28}),
}


def register_recipe(name: str, recipe: Recipe) -> None:
    """Put a recipe under ``name``. Raises ConfigError where the name is taken."""
    if name in RECIPES:
        raise ConfigError(f"algorithm {name!r} is registered already; choose another name")
    RECIPES[name] = recipe


def find_recipe(name: str) -> Recipe:
    """The recipe of a registered name or at ``module:object``. Raises ConfigError where there is none."""
    if ":" in name:
        found = load_object(name, kind="algorithm", error=ConfigError)
        if not isinstance(found, Recipe):
            raise ConfigError(
                f"algorithm.name={name!r} is a {type(found).__name__}, not a Recipe; a function of your own is set as "
                "algorithm.advantage or algorithm.loss"
            )
        return found
    if name not in RECIPES:
        raise ConfigError(
            f"algorithm.name={name!r} is no recipe{did_you_mean(name, RECIPES)}; known: {', '.join(sorted(RECIPES))}, "
            "or module:object of your own"
        )
    return RECIPES[name]
