"""What of a configuration may change while a run goes on, and what would make it another run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from unison.config.dump import MISSING, diff_configs, toml_value
from unison.config.schema import TrainConfig
from unison.core.errors import ConfigError

FIXED: Final[Mapping[str, str]] = {
    "model.path": "the state belongs to this model",
    "model.dtype": "the state belongs to this dtype",
    "run.seed": "all noise and the order of the data come from it",
    "run.fork": "the run has begun already",
    "data": "the place reached in the data belongs to these prompts",
}
"""Key or section -> why it stays as it is; all else may change. ``run.dir`` only says where the folder lies now."""

_NEVER_MEANT: Final = ("run.dir",)
_NEVER_MATTERS: Final = ("rollout.engine",)
"""Where samples are drawn is no part of what they are."""


def check_changes(old: TrainConfig, new: TrainConfig, *, has_pending: bool = False) -> dict[str, tuple[Any, Any]]:
    """``{dotted key: (old, new)}`` of what changes when a run is continued.

    ``has_pending`` says that the run stopped in the middle of a rollout, whose samples go on under the settings they
    were begun with. Raises ConfigError, showing the whole difference, where a change cannot be meant.
    """
    changes = {path: pair for path, pair in diff_configs(old, new).items() if path not in _NEVER_MEANT}
    refused = {path: why for path in changes if (why := _why_fixed(path, has_pending)) is not None}
    if refused:
        path, why = next(iter(refused.items()))
        lines = [f"  {line}{'   <- cannot change' * (key in refused)}" for key, line in describe(changes).items()]
        raise ConfigError(
            f"the run goes on with its own configuration, but {path} differs ({why}):\n"
            + "\n".join(lines)
            + "\nTake the change back, or begin another run: --run.dir NEW, with --run.fork RUN to start from "
            "this one's state"
        )
    return changes


def describe(changes: Mapping[str, tuple[Any, Any]]) -> dict[str, str]:
    """Each change as ``trainer.learning_rate: 1e-06 -> 1e-05``, by its key."""
    return {path: f"{path}: {_text(old)} -> {_text(new)}" for path, (old, new) in changes.items()}


def _why_fixed(path: str, has_pending: bool) -> str | None:
    if has_pending and path.startswith("rollout.") and path not in _NEVER_MATTERS:
        return (
            "a rollout is half done under the old settings; finish its step first, with trainer.steps set to end there"
        )
    return FIXED.get(path) or FIXED.get(path.partition(".")[0])


def _text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_text(entry)}" for key, entry in value.items()) + "}"
    return str(value) if value is MISSING else toml_value(value)
