"""The loss of a critic, and how well it predicts. Dims: T tokens, N trained tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unison.algorithms.aggregation import select
from unison.core.errors import ConfigError


class ValueLoss(NamedTuple):
    """Per token [N]. ``loss`` carries the gradient."""

    loss: Tensor
    clipped: Tensor
    """Bool: the value has moved as far as it may, so its gradient is stopped."""


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, clip: float) -> ValueLoss:
    """Half the squared error of values against returns, no lower than that of the value held near the old one.

    max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2, gradient to ``values_N`` only; ``clip`` 0 switches the
    second term off. Source: the value loss of OpenAI's baselines (ppo2), written down by Huang et al. 2022, "The 37
    implementation details of proximal policy optimization"; a value that moved more than ``clip`` towards its return
    is not moved on, one that moved away from it is brought back.

    Computed in float64, returned in the widest dtype given, float32 at least. The tokens are to be selected before: it
    says nothing of other places. Where an old value is NaN nothing is clipped. Raises ConfigError for a clip that is
    negative or not finite.
    """
    if not 0 <= clip < math.inf:
        raise ConfigError(f"clip={clip} must be 0 (off) or a positive number in units of the reward, such as 0.2")
    if not values_N.shape == old_values_N.shape == returns_N.shape:
        shapes = ", ".join(str(list(column.shape)) for column in (values_N, old_values_N, returns_N))
        raise ValueError(f"values, old values and returns have shapes {shapes}; one of each per token is needed")
    values, old, returns = values_N.double(), old_values_N.detach().double(), returns_N.detach().double()
    loss = (values - returns).square() / 2
    clipped = torch.zeros_like(loss, dtype=torch.bool)
    if clip > 0:
        # Without gradient: where this one is the larger, the value lies beyond the bound and has none.
        held = (values.detach().clamp(old - clip, old + clip) - returns).square() / 2
        clipped = held > loss
        loss = torch.where(clipped, held, loss)
    wide = torch.promote_types(torch.promote_types(values_N.dtype, old_values_N.dtype), returns_N.dtype)
    return ValueLoss(loss.to(torch.promote_types(wide, torch.float32)), clipped)


def explained_variance(values_T: Tensor, returns_T: Tensor, weights_T: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the places where ``weights_T`` (numbers or bool) is not 0.

    1 for a perfect critic, 0 for one that knows a constant only, negative for one that is worse. 0 where the returns
    do not differ or none is selected: there is nothing to explain. Other places may hold anything; a NaN in a selected
    place shows.
    """
    values, returns = select(weights_T, values_T.detach().double(), returns_T.detach().double())
    if returns.numel() == 0 or bool(returns.max() == returns.min()):
        return 0.0
    return float(1 - (returns - values).var(correction=0) / returns.var(correction=0))
