"""Distributions over the vocabulary, and log-probs read from them. Dims: N rows, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.core.records import TokenLogprob
from unison.ops.vocab import RowStats, gather_logprobs, row_stats


@dataclass(frozen=True, slots=True)
class RowScores:
    """Further log-probs of one token's distribution; empty where not asked for."""

    top: list[TokenLogprob]
    chosen: list[float]


@dataclass(slots=True)
class Distribution:
    """logits [N, V] float32 with the statistics of their softmax.

    In ``cut`` rows ids of weight 0 are no part of the distribution, whatever their logits.
    """

    logits: Tensor
    stats: RowStats
    cut: list[int]

    @classmethod
    def of(cls, logits_NV: Tensor) -> Distribution:
        return cls(logits_NV, row_stats(logits_NV), [])

    def logprobs(self, ids_N: Tensor) -> Tensor:
        """Log-prob of one id of each row, float32 [N]; -inf for an id that was cut."""
        values = gather_logprobs(self.logits, self.stats, ids_N)
        if self.cut:
            is_cut = torch.zeros(len(ids_N), dtype=torch.bool)
            is_cut[self.cut] = True
            gone = self.stats.weights.gather(1, ids_N[:, None])[:, 0] == 0
            values = values.masked_fill(is_cut & gone, -math.inf)
        return values

    def row_scores(self, row: int, num_top: int, ids: Items[int]) -> RowScores:
        """The num_top most likely tokens of a row, equals by lower id, and the log-probs of ids.

        Tokens of probability 0 are never among the first, so there may be fewer.
        """
        logits = self.logits[row]
        if row in self.cut:
            logits = logits.masked_fill(self.stats.weights[row] == 0, -math.inf)
        # Of all rows together, as gather_logprobs has it: a token's log-prob is the same float here and there.
        offset = self.stats.total.log()[row]
        values = ((logits.double() - self.stats.maximum[row].double()) - offset).float()
        top = top_ids(logits, num_top) if num_top else []
        chosen = values[torch.tensor(ids, dtype=torch.int64)].tolist() if ids else []
        return RowScores([TokenLogprob(token, values[token].item()) for token in top], chosen)


def top_ids(logits_V: Tensor, count: int) -> list[int]:
    """The count ids with the highest logits above -inf, highest first; equals by lower id."""
    lowest = torch.topk(logits_V, min(count, len(logits_V)), sorted=True).values[-1]
    # topk breaks ties as it pleases, so it only sets the bar; in doubt more ids than count pass it.
    candidates = torch.nonzero((logits_V >= lowest) & (logits_V > -math.inf))[:, 0]
    order = torch.sort(logits_V[candidates], descending=True, stable=True).indices[:count]
    return candidates[order].tolist()
