"""Distributions over the vocabulary, and what is read from them: tokens and log-probs. Dims: N rows, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.core.records import TokenLogprob
from unison.core.sampling import SamplingParams
from unison.engine.filters import bar_for, heaviest, ids_from
from unison.ops.vocab import (
    BLOCK,
    RowStats,
    block_sums,
    gather_logprobs,
    row_stats,
    running_total,
    scaled_logits,
)


@dataclass(frozen=True, slots=True)
class RowScores:
    """Further log-probs of one token's distribution; empty where not asked for."""

    top: list[TokenLogprob]
    chosen: list[float]


@dataclass(slots=True)
class Cut:
    """What is left of each row: ids that weigh more than ``lightest``, or as much up to the id ``last``; or, where
    ``only`` is not -1, that id alone, with weight 1. [N, 1] each."""

    lightest: Tensor
    last: Tensor
    only: Tensor

    @classmethod
    def nothing(cls, num_rows: int, vocab: int) -> Cut:
        return cls(
            torch.zeros(num_rows, 1), torch.full((num_rows, 1), vocab), torch.full((num_rows, 1), -1, dtype=torch.int64)
        )

    def apply(self, weights_NK: Tensor, columns_NK: Tensor) -> Tensor:
        lighter = (weights_NK < self.lightest) | ((weights_NK == self.lightest) & (columns_NK > self.last))
        return torch.where(self.only >= 0, (columns_NK == self.only).float(), weights_NK.masked_fill(lighter, 0.0))


@dataclass(slots=True)
class Distribution:
    """Logits [N, V] in the dtype of the model and their temperatures, with the statistics of their softmax.

    In the rows ``cut_rows`` ids of weight 0 are no part of the distribution, whatever their logits.
    No weight is kept: those asked for are computed again, to the same bits.
    """

    logits: Tensor
    temperature: Tensor
    stats: RowStats
    cut: Cut | None = None
    cut_rows: Items[int] = ()

    @classmethod
    def of(cls, logits_NV: Tensor, temperature_N: Tensor) -> Distribution:
        return cls(logits_NV, temperature_N, row_stats(logits_NV, temperature_N))

    def cut_by(self, settings: dict[int, SamplingParams]) -> Distribution:
        """The same with the filters of some rows applied; temperature 0 leaves the likeliest id, the lowest of
        equals. Rows whose total is not finite stay as they are."""
        if not settings:
            return self
        old = self.stats
        sums, cut = old.block_sums.clone(), Cut.nothing(*self.logits.shape)
        finite = old.total.isfinite().tolist()
        rows = [i for i, chosen in settings.items() if chosen.temperature == 0 and finite[i]]
        greedy = torch.tensor(rows, dtype=torch.int64)
        best = self._likeliest(greedy)
        sums[greedy] = torch.zeros(len(greedy), sums.shape[1]).scatter_(1, best // BLOCK, 1.0)
        cut.only[greedy] = best
        left = torch.zeros(1, self.logits.shape[1])
        for i, chosen in settings.items():
            if chosen.temperature > 0 and finite[i]:
                weights, ids = heaviest(self.row_weights(i), chosen.top_k, chosen.top_p, chosen.min_p)
                cut.lightest[i], cut.last[i] = weights[-1], ids[-1]
                left[0, ids] = weights
                sums[i] = block_sums(left)[0]
                left[0, ids] = 0.0
        stats = RowStats(sums, old.block_maxima, running_total(sums), old.maximum)
        return Distribution(self.logits, self.temperature, stats, cut, list(settings))

    def draw(self, noise_N: Tensor) -> Tensor:
        """One id of each row by its noise, int64 [N]; any id for a row whose total is not finite."""
        return inverse_cdf(self.weights_at, self.stats.block_sums, noise_N, self.logits.shape[1])

    def weights_at(self, columns_NK: Tensor) -> Tensor:
        """exp(logit - max) of some ids of each row, 0 for those that were cut."""
        scaled = scaled_logits(self.logits.gather(1, columns_NK), self.temperature)
        weights = (scaled - self.stats.maximum).exp_()
        return weights if self.cut is None else self.cut.apply(weights, columns_NK)

    def row_weights(self, row: int) -> Tensor:
        """exp(logit - max) of one row, nothing cut, as a new tensor [V]."""
        rows = slice(row, row + 1)
        scaled = scaled_logits(self.logits[rows], self.temperature[rows])
        return (scaled - self.stats.maximum[rows]).exp_()[0]

    def logprobs(self, ids_N: Tensor) -> Tensor:
        """Log-prob of one id of each row, float32 [N]; -inf for an id that was cut."""
        values = gather_logprobs(self.logits, self.stats, ids_N, self.temperature)
        if self.cut is not None:
            is_cut = torch.zeros(len(ids_N), dtype=torch.bool)
            is_cut[torch.tensor(self.cut_rows)] = True
            values = values.masked_fill(is_cut & (self.weights_at(ids_N[:, None])[:, 0] == 0), -math.inf)
        return values

    def row_scores(self, row: int, num_top: int, ids: Items[int]) -> RowScores:
        """The num_top most likely tokens of a row, equals by lower id, and the log-probs of ids.

        Tokens of probability 0 are never among the first, so there may be fewer.
        """
        logits = self._row_logits(row)
        # Of all rows together, as gather_logprobs has it: a token's log-prob is the same float here and there.
        offset = self.stats.total.log()[row]

        def logprobs(chosen: Items[int]) -> list[float]:
            values = logits[torch.tensor(chosen, dtype=torch.int64)].double()
            return ((values - self.stats.maximum[row].double()) - offset).float().tolist()

        top = top_ids(logits, num_top) if num_top else []
        return RowScores([TokenLogprob(*one) for one in zip(top, logprobs(top), strict=True)], logprobs(ids))

    def _row_logits(self, row: int) -> Tensor:
        """Scaled logits of a row, -inf for what was cut."""
        rows = slice(row, row + 1)
        scaled = scaled_logits(self.logits[rows], self.temperature[rows])
        if self.cut is None or row not in self.cut_rows:
            return scaled[0]
        cut = Cut(self.cut.lightest[rows], self.cut.last[rows], self.cut.only[rows])
        weights = cut.apply((scaled - self.stats.maximum[rows]).exp_(), torch.arange(scaled.shape[1])[None])
        return scaled[0].masked_fill(weights[0] == 0, -math.inf)

    def _likeliest(self, rows_M: Tensor) -> Tensor:
        """The id with the highest logit, the lowest of equals, of some rows; int64 [M, 1]."""
        block = self.stats.block_maxima[rows_M].argmax(-1, keepdim=True)
        columns = (block * BLOCK + torch.arange(BLOCK)[None]).clamp_max(self.logits.shape[1] - 1)
        inside = scaled_logits(self.logits[rows_M[:, None], columns], self.temperature[rows_M])
        return block * BLOCK + inside.argmax(-1, keepdim=True)


def inverse_cdf(weights_at: Callable[[Tensor], Tensor], sums_NC: Tensor, noise_N: Tensor, vocab: int) -> Tensor:
    """First id of each row whose running weight exceeds noise * total -> int64 [N].

    weights_at gives the non-negative weights of some ids [N, K], their ``block_sums`` are sums_NC, with a positive
    total; noise float64 in (0, 1). Looks at the sums of all blocks and at the weights of one.
    """
    running = sums_NC.double().cumsum(-1)
    target = noise_N * running[:, -1]
    block = _first_above(running, target, sums_NC)
    before = torch.where(block > 0, running.gather(1, (block - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    columns = block[:, None] * BLOCK + torch.arange(BLOCK)[None]
    if vocab % BLOCK:
        inside = weights_at(columns.clamp_max(vocab - 1)).double().masked_fill(columns >= vocab, 0.0)
    else:
        inside = weights_at(columns).double()
    return block * BLOCK + _first_above(inside.cumsum(-1), target - before, inside)


def _first_above(running: Tensor, target_N: Tensor, steps: Tensor) -> Tensor:
    """First column whose running sum exceeds the target; else, by rounding, the last with a positive step."""
    column = torch.searchsorted(running, target_N[:, None], right=True)[:, 0]
    if bool((column == steps.shape[1]).any()):
        last_positive = torch.where(steps > 0, torch.arange(steps.shape[1]), 0).amax(-1)
        column = torch.minimum(column, last_positive)
    return column


def top_ids(logits_V: Tensor, count: int) -> list[int]:
    """The count ids with the highest logits above -inf, highest first; equals by lower id."""
    # Only a bar, for ties are broken below; in doubt more ids than count pass it.
    bar = bar_for(logits_V, min(count, len(logits_V)))
    candidates = ids_from(logits_V, max(bar, torch.finfo(torch.float32).min))
    order = torch.sort(logits_V[candidates], descending=True, stable=True).indices[:count]
    return candidates[order].tolist()
