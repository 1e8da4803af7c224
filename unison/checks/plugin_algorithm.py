"""Algorithms of the user's own: an advantage estimator, a policy loss, and the recipe that selects them.

Dims: N trained tokens, T response tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from unison.algorithms.assemble import FUNCTION_SETTINGS, assemble
from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.algorithms.recipes import Recipe
from unison.algorithms.registry import find_advantage, find_loss, settings_of, uses_of
from unison.algorithms.trajectories import Estimate, Trajectories
from unison.checks.plugin_batches import made_up_losses, made_up_trajectories, one_by_one, reversed_trajectories
from unison.checks.plugin_report import Report, call, frozen_copy
from unison.config.algorithm import AlgorithmConfig
from unison.config.names import did_you_mean
from unison.config.schema import ModelConfig, TrainConfig
from unison.core.errors import ConfigError

_TOLERANCE: Final = 1e-5
"""Of float32 sums in another order."""


def algorithm_kind(found: object) -> tuple[str, str] | None:
    """Kind and reason of an object that is part of an algorithm; None where nothing says that it is."""
    if isinstance(found, Recipe):
        return "recipe", "it is a Recipe"
    try:
        signature = inspect.signature(found) if callable(found) else None
    except (TypeError, ValueError):
        return None
    if signature is None or not signature.parameters:
        return None
    first = str(next(iter(signature.parameters.values())).annotation)
    for kind, name in (("advantage", "Trajectories"), ("loss", "LossBatch")):
        if name in first:
            return kind, f"it takes {name}"
    return None


def check_advantage(report: Report, path: str, found: Any, options: Mapping[str, Any]) -> None:
    """Called on ragged trajectories: one finite number a token, whatever stands where nothing counts, in any order."""
    if not _check_settings(report, found, options, "batch: Trajectories"):
        return
    uses = uses_of(found)
    report.note(f"it uses {', '.join(sorted(uses)) or 'rewards alone'}, as register_advantage(..., uses=...) says")
    batch = made_up_trajectories(uses)
    before = frozen_copy(batch)
    result = _advantages(report, found, batch, options, "values" in uses)
    if result is None:
        return
    report.expect(
        repr(batch) == repr(before), "it leaves the batch as it was", "it changed the batch", "work on copies"
    )
    trained = batch.trained_T
    for what, other, order in (
        ("called again", batch, None),
        ("other numbers where a sample has no reward", made_up_trajectories(uses, lost=7.0), None),
        ("trajectories in another order", *reversed_trajectories(batch)),
    ):
        again = call(found, other, **options)
        same = again.error is None and _agree(
            result[trained], _in_order(_first(again.value), order)[trained] if again.value is not None else None
        )
        report.expect(
            same,
            f"{what}: the same advantages",
            f"{what}: {again.error or 'the advantages of trained tokens differ'}",
            "keep nothing between calls, look at valid_N and sampled_T, and go by group_ids and trajectory_T",
        )


def check_loss(report: Report, path: str, found: Any, options: Mapping[str, Any]) -> None:
    """Called on tokens of whole sequences: finite, a gradient to log-probs alone, however the batch is cut."""
    if not _check_settings(report, found, options, "batch: LossBatch"):
        return
    batch = made_up_losses()
    out = _policy_loss(report, found, batch, options, "ratios near 1")
    if out is None:
        return
    columns = {"old_logprobs_N": batch.old_logprobs_N, "advantages_N": batch.advantages_N}
    columns["rollout_logprobs_N"] = batch.rollout_logprobs_N
    leaks = [name for name, column in columns.items() if column.grad is not None and bool((column.grad != 0).any())]
    report.expect(
        not leaks,
        "the gradient goes to logprobs_N alone",
        f"a gradient goes to {', '.join(leaks)}",
        "use .detach() on every column but logprobs_N",
    )
    _policy_loss(report, found, made_up_losses(spread=200.0), options, "ratios of e^200 and e^-200")
    fresh = _policy_loss(report, found, made_up_losses(spread=0.0), options, "fresh samples")
    if fresh is not None:
        report.expect(
            bool((fresh.ratio == 1).all()),
            "fresh samples: every ratio is exactly 1",
            "fresh samples: a ratio is not exactly 1",
            "let ratio be exp(logprobs_N - old_logprobs_N), of the token or of its sequence",
        )
    _check_cut(report, found, batch, options, out)


def check_recipe(report: Report, path: str, found: Any, options: Mapping[str, Any]) -> None:
    """Its names are found, its settings have takers, and both functions keep their contracts under them."""
    if options:
        report.problem("a recipe takes no options", "write them into its settings")
    if not isinstance(found, Recipe):
        report.problem(
            f"it is a {type(found).__name__}", "make a unison.algorithms.recipes.Recipe(advantage=..., loss=...)"
        )
        return
    config = TrainConfig(model=ModelConfig(path="tiny-random"), algorithm=AlgorithmConfig(name=path))
    try:
        chosen = assemble(config)
    except ConfigError as error:
        report.problem(str(error), "name what there is, and settings that one of the two functions takes")
        return
    for line in chosen.describe():
        report.ok(" ".join(line.split()))
    for kind, name, function, check in (
        ("advantage", found.advantage, find_advantage(found.advantage), check_advantage),
        ("loss", found.loss, find_loss(found.loss), check_loss),
    ):
        report.note(f"its {kind} {name}:")
        own = settings_of(function)
        check(report, name, function, {key: value for key, value in chosen.settings.items() if key in own})


def _check_settings(report: Report, found: Any, options: Mapping[str, Any], wanted: str) -> bool:
    """One positional parameter, the batch; every other one keyword-only and with a default; options are among them."""
    if not callable(found) or inspect.iscoroutinefunction(found):
        report.problem(f"it is {'async' if callable(found) else f'a {type(found).__name__}'}", f"write def f({wanted})")
        return False
    parameters = list(inspect.signature(found).parameters.values())
    wrong = [one.name for one in parameters[1:] if one.kind is not one.KEYWORD_ONLY or one.default is one.empty]
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY or wrong:
        said = f"its parameter {wrong[0]!r} is no setting" if wrong else "it takes no batch"
        report.problem(
            said, f"write def f({wanted}, *, strength: float = 1.0): settings stand after the * and have defaults"
        )
        return False
    settings = settings_of(found)
    unknown = [name for name in options if name not in settings]
    if unknown:
        report.problem(
            f"it takes no setting {unknown[0]!r}{did_you_mean(unknown[0], settings)}",
            f"its settings are {', '.join(settings) or 'none'}",
        )
        return False
    keys = [f"algorithm.{'' if name in FUNCTION_SETTINGS else 'options.'}{name}" for name in settings]
    report.ok(f"its settings are keyword-only, with defaults: {', '.join(keys) or 'none'}")
    return True


def _advantages(
    report: Report, found: Any, batch: Trajectories, options: Mapping[str, Any], needs_returns: bool
) -> Tensor | None:
    called = call(found, batch, **options)
    if called.error is not None:
        report.problem(
            f"it raised {called.error}",
            "bear empty trajectories and samples without reward; penalties_T, values_T and baselines_N are there only "
            "where register_advantage(..., uses=...) names kl, values or greedy",
        )
        return None
    given = called.value if isinstance(called.value, Estimate) else Estimate(called.value)
    if needs_returns and given.returns is None:
        report.problem(
            "it uses values and returned no returns for the critic to learn", "return Estimate(advantages, returns)"
        )
        return None
    num_tokens = len(batch.sampled_T)
    for what, values in (("advantages", given.advantages), ("returns", given.returns)):
        if values is None and what == "returns":
            continue
        if not isinstance(values, Tensor) or values.shape != (num_tokens,):
            shape = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"type {type(values).__name__}"
            report.problem(
                f"it returned {what} of {shape} for {num_tokens} response tokens of {len(batch.lengths)} trajectories",
                "return one number for each response token; batch.spread makes them of one for each trajectory",
            )
            return None
        bad = batch.trained_T & ~values.isfinite()
        if not report.expect(
            not bool(bad.any()),
            f"{what}: one for each of {num_tokens} tokens, finite where they are trained",
            f"{what}: {float(values[bad][0]) if bool(bad.any()) else 0} at a trained token",
            "divide by nothing that may be 0, and leave out samples without reward by selection: 0 times NaN is NaN",
        ):
            return None
    return given.advantages


def _policy_loss(
    report: Report, found: Any, batch: LossBatch, options: Mapping[str, Any], what: str
) -> PolicyLoss | None:
    count = len(batch.logprobs_N)
    called = call(found, batch, **options)
    if called.error is not None:
        report.problem(f"{what}: it raised {called.error}", "bear sequences of any length, none among them")
        return None
    out = called.value
    if not isinstance(out, PolicyLoss) or any(not isinstance(p, Tensor) or p.shape != (count,) for p in out):
        report.problem(
            f"{what}: it returned {_shapes(out)} for {count} tokens",
            "return PolicyLoss(loss, ratio, clipped), one value for each token and no mean: the aggregation takes it",
        )
        return None
    if not out.loss.requires_grad or out.ratio.requires_grad or out.clipped.dtype != torch.bool:
        report.problem(
            f"{what}: the loss must carry a gradient, the ratio none, and clipped be of type bool",
            "detach the ratio, and nothing that logprobs_N has to reach",
        )
        return None
    gradient = torch.autograd.grad(out.loss.sum(), batch.logprobs_N, retain_graph=True)[0]
    out.loss.sum().backward()  # type: ignore[no-untyped-call]
    finite = bool((out.loss.isfinite() & gradient.isfinite() & out.ratio.isfinite()).all())
    report.expect(
        finite,
        f"{what}: loss, ratio and gradient are finite",
        f"{what}: loss, ratio or gradient is not finite",
        "cap log-ratios at unison.algorithms.losses.base.MAX_LOG_RATIO before exp",
    )
    return out if finite else None


def _check_cut(report: Report, found: Any, batch: LossBatch, options: Mapping[str, Any], whole: PolicyLoss) -> None:
    """Each sequence alone gets what it gets beside the others."""
    losses = []
    for alone in one_by_one(batch):
        called = call(found, alone, **options)
        losses.append(called.value.loss.detach() if isinstance(called.value, PolicyLoss) else torch.tensor([]))
    report.expect(
        _agree(whole.loss.detach(), torch.cat(losses)),
        "each sequence alone: the same losses",
        "each sequence alone: other losses than beside the others",
        "look at one sequence at a time (batch.sequence_sum, sequence_mean, at_tokens): micro-batches cut a batch "
        "anywhere between sequences; what is of the whole batch belongs into the advantage",
    )


def _first(value: Any) -> Any:
    return value.advantages if isinstance(value, Estimate) else value


def _in_order(values: Any, order: Tensor | None) -> Any:
    return values if order is None or not isinstance(values, Tensor) else values[order]


def _agree(one: Tensor, other: Tensor | None) -> bool:
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    return bool(torch.allclose(one.double(), other.double(), rtol=_TOLERANCE, atol=_TOLERANCE))


def _shapes(out: object) -> str:
    if isinstance(out, tuple):
        shapes = [str(tuple(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in out]
        return f"{type(out).__name__} of {', '.join(shapes)}"
    return f"a {type(out).__name__}" + (f" of shape {tuple(out.shape)}" if isinstance(out, Tensor) else "")
