"""Which tokens top-k, top-p and min-p leave of a row, and the first of a ranking. Dims: V vocabulary.

Ids rank by weight, equal weights by lower id. What is left is always a beginning of that ranking, so
a row is ranked only as far down as the last id left can lie.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unison.ops.vocab import BLOCK

_LEAST = 2.0**-149
"""The smallest positive float32: a bar that lets everything pass but 0."""
_GROUP_SHIFT = 20
"""Weights whose float32 bits agree down to here are counted together: eight groups to a factor of two."""
_SLACK = 2.0**-50
"""Relative error of a float64 sum, for each of its terms; four times what it can be."""


def heaviest(weights_V: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """The top_k heaviest ids, of them the fewest that hold top_p, of those what is not lighter than min_p times
    the heaviest: their weights and ids, heaviest first. At least one id; none of weight 0.

    The id that crosses top_p is kept. top_p counts against the weight left by top_k (Holtzman et al.
    2020 for top-p, Nguyen et al. 2024 for min-p). weights are finite float32, none negative, one positive.
    """
    if 0 < top_k < len(weights_V):
        ordered, ids = _ranked(weights_V, bar_for(weights_V, top_k))
        ordered, ids = ordered[:top_k], ids[:top_k]
        if top_p < 1.0:
            count = _crossing(ordered, top_p, float(ordered.double().cumsum(-1)[-1]))
            ordered, ids = ordered[:count], ids[:count]
    elif top_p < 1.0:
        ordered, ids = _nucleus(weights_V, top_p)
    else:
        # A little lower than needed: the bar is rounded to float32, the comparison below is not.
        ordered, ids = _ranked(weights_V, 0.999 * min_p * float(weights_V.amax()))
    if min_p > 0.0:
        count = int((ordered.double() >= min_p * ordered[0].double()).sum())
        ordered, ids = ordered[:count], ids[:count]
    return ordered, ids


def bar_for(values_V: Tensor, count: int) -> float:
    """A value that at least ``count`` of the values reach, and not many more; count is at most V."""
    whole_blocks = len(values_V) // BLOCK
    if count > whole_blocks:
        return float(torch.topk(values_V, count, sorted=True).values[-1])
    maxima = values_V[: whole_blocks * BLOCK].view(whole_blocks, BLOCK).amax(-1)
    return float(torch.topk(maxima, count, sorted=True).values[-1])


def ids_from(values_V: Tensor, bar: float) -> Tensor:
    """Ids of the float32 values that are not below the bar, ascending; int64."""
    return torch.from_numpy(np.flatnonzero(values_V.numpy() >= np.float32(bar)))


def _ranked(weights_V: Tensor, bar: float) -> tuple[Tensor, Tensor]:
    """The weights from the bar up, but never 0, heaviest first, and their ids."""
    ids = ids_from(weights_V, max(bar, _LEAST))
    # The bits of positive floats rise with them; with the id below them no two keys are equal.
    keys = (-weights_V[ids].view(torch.int32).long() << 32) | ids
    ids = torch.from_numpy(np.sort(keys.numpy())) & 0xFFFFFFFF
    return weights_V[ids], ids


def _nucleus(weights_V: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Heaviest ids until they hold top_p of all weight, ranked."""
    total = float(weights_V.double().sum())
    # By definition the total is summed in ranked order; only where rounding could matter that is done.
    slack = len(weights_V) * _SLACK
    ordered, ids = _ranked(weights_V, _nucleus_bar(weights_V, top_p, total * (1 + slack)))
    counts = [_crossing(ordered, top_p, total * (1 + sign * slack)) for sign in (-1, 1)]
    if counts[0] != counts[1] or counts[1] > len(ordered):
        ordered, ids = _ranked(weights_V, 0.0)
        counts = [_crossing(ordered, top_p, float(ordered.double().cumsum(-1)[-1]))]
    return ordered[: counts[0]], ids[: counts[0]]


def _nucleus_bar(weights_V: Tensor, top_p: float, total: float) -> float:
    """A weight from which up lies as much as top_p of the total, and not much more."""
    # What lies below this weight comes to less than 1 - top_p of the total, however it is spread.
    weights = weights_V[ids_from(weights_V, max((1.0 - top_p) * total / len(weights_V), _LEAST))].numpy()
    groups = weights.view(np.int32) >> _GROUP_SHIFT
    downwards = np.bincount(groups, weights)[::-1].cumsum()
    group = len(downwards) - 1 - min(int(np.searchsorted(downwards, top_p * total)), len(downwards) - 1)
    return float(np.int32(group << _GROUP_SHIFT).view(np.float32))


def _crossing(ordered: Tensor, top_p: float, total: float) -> int:
    """How many of the heaviest it takes to hold top_p of the total, at least one; one more than there are if they
    do not."""
    running = ordered.double().cumsum(-1)
    if float(running[-1]) < top_p * total:
        return len(ordered) + 1
    return max(1, int((running - ordered.double() < top_p * total).sum()))
