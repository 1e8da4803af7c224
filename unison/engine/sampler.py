"""Draws one token per row of logits, each from its own noise.

A token is found by inverse CDF in id order: the first id whose running weight exceeds u times the
total, u being the Philox uniform of (seed, position). Running sums go by blocks of fixed size, in
float64 across and inside blocks, so a row's token depends on nothing but the row and its uniform.
What is done to the logits before, and in which order, says SamplingParams.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.core.sampling import SamplingParams
from unison.engine.logit_edits import LogitEdits
from unison.engine.token_scores import Distribution, RowScores
from unison.ops.philox import uniforms
from unison.ops.vocab import BLOCK, RowStats, block_sums, row_stats, scaled_logits

SAMPLER_NAME = "inverse-cdf/philox4x32-10/block512"
NO_TOKEN = -1
"""Stands for the id of a row no token can be drawn from."""
NONE_ALLOWED = -2
"""Stands for the id of a row whose tokens all have probability 0 after the masks."""


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """What one row needs: its settings, and the key and counter of its noise."""

    sampling: SamplingParams
    seed: int
    position: int
    edits: LogitEdits | None = None
    """What the settings change about the logits, at this position. Raises ValueError if left out."""
    forced: int | None = None
    """The token to take instead of a drawn one."""

    def __post_init__(self) -> None:
        if self.edits is None and self.sampling.edits_logits:
            raise ValueError("these settings change the logits; give the row its LogitEdits")


@dataclass(frozen=True, slots=True)
class Draws:
    """One token of each row with its log-prob of the kind the row asks for."""

    ids: list[int]
    logprobs: list[float]
    scores: dict[int, RowScores]
    """By row, where a row asks for more log-probs."""


def sample(logits_NV: Tensor, rows: Items[SamplerRow]) -> Draws:
    """Draw a token of each row.

    A row that holds NaN or +inf, or nothing above -inf, has no distribution: NO_TOKEN and NaN. One
    whose masks leave nothing above -inf: NONE_ALLOWED and NaN.
    """
    temperature = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32)
    scaled = Distribution.of(scaled_logits(logits_NV, temperature))
    drawn, barred = _drawn_from(scaled, logits_NV, temperature, rows)
    noise = torch.from_numpy(uniforms([row.seed for row in rows], [row.position for row in rows]))
    ids = inverse_cdf(drawn.stats.weights, drawn.stats.block_sums, noise)
    for i, row in enumerate(rows):
        if row.forced is not None:
            ids[i] = row.forced
    logprobs, scores = _logprobs(logits_NV, scaled, drawn, ids, rows)
    broken = ~scaled.stats.total.isfinite()
    if barred:
        index = torch.tensor(barred)
        ids[index], logprobs[index] = NONE_ALLOWED, torch.nan
    return Draws(ids.masked_fill(broken, NO_TOKEN).tolist(), logprobs.masked_fill(broken, torch.nan).tolist(), scores)


def inverse_cdf(weights_NV: Tensor, sums_NC: Tensor, noise_N: Tensor) -> Tensor:
    """First id of each row whose running weight exceeds noise * total -> int64 [N].

    weights are non-negative with a positive total, sums their ``block_sums``, noise float64 in (0, 1).
    """
    running = sums_NC.double().cumsum(-1)
    target = noise_N * running[:, -1]
    block = _first_above(running, target, sums_NC)
    before = torch.where(block > 0, running.gather(1, (block - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    columns = block[:, None] * BLOCK + torch.arange(BLOCK)[None]
    inside = weights_NV.gather(1, columns.clamp_max(weights_NV.shape[1] - 1)).double()
    inside = inside.masked_fill(columns >= weights_NV.shape[1], 0.0)
    return block * BLOCK + _first_above(inside.cumsum(-1), target - before, inside)


def _first_above(running: Tensor, target_N: Tensor, steps: Tensor) -> Tensor:
    """First column whose running sum exceeds the target; else, by rounding, the last with a positive step."""
    column = (running <= target_N[:, None]).sum(-1)
    columns = torch.arange(steps.shape[1])
    last_positive = torch.where(steps > 0, columns, 0).amax(-1)
    return torch.minimum(column, last_positive)


def _drawn_from(
    scaled: Distribution, logits: Tensor, temperature: Tensor, rows: Items[SamplerRow]
) -> tuple[Distribution, list[int]]:
    """The distributions drawn from, and the rows whose masks leave none; rows nothing is changed of as they are."""
    edited = [i for i, row in enumerate(rows) if row.edits is not None]
    cut = [i for i, row in enumerate(rows) if row.sampling.temperature == 0 or row.sampling.filters]
    if not edited and not cut:
        return scaled, []
    old = scaled.stats
    stats = RowStats(old.weights.clone(), old.block_sums.clone(), old.total.clone(), old.maximum.clone())
    drawn = Distribution(scaled.logits.clone() if edited else scaled.logits, stats, cut)
    barred: list[int] = []
    if edited:
        barred = _edit(drawn, logits, temperature, edited, rows)
    for i in cut:
        _cut(drawn, i, rows[i].sampling)
    if cut:
        index = torch.tensor(cut)
        stats.block_sums[index] = sums = block_sums(stats.weights[index])
        stats.total[index] = sums.double().cumsum(-1)[:, -1]
    return drawn, barred


def _edit(
    drawn: Distribution, logits: Tensor, temperature: Tensor, edited: list[int], rows: Items[SamplerRow]
) -> list[int]:
    """Put the changed logits of some rows in place; the rows in which nothing is left."""
    changed = torch.stack([edits.apply(logits[i]) for i in edited if (edits := rows[i].edits) is not None])
    index = torch.tensor(edited)
    changed = scaled_logits(changed, temperature[index])
    stats = row_stats(changed)
    drawn.logits[index] = changed
    drawn.stats.weights[index] = stats.weights
    drawn.stats.block_sums[index] = stats.block_sums
    drawn.stats.total[index] = stats.total
    drawn.stats.maximum[index] = stats.maximum
    return [i for i, finite in zip(edited, stats.total.isfinite().tolist(), strict=True) if not finite]


def _cut(drawn: Distribution, i: int, settings: SamplingParams) -> None:
    """Take the weight off what the settings leave out of row i."""
    weights = drawn.stats.weights
    if settings.temperature == 0:
        # argmax: the lowest of equal ids. With all the weight on it, any noise draws it.
        best = drawn.logits[i].argmax()
        weights[i] = 0.0
        weights[i, best] = 1.0
    else:
        weights[i] = filter_weights(weights[i], settings.top_k, settings.top_p, settings.min_p)


def filter_weights(weights_V: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Zero all but the top_k heaviest ids, then all but the smallest set of them that holds top_p, then
    what is lighter than min_p times the heaviest.

    The id that crosses top_p is kept; equal weights rank by lower id. top_p counts against the
    weight left by top_k (Holtzman et al. 2020 for top-p, Nguyen et al. 2024 for min-p).
    """
    ordered, ids = torch.sort(weights_V, descending=True, stable=True)
    if 0 < top_k < len(ordered):
        ordered, ids = ordered[:top_k], ids[:top_k]
    if top_p < 1.0:
        running = ordered.double().cumsum(-1)
        keep = running - ordered.double() < top_p * running[-1]
        keep[0] = True
        ordered, ids = ordered[keep], ids[keep]
    if min_p > 0.0:
        keep = ordered.double() >= min_p * ordered[0].double()
        ordered, ids = ordered[keep], ids[keep]
    return torch.zeros_like(weights_V).scatter_(0, ids, ordered)


def _logprobs(
    logits: Tensor, scaled: Distribution, drawn: Distribution, ids: Tensor, rows: Items[SamplerRow]
) -> tuple[Tensor, dict[int, RowScores]]:
    """Log-probs of ids, each of the kind its row asks for, and further ones where a row wants them."""
    kinds = [row.sampling.logprobs for row in rows]
    known = {"scaled": scaled, "processed": drawn}
    if "raw" in kinds:
        known["raw"] = Distribution.of(logits.float())
    logprobs = scaled.logprobs(ids)
    for kind in ("raw", "processed"):
        if kind in kinds:
            wanted = torch.tensor([other == kind for other in kinds])
            logprobs = torch.where(wanted, known[kind].logprobs(ids), logprobs)
    scores = {
        i: known[kinds[i]].row_scores(i, row.sampling.top_logprobs, row.sampling.logprob_token_ids)
        for i, row in enumerate(rows)
        if row.sampling.top_logprobs or row.sampling.logprob_token_ids
    }
    return logprobs, scores
