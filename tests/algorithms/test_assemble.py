"""A configuration becomes an algorithm, every setting filled in, or is refused by the setting that has no effect."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from unison.algorithms.assemble import Algorithm, assemble
from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.algorithms.recipes import RECIPES, Recipe
from unison.algorithms.trajectories import Trajectories
from unison.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, ReferenceConfig
from unison.config.schema import ModelConfig, RolloutConfig, TrainConfig
from unison.core.errors import ConfigError


def config(**sections: dict[str, Any]) -> TrainConfig:
    rollout = {"samples_per_prompt": 4, "max_new_tokens": 64, **sections.get("rollout", {})}
    return TrainConfig(
        model=ModelConfig(path="x"),
        rollout=RolloutConfig(**rollout),
        algorithm=AlgorithmConfig(**sections.get("algorithm", {})),
        correction=CorrectionConfig(**sections.get("correction", {})),
        reference=ReferenceConfig(**sections.get("reference", {})),
        critic=CriticConfig(**sections.get("critic", {})),
    )


def chosen(**settings: Any) -> Algorithm:
    return assemble(config(algorithm=settings))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_assembles_and_says_what_it_is(name: str) -> None:
    algorithm = chosen(name=name)
    assert algorithm.describe()[0].startswith(f"algorithm      {name}: advantage {RECIPES[name].advantage}, loss ")
    assert set(RECIPES[name].settings) <= set(AlgorithmConfig.__struct_fields__)


def test_the_users_values_go_before_the_recipes_and_those_before_the_functions() -> None:
    assert chosen(name="ppo").settings["lam"] == 0.95
    assert chosen(name="ppo", lam=0.5).settings["lam"] == 0.5
    assert chosen(name="ppo").settings["observations"] == "across"
    assert chosen(name="ppo", aggregation="prompt_mean").aggregation == "prompt_mean"
    assert chosen(name="grpo").settings["clip_high"] == 0.28
    mixed = chosen(name="grpo", advantage="rloo", loss="cispo")
    assert (mixed.advantage_name, mixed.loss_name, mixed.aggregation) == ("rloo", "cispo", "token_mean")
    # What a recipe says is for its own functions: another one begins at its own defaults, whatever names they share.
    assert "normalize_std" not in chosen(name="dr_grpo", advantage="rloo").settings
    assert chosen(name="grpo", loss="gspo").settings["clip_high"] == 4e-4
    assert chosen(name="gspo", loss="clipped").settings["clip_high"] == 0.2
    assert chosen(name="grpo", loss="gmpo", clip_high=0.3).settings["clip_high"] == 0.3


def test_the_kl_goes_where_the_recipe_or_the_user_says_by_the_estimator_that_fits() -> None:
    assert (chosen(kl_coef=0.1).kl.place, chosen(kl_coef=0.1).kl.kind) == ("loss", "k3")
    ppo = chosen(name="ppo", kl_coef=0.1).kl
    assert (ppo.place, ppo.kind) == ("reward", "k1")
    assert chosen(name="ppo", kl_coef=0.1, kl_in="loss", kl="k2").kl.kind == "k2"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algorithm": {"name": "rloo", "clip_high": 0.3}}, ["algorithm.clip_high=0.3", "policy_gradient", "clipped"]),
        ({"algorithm": {"lam": 0.9}}, ["algorithm.lam=0.9", "advantage gae"]),
        ({"algorithm": {"tau": 0.2}}, ["algorithm.tau=0.2", "loss mirror"]),
        ({"algorithm": {"dual_clip": 3.0, "loss": "gspo"}}, ["algorithm.dual_clip=3.0", "loss gspo"]),
        ({"algorithm": {"options": {"beta": 1}}}, ["algorithm.options.beta=1", "no effect"]),
        ({"algorithm": {"options": {"clip_low": 0.1}}}, ["algorithm.options.clip_low", "set algorithm.clip_low"]),
        ({"algorithm": {"normalize_std": False, "std_epsilon": 1e-4}}, ["std_epsilon=0.0001", "normalize_std=false"]),
        (
            {"algorithm": {"name": "dr_grpo", "std": "population"}},
            ["algorithm.std='population'", "normalize_std=false"],
        ),
        ({"algorithm": {"clip_low": 0, "clip_high": 0}}, ["algorithm.clip_low=0", "algorithm.clip_high=0"]),
        ({"algorithm": {"clip_high": 1e9}}, ["algorithm.clip_high=1e+09", "no effect"]),
        ({"algorithm": {"kl_in": "reward", "kl_coef": 0.1}}, ["kl_coef=0.1", "advantage grpo does not look at it"]),
        ({"algorithm": {"kl": "k2"}}, ["algorithm.kl='k2'", "without algorithm.kl_coef"]),
        ({"algorithm": {"kl": "k1", "kl_coef": 0.1}}, ['algorithm.kl="k1" in the loss', "mean 0"]),
        (
            {"algorithm": {"name": "ppo", "kl_coef": 0.1, "kl_ratio_weighted": True}},
            ["kl_ratio_weighted=true has no effect on a KL in the reward"],
        ),
        ({"algorithm": {"kl_coef": 0.1, "kl_target": 0.1}}, ["algorithm.kl_target=0.1", "kl_control"]),
        ({"algorithm": {"kl_coef": 0.1, "kl_control": "doubling"}}, ["kl_control='doubling'", "algorithm.kl_target"]),
        (
            {"algorithm": {"kl_coef": 0.1, "kl_control": "doubling", "kl_target": 0.1, "kl_horizon": 100}},
            ["algorithm.kl_horizon=100", "proportional"],
        ),
        (
            {"algorithm": {"kl_coef": 0.1, "kl_control": "proportional", "kl_target": 0.1, "kl_horizon": 10}},
            ["algorithm.kl_horizon=10", "64 samples"],
        ),
        ({"algorithm": {"kl_coef": 0.1}, "reference": {"every": 2}}, ["reference.every=2", "update='fixed'"]),
        ({"algorithm": {"clip_low": 1.0}}, ["clip_low=1.0 must be in [0, 1)"]),
        ({"algorithm": {"name": "dppo", "mask_threshold": 1.5}}, ["mask_threshold=1.5", "below 1"]),
        ({"algorithm": {"dual_clip": 1e9}}, ["algorithm.dual_clip=1e+09", "no effect"]),
        ({"algorithm": {"name": "ppo", "gamma": 0.0, "lam": 0.5}}, ["algorithm.lam=0.5 has no effect with gamma=0"]),
        ({"algorithm": {"name": "reinforce", "observations": "over"}}, ["observations='over'", "gamma=1"]),
        ({"algorithm": {"name": "remax", "length_weight": 0.5}}, ["length_weight=0.5", "greedy answer"]),
        (
            {"algorithm": {"aggregation": "token_sum"}, "correction": {"name": "icepop", "denominator": "kept"}},
            ["correction.denominator='kept'", "token_sum"],
        ),
        ({"algorithm": {"overlong_penalty": 2.0}}, ["overlong_penalty=2.0", "without algorithm.overlong_buffer"]),
        ({"algorithm": {"overlong_buffer": 64}}, ["overlong_buffer=64", "rollout.max_new_tokens=64"]),
        ({"algorithm": {"correct_reward": 0.5}}, ["correct_reward=0.5", "without algorithm.length_weight"]),
        ({"algorithm": {"name": "ppo", "bootstrap": True}}, ["algorithm.bootstrap=true", 'truncated="keep"']),
        ({"rollout": {"samples_per_prompt": 1}}, ["rollout.samples_per_prompt=1", "at least 2"]),
        (
            {"rollout": {"samples_per_prompt": 1}, "algorithm": {"name": "reinforce", "length_weight": 1.0}},
            ["algorithm.length_weight", "rollout.samples_per_prompt=1"],
        ),
        ({"critic": {"learning_rate": 1e-4}}, ["critic.learning_rate=0.0001", "has no critic"]),
        ({"reference": {"update": "refreshed"}}, ["reference.update='refreshed'", "without algorithm.kl_coef"]),
        ({"correction": {"name": "tis", "old": "rollout"}}, ["correction.weight", "correction.old"]),
        ({"correction": {"upper": 3.0}}, ["correction.upper=3.0", "correction.weight"]),
        ({"algorithm": {"name": "gropo"}}, ["algorithm.name='gropo'", "did you mean grpo"]),
        ({"algorithm": {"advantage": "gea"}}, ["algorithm.advantage='gea'", "gae"]),
        ({"algorithm": {"loss": "clippd"}}, ["algorithm.loss='clippd'", "clipped"]),
    ],
)
def test_what_has_no_effect_or_cannot_be_meant_is_refused_by_name(sections: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        assemble(config(**sections))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_all_problems_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(name="rloo", clip_low=0.1, lam=0.5, kl="k2")
    assert str(caught.value).count("\n- ") == 3


def test_an_algorithm_of_ones_own_is_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def best_of_batch(batch: Trajectories, *, margin: float = 0.5) -> Tensor:
        return batch.spread((batch.outcomes_N >= batch.outcomes_N.max() - margin).double())

    def plain(batch: LossBatch, *, sharpness: float = 1.0) -> PolicyLoss:
        loss = -sharpness * batch.advantages_N * batch.logprobs_N
        return PolicyLoss(loss, torch.ones_like(loss), torch.zeros_like(loss, dtype=torch.bool))

    module = types.ModuleType("my_algorithm")
    module.best_of_batch, module.plain = best_of_batch, plain  # type: ignore[attr-defined]
    module.RECIPE = Recipe(  # type: ignore[attr-defined]
        advantage="my_algorithm:best_of_batch", loss="my_algorithm:plain", settings={"sharpness": 2.0}
    )
    monkeypatch.setitem(sys.modules, "my_algorithm", module)
    algorithm = assemble(
        config(
            algorithm={"name": "my_algorithm:RECIPE", "options": {"margin": 0.25}}, rollout={"samples_per_prompt": 1}
        )
    )
    assert algorithm.settings == {"margin": 0.25, "sharpness": 2.0}
    with pytest.raises(ConfigError, match="is a function, not a Recipe"):
        chosen(name="my_algorithm:plain")
    with pytest.raises(ConfigError, match=r"algorithm\.clip_low=0\.1 has no effect"):
        chosen(name="my_algorithm:RECIPE", clip_low=0.1)
    module.RECIPE = Recipe(advantage="grpo", loss="clipped", settings={"clip_hihg": 0.3})  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="the recipe my_algorithm:RECIPE sets 'clip_hihg'"):
        chosen(name="my_algorithm:RECIPE")
    module.RECIPE = Recipe(advantage="grpo", loss="clipped", settings={"kl_coef": 0.3})  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"sets 'kl_coef', which would have no effect: algorithm\.kl_coef is never"):
        chosen(name="my_algorithm:RECIPE")
