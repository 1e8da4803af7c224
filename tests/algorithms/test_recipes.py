from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from unison.algorithms.assemble import FUNCTION_SETTINGS, assemble
from unison.algorithms.recipes import RECIPES, Recipe, find_recipe, register_recipe
from unison.algorithms.registry import find_advantage, find_loss, settings_of, takers_of
from unison.config.algorithm import AlgorithmConfig
from unison.config.schema import ModelConfig, TrainConfig
from unison.core.errors import ConfigError


def config_of(**algorithm: Any) -> TrainConfig:
    return TrainConfig(model=ModelConfig(path="tiny-random"), algorithm=AlgorithmConfig(**algorithm))


@pytest.mark.parametrize("name", RECIPES)
def test_the_settings_of_a_recipe_are_keys_that_a_user_may_set_and_that_reach_something(name: str) -> None:
    recipe, neutral = RECIPES[name], AlgorithmConfig()
    taken = {**settings_of(find_advantage(recipe.advantage)), **settings_of(find_loss(recipe.loss))}
    for key in recipe.settings:
        assert getattr(neutral, key) is None, f"{key} is no nullable key, so that a user's value could not be told"
        assert key in taken or key == "kl_in"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_alone_is_a_whole_configuration(name: str) -> None:
    recipe = RECIPES[name]
    algorithm = assemble(config_of(name=name))
    assert (algorithm.advantage_name, algorithm.loss_name) == (recipe.advantage, recipe.loss)
    assert algorithm.aggregation == recipe.aggregation
    for key, value in recipe.settings.items():
        if key != "kl_in":
            assert algorithm.settings[key] == value
    assert assemble(config_of(name=name, kl_coef=0.1)).kl.place == recipe.settings.get("kl_in", "loss")


@pytest.mark.parametrize("name", RECIPES)
def test_a_setting_that_both_functions_of_a_recipe_take_means_the_same_to_both(name: str) -> None:
    recipe = RECIPES[name]
    advantage, loss = settings_of(find_advantage(recipe.advantage)), settings_of(find_loss(recipe.loss))
    for key in set(advantage) & set(loss):
        assert key in recipe.settings or advantage[key] == loss[key]


@pytest.mark.parametrize("key", FUNCTION_SETTINGS)
def test_every_setting_of_the_configuration_reaches_some_function(key: str) -> None:
    assert takers_of(key)


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.std='population' has no effect with whiten=false"):
        assemble(config_of(advantage="reinforce_pp", whiten=False, std="population"))
    with pytest.raises(ConfigError, match=r'algorithm\.tau=0\.2 has no effect with baseline="mean"'):
        assemble(config_of(advantage="mirror", tau=0.2))
    with pytest.raises(ConfigError, match=r"algorithm\.baseline='mean' has no effect.*advantage mirror"):
        assemble(config_of(baseline="mean"))
    logarithmic = assemble(config_of(advantage="mirror", tau=0.2, baseline="log_mean_exp"))
    assert logarithmic.settings["tau"] == 0.2 and logarithmic.settings["baseline"] == "log_mean_exp"
    assert assemble(config_of(advantage="reinforce_pp", std="population")).settings["std"] == "population"


def test_the_users_value_goes_before_that_of_the_recipe() -> None:
    algorithm = assemble(config_of(name="dr_grpo", normalize_std=True, aggregation="token_mean", std="population"))
    assert algorithm.settings["normalize_std"] is True and algorithm.settings["std"] == "population"
    assert algorithm.aggregation == "token_mean"


def test_an_unknown_recipe_is_told_with_what_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.name='dr_grop' is no recipe; did you mean dr_grpo"):
        find_recipe("dr_grop")


def test_a_recipe_of_ones_own_is_found_and_cannot_replace_another(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Recipe(advantage="rloo", loss="clipped")
    module = types.ModuleType("a_module_of_recipes")
    module.mine, module.other = mine, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_module_of_recipes", module)
    assert find_recipe("a_module_of_recipes:mine") is mine
    with pytest.raises(ConfigError, match="is a int, not a Recipe"):
        find_recipe("a_module_of_recipes:other")
    with pytest.raises(ConfigError, match="algorithm 'grpo' is registered already"):
        register_recipe("grpo", mine)
    monkeypatch.setitem(RECIPES, "mine", mine)
    assert find_recipe("mine") is mine
