"""Hooks: objects that are told how a run goes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unison.checks.plugin_report import Report, call, frozen_copy
from unison.checks.plugin_reward import made_up_samples
from unison.config.names import did_you_mean
from unison.config.schema import ModelConfig, TrainConfig
from unison.observability.hooks import HOOK_METHODS, HookedRun, hook_methods


def check_hook(report: Report, path: str, found: Any, options: Mapping[str, Any]) -> None:
    """Each on_... method exists in the contract, takes its arguments, and raises nothing on made-up ones."""
    if options:
        report.problem("hooks take no options", "write them into the object, or name a function that makes it")
    hook = found
    if inspect.isclass(found) or not hook_methods(found):
        made = call(found) if callable(found) else None
        if made is None or made.error is not None:
            report.problem(
                f"it has no on_... methods{f', and calling it raised {made.error}' if made else ''}",
                "name an object with some of them, or a function without arguments that returns one",
            )
            return
        hook = made.value
        report.ok(f"it makes a {type(hook).__name__}")
    methods = hook_methods(hook)
    if not methods:
        report.problem("it has no on_... methods", f"write some of {', '.join(HOOK_METHODS)}")
    for name in methods:
        _check_method(report, hook, name)


def _check_method(report: Report, hook: Any, name: str) -> None:
    if name not in HOOK_METHODS:
        report.problem(
            f"{name} is never called{did_you_mean(name, HOOK_METHODS)}", f"the methods are {', '.join(HOOK_METHODS)}"
        )
        return
    method, names = getattr(hook, name), HOOK_METHODS[name]
    wanted = f"{name}({', '.join(names)})"
    if inspect.iscoroutinefunction(method):
        report.problem(f"{name} is async", f"make it a plain function: {wanted}")
        return
    try:
        inspect.signature(method).bind(*names)
    except (TypeError, ValueError) as error:
        report.problem(f"{name} cannot be called as {wanted}: {error}", f"give it these arguments: {wanted}")
        return
    arguments = _arguments(name)
    before = frozen_copy(arguments)
    called = call(method, *arguments)
    if called.error is not None:
        report.problem(
            f"{wanted} raised {called.error} on made-up values", "let it bear missing metrics and no samples"
        )
    elif repr(arguments) != repr(before):
        report.problem(f"{wanted} changed what it was given", "only read from it, and copy what is to be changed")
    else:
        report.ok(f"{wanted} in {1000 * called.seconds:.1f} ms")


def _arguments(name: str) -> list[Any]:
    made_up: dict[str, Any] = {
        "run": HookedRun("made-up", Path("runs/made-up"), TrainConfig(model=ModelConfig(path="tiny-random")), 0),
        "step": 1,
        "samples": made_up_samples(),
        "metrics": {"rollout/reward_mean": 0.5, "train/loss": 0.01},
        "path": Path("runs/made-up/checkpoints/step-000001"),
        "summary": {"name": "made-up", "steps": 1, "seconds": 1.5, "evaluations": {}},
    }
    return [made_up[argument] for argument in HOOK_METHODS[name]]
