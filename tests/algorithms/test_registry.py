from __future__ import annotations

import sys
import types

import pytest
from torch import Tensor

from unison.algorithms import registry
from unison.algorithms.advantages.groups import grpo
from unison.algorithms.losses.clipped import clipped
from unison.algorithms.registry import (
    find_advantage,
    find_loss,
    names,
    register_advantage,
    register_loss,
    settings_of,
    takers_of,
    uses_of,
)
from unison.algorithms.trajectories import Trajectories
from unison.core.errors import ConfigError

USES = {
    "grpo": {"groups"},
    "grpo_leave_one_out": {"groups"},
    "grpo_turns": {"groups"},
    "maxrl": {"groups"},
    "mirror": {"groups"},
    "opo": {"groups"},
    "reinforce": {"kl"},
    "reinforce_pp": {"kl"},
    "reinforce_pp_baseline": {"groups", "kl"},
    "remax": {"kl", "greedy"},
    "rloo": {"groups", "kl"},
}


def advantage_named(name: str) -> object:
    return find_advantage(name)


def loss_named(name: str) -> object:
    return find_loss(name)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("advantage", "loss"):
        names(kind)
    monkeypatch.setattr(registry, "_REGISTERED", {kind: dict(own) for kind, own in registry._REGISTERED.items()})


@pytest.mark.parametrize("name", USES)
def test_estimators_are_found_by_name_and_declare_what_they_use(name: str) -> None:
    assert name in names("advantage")
    assert uses_of(find_advantage(name)) == USES[name]


def test_an_unknown_name_is_told_with_what_was_meant() -> None:
    assert advantage_named("grpo") is grpo and loss_named("clipped") is clipped
    with pytest.raises(ConfigError, match=r"algorithm\.advantage='grppo' is unknown; did you mean grpo"):
        find_advantage("grppo")
    with pytest.raises(ConfigError, match=r"algorithm\.loss='cliped' is unknown.*did you mean clipped"):
        find_loss("cliped")


@pytest.mark.usefixtures("clean")
def test_a_registered_function_is_found_and_cannot_be_replaced() -> None:
    def mine(batch: Trajectories, *, strength: float = 2.0) -> Tensor:
        return batch.spread(batch.outcomes_N * strength)

    register_advantage("mine", uses=("kl",))(mine)
    assert advantage_named("mine") is mine and uses_of(mine) == {"kl"}
    assert settings_of(mine) == {"strength": 2.0} and takers_of("strength") == ["advantage mine"]
    with pytest.raises(ConfigError, match="advantage 'mine' is registered already; choose another name"):
        register_advantage("mine")(mine)
    with pytest.raises(ConfigError, match="advantage 'grpo' is registered already"):
        register_advantage("grpo")(mine)
    with pytest.raises(ConfigError, match="loss 'clipped' is registered already"):
        register_loss("clipped")(mine)
    assert advantage_named("grpo") is grpo


def test_an_unknown_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="'other' uses 'critic'; known: groups, kl, values, greedy"):
        register_advantage("other", uses=("critic",))
    assert "other" not in names("advantage")


def test_a_users_function_is_found_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def my_estimator(batch: Trajectories) -> Tensor:
        return batch.rewards_T

    module = types.ModuleType("a_users_module")
    module.my_estimator = my_estimator  # type: ignore[attr-defined]
    module.a_number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_users_module", module)
    assert advantage_named("a_users_module:my_estimator") is my_estimator
    assert uses_of(my_estimator) == frozenset()
    assert loss_named("a_users_module:my_estimator") is my_estimator
    with pytest.raises(ConfigError, match="did you mean my_estimator"):
        find_advantage("a_users_module:my_estimater")
    with pytest.raises(ConfigError, match="is a int; name a function"):
        find_advantage("a_users_module:a_number")
    with pytest.raises(ConfigError, match="importing no_such_module_anywhere failed"):
        find_advantage("no_such_module_anywhere:f")
    with pytest.raises(ConfigError, match="no module:object path"):
        find_advantage(":f")


def test_settings_are_the_keyword_only_parameters_with_their_defaults() -> None:
    assert settings_of(grpo) == {"normalize_std": True, "std": "sample", "std_epsilon": 1e-6}
    assert {"advantage grpo", "advantage grpo_turns", "advantage reinforce_pp"} <= set(takers_of("std"))
    assert takers_of("no_such_setting") == []
