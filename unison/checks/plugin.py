"""``unison check plugin``: a user's own object against the contract of the seam it is meant for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from unison.checks.plugin_algorithm import algorithm_kind, check_advantage, check_loss, check_recipe
from unison.checks.plugin_data import check_filter, check_source
from unison.checks.plugin_hook import check_hook
from unison.checks.plugin_report import Report, a_kind
from unison.checks.plugin_reward import check_reward
from unison.checks.plugin_rollout import check_rollout
from unison.checks.plugin_tracker import check_tracker
from unison.config.names import did_you_mean, join_or
from unison.config.plugins import load_object
from unison.core.errors import ConfigError
from unison.observability.hooks import HOOK_METHODS

Options = Mapping[str, Any]

KINDS: Final[Mapping[str, Callable[[Report, str, Any, Options], None]]] = {
    "reward": check_reward,
    "source": check_source,
    "rollout": check_rollout,
    "filter": check_filter,
    "hook": check_hook,
    "tracker": check_tracker,
    "advantage": check_advantage,
    "loss": check_loss,
    "recipe": check_recipe,
}
"""Seam -> the check of an object for it."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A kind, and what it was guessed from."""

    kind: str
    reason: str


def run_plugin_check(
    path: str, kind: str | None = None, options: Options | None = None, *, write: Callable[[str], None] = print
) -> Report:
    """Load the object, check it, and write a line for each thing looked at.

    ``options`` are the keyword arguments it will be configured with. Raises ConfigError where it cannot be loaded, or
    no kind is given and none can be told from its signature.
    """
    if ":" not in path:
        raise ConfigError(f"{path!r} is no module:object path; name your own object like my_module:my_reward")
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"the kind {kind!r} is unknown{did_you_mean(kind, KINDS)} (known: {', '.join(KINDS)})")
    found = load_object(path, kind="object", error=ConfigError)
    report = Report(write)
    if kind is None:
        guess = guess_kind(found)
        if guess is None:
            raise ConfigError(
                f"cannot tell what {path!r} is meant for; add --kind {join_or(list(KINDS))} (docs/plugins.md shows "
                "the signature of each)"
            )
        kind = guess.kind
        report.note(f"checked as {a_kind(kind)}, since {guess.reason}; --kind says otherwise")
    KINDS[kind](report, path, found, options or {})
    report.conclude(path, kind)
    return report


def guess_kind(found: object) -> Guess | None:
    """The seam an object fits by its methods or the names of its parameters; None where nothing tells."""
    if algorithmic := algorithm_kind(found):
        return Guess(*algorithmic)
    methods = [name for name in HOOK_METHODS if callable(getattr(found, name, None))]
    if methods:
        return Guess("hook", f"it has {methods[0]}")
    if not callable(found):
        return Guess("hook", "it has on_... methods") if any(name.startswith("on_") for name in dir(found)) else None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None
    names = list(signature.parameters)
    first = names[0] if names else ""
    if inspect.iscoroutinefunction(found) and len(names) == 4:
        return Guess("rollout", "it is async and takes four arguments")
    if names[:3] == ["config", "split", "seed"]:
        return Guess("source", "it takes config, split and seed")
    if first == "row" or (first == "group" and _returns_verdict(signature)):
        return Guess("filter", f"it takes a {first}")
    if first == "group" and any(word in getattr(found, "__name__", "") for word in ("filter", "keep")):
        return Guess("filter", "it takes a group and is called a filter")
    if {"solution_str", "ground_truth"} <= set(names):
        return Guess("reward", "it takes solution_str and ground_truth, as verl's")
    if first in ("samples", "group") or "completions" in names:
        return Guess("reward", f"it takes {'completions' if 'completions' in names else first}")
    if first == "run" and len(names) == 1:
        return Guess("tracker", "it takes a run")
    if not names:
        return Guess("hook", "it takes nothing, as a factory of hooks does")
    required = [p for p in signature.parameters.values() if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    if len(required) == 2:
        return Guess("reward", f"it takes ({names[0]}, {names[1]}), as (text, label)")
    if len(required) == 4:
        return Guess("rollout", "it takes four arguments, though `async` is missing before its def")
    return None


def _returns_verdict(signature: inspect.Signature) -> bool:
    """Whether it is annotated to return what a filter does."""
    returned = signature.return_annotation
    return str(getattr(returned, "__name__", returned)).replace(" ", "") in ("bool", "bool|str", "str|bool")
