"""Calls of advantage estimators and losses, which may be a user's: what they raise and return is judged here."""

from __future__ import annotations

import torch
from torch import Tensor

from unison.algorithms.assemble import Algorithm
from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.algorithms.trajectories import Estimate, Trajectories
from unison.core.describe import describe
from unison.core.errors import AlgorithmError, UnisonError


def call_advantage(algorithm: Algorithm, batch: Trajectories) -> Estimate:
    """The estimate of a batch. Raises AlgorithmError naming the function where it fails."""
    try:
        found = algorithm.estimate(batch)
    except UnisonError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise AlgorithmError(f"the advantage {algorithm.advantage_name} failed: {describe(error)}") from error
    return found if isinstance(found, Estimate) else Estimate(found)


def call_loss(algorithm: Algorithm, batch: LossBatch) -> PolicyLoss:
    """The loss of a batch. Raises AlgorithmError naming the function where it fails or returns something else."""
    try:
        found = algorithm.loss(batch)
    except UnisonError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise AlgorithmError(f"the loss {algorithm.loss_name} failed: {describe(error)}") from error
    problem = _problem(found, batch)
    if problem is not None:
        raise AlgorithmError(f"the loss {algorithm.loss_name} returned {problem}")
    return found


def _problem(found: object, batch: LossBatch) -> str | None:
    """What is wrong with what a loss returned, or None."""
    count = len(batch.logprobs_N)
    if not isinstance(found, PolicyLoss):
        return (
            f"a {type(found).__name__}; PolicyLoss(loss, ratio, clipped) is needed, with one value for each of the "
            f"{count} tokens"
        )
    for name, part in found._asdict().items():
        if not isinstance(part, Tensor) or part.shape != (count,):
            shape = tuple(part.shape) if isinstance(part, Tensor) else f"a {type(part).__name__}"
            return f"{name} as {shape}; a tensor with one value for each of the {count} tokens is needed"
    if not found.loss.is_floating_point() or not found.ratio.is_floating_point():
        return f"a loss of {found.loss.dtype} and a ratio of {found.ratio.dtype}; both must be floating-point"
    if found.clipped.dtype != torch.bool:
        return f"clipped as {found.clipped.dtype}; a bool for each token is needed"
    if batch.logprobs_N.requires_grad and not found.loss.requires_grad:
        return "a loss without a gradient; compute it from batch.logprobs_N, and do not detach it"
    return None
