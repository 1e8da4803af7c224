"""Hooks: a user's own objects that are told how a run goes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unison.config.names import did_you_mean
from unison.config.plugins import load_object
from unison.config.schema import TrainConfig
from unison.core.describe import describe
from unison.core.errors import ConfigError, HookError

HOOK_METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "on_start": ("run",),
    "on_samples": ("step", "samples"),
    "on_step": ("step", "metrics"),
    "on_evaluation": ("step", "metrics"),
    "on_checkpoint": ("step", "path"),
    "on_finish": ("summary",),
}
"""Method -> what it is called with, in order."""


@dataclass(frozen=True, slots=True)
class HookedRun:
    """What ``on_start`` is told."""

    name: str
    folder: Path
    config: TrainConfig
    step: int
    """Steps done: 0, or where the run goes on."""


class Hooks:
    """The hooks of a run, told one after the other. One that raises stops the run, by a HookError."""

    def __init__(self, names: Sequence[str]) -> None:
        self._hooks = [(name, load_hook(name)) for name in names]

    def tell(self, method: str, *arguments: Any) -> None:
        """Call ``method`` of every hook that has it."""
        for name, hook in self._hooks:
            function = getattr(hook, method, None)
            if function is None:
                continue
            try:
                function(*arguments)
            except Exception as error:
                raise HookError(f"the hook {name!r} failed in {method}: {describe(error)}") from error


def load_hook(path: str) -> Any:
    """The hook at ``module:object``: an object with ``on_...`` methods, or what a class or function without arguments
    makes. Raises ConfigError where it is none, or has a method that nobody would call."""
    hook = load_object(path, kind="hook", error=ConfigError)
    if inspect.isclass(hook) or (callable(hook) and not hook_methods(hook)):
        try:
            hook = hook()
        except Exception as error:
            raise ConfigError(f"the hook {path!r} cannot be made: {describe(error)}") from error
    methods = hook_methods(hook)
    if not methods:
        raise ConfigError(f"the hook {path!r} has no on_... methods; write some of {', '.join(HOOK_METHODS)}")
    for name in methods:
        if name not in HOOK_METHODS:
            raise ConfigError(
                f"the hook {path!r} has {name}, which is never called{did_you_mean(name, HOOK_METHODS)}"
                f" (hooks have {', '.join(HOOK_METHODS)})"
            )
        if inspect.iscoroutinefunction(getattr(hook, name)):
            raise ConfigError(f"{name} of the hook {path!r} is async; make it a plain method")
    return hook


def hook_methods(hook: object) -> list[str]:
    """Its names that look like a hook's."""
    return [name for name in dir(hook) if name.startswith("on_")]
