"""Rollout functions: how one sample comes about, where a single answer is not enough.

    async def rollout(client, task, sampling, sample) -> list[Sample] | None

``client`` is an EngineClient, ``task`` the PromptTask, ``sampling`` the settings with this sample's own seed, and
``sample`` holds the prompt already. The function appends to it: tokens the policy sampled with ``append_sampled`` (or
``complete_sample``), the world's with ``append_world``, and ends it by setting ``status`` and ``finish_reason``. It
returns None for that sample, or a list of samples of this trajectory. All its noise must come from ``sampling.seed``,
so that the sample is the same whenever it is drawn.
"""

from __future__ import annotations

import inspect
from typing import Final

from unison.core.errors import ConfigError
from unison.rewards.plugins import Registry
from unison.rollout.collect import RolloutFunction

_PARAMETERS: Final = ("client", "task", "sampling", "sample")

_registry: Registry[RolloutFunction] = Registry("rollout function", ConfigError)
register_rollout: Final = _registry.register


def load_rollout(name: str | None) -> RolloutFunction | None:
    """The configured function. Raises ConfigError where it cannot be called as one."""
    if name is None:
        return None
    found = _registry.find(name)
    check_rollout(name, found)
    return found


def check_rollout(name: str, function: object) -> None:
    """Raise ConfigError where the object is no ``async (client, task, sampling, sample)`` function."""
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"rollout.function={name!r} is no async function; write async def f(client, task, sampling, sample)"
        )
    try:
        inspect.signature(function).bind(*_PARAMETERS)
    except TypeError as error:
        raise ConfigError(
            f"rollout.function={name!r} cannot be called with ({', '.join(_PARAMETERS)}): {error}"
        ) from error
