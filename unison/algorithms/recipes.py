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


_CLIPPED: Final = {"clip_low": 0.2, "clip_high": 0.2}

RECIPES: Final[dict[str, Recipe]] = {
    # Shao et al. 2024 (DeepSeekMath), with the higher upper bound of DAPO.
    "grpo": Recipe(advantage="grpo", loss="clipped", settings={"clip_low": 0.2, "clip_high": 0.28}),
    # Liu et al. 2025: neither the deviation of a group nor the length of a response scales what is learnt.
    "dr_grpo": Recipe(
        advantage="grpo", loss="clipped", aggregation="fixed_length", settings={**_CLIPPED, "normalize_std": False}
    ),
    # Yu et al. 2025; its dynamic sampling and overlong punishment are keys of their own.
    "dapo": Recipe(advantage="grpo", loss="clipped", settings={"clip_low": 0.2, "clip_high": 0.28}),
    # Ahmadian et al. 2024: the response is one action, its KL part of the reward.
    "rloo": Recipe(
        advantage="rloo",
        loss="policy_gradient",
        aggregation="sequence_mean_token_sum",
        settings={"kl_in": "reward"},
    ),
    # Williams 1992.
    "reinforce": Recipe(
        advantage="reinforce",
        loss="policy_gradient",
        aggregation="sequence_mean_token_sum",
        settings={"kl_in": "reward", "gamma": 1.0},
    ),
    # Hu 2025.
    "reinforce_pp": Recipe(
        advantage="reinforce_pp",
        loss="clipped",
        settings={**_CLIPPED, "kl_in": "reward", "gamma": 1.0, "whiten": True},
    ),
    # Hu 2025, with the mean reward of the group as baseline.
    "reinforce_pp_baseline": Recipe(
        advantage="reinforce_pp_baseline", loss="clipped", settings={**_CLIPPED, "kl_in": "reward", "whiten": True}
    ),
    # Li et al. 2023.
    "remax": Recipe(
        advantage="remax",
        loss="policy_gradient",
        aggregation="sequence_mean_token_sum",
        settings={"kl_in": "reward"},
    ),
    # Schulman et al. 2017, as used for language models since Ouyang et al. 2022: KL in the reward, a critic.
    "ppo": Recipe(
        advantage="gae",
        loss="clipped",
        settings={**_CLIPPED, "kl_in": "reward", "gamma": 1.0, "lam": 0.95, "whiten": True},
    ),
    # Zheng et al. 2025: the ratio is that of the whole response, and so are its narrow bounds.
    "gspo": Recipe(
        advantage="grpo",
        loss="gspo",
        aggregation="sequence_mean_token_mean",
        settings={"clip_low": 3e-4, "clip_high": 4e-4},
    ),
    # Zhao et al. 2025: the geometric mean of the clipped ratios of a response.
    "gmpo": Recipe(advantage="grpo", loss="gmpo", aggregation="sequence_mean_token_mean"),
    # MiniMax 2025 (MiniMax-M1): clips the weight of a token, not its gradient.
    "cispo": Recipe(advantage="grpo", loss="cispo"),
    # Gao et al. 2025: a soft gate in place of the clip.
    "sapo": Recipe(advantage="grpo", loss="sapo", aggregation="sequence_mean_token_mean"),
    # Kimi Team 2025 (Kimi k1.5): squared loss of policy mirror descent. Loss and advantage share tau.
    "mirror": Recipe(advantage="mirror", loss="mirror", aggregation="sequence_mean_token_mean", settings={"tau": 0.1}),
    # Qi et al. 2026: bounds the divergence of the policies in place of the ratio.
    "dppo": Recipe(advantage="grpo", loss="dppo"),
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
