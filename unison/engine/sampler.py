"""Draws one token per row of logits, each from its own noise.

A token is found by inverse CDF in id order: the first id whose running weight exceeds u times the
total, u being the Philox uniform of (seed, position). Running sums go by blocks of fixed size, in
float64 across and inside blocks, so a row's token depends on nothing but the row and its uniform.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.core.sampling import SamplingParams
from unison.ops.philox import uniforms
from unison.ops.vocab import BLOCK, RowStats, block_sums, gather_logprobs, row_stats, scaled_logits

SAMPLER_NAME = "inverse-cdf/philox4x32-10/block512"
NO_TOKEN = -1
"""Stands for the id of a row no token can be drawn from."""


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """What one row needs: its settings, and the key and counter of its noise."""

    sampling: SamplingParams
    seed: int
    position: int


def sample(logits_NV: Tensor, rows: Items[SamplerRow]) -> tuple[list[int], list[float]]:
    """(token id, log-prob of the kind the row asks for) of each row.

    A row that holds NaN or +inf, or nothing above -inf, has no distribution: NO_TOKEN and NaN.
    """
    temperature = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32)
    scaled = scaled_logits(logits_NV, temperature)
    stats = row_stats(scaled)
    weights, sums = _allowed_weights(scaled, stats, rows)
    noise = torch.from_numpy(uniforms([row.seed for row in rows], [row.position for row in rows]))
    ids = inverse_cdf(weights, sums, noise)
    logprobs = _logprobs(logits_NV, scaled, stats, weights, sums, ids, rows)
    broken = ~stats.total.isfinite()
    return ids.masked_fill(broken, NO_TOKEN).tolist(), logprobs.masked_fill(broken, torch.nan).tolist()


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


def _allowed_weights(scaled: Tensor, stats: RowStats, rows: Items[SamplerRow]) -> tuple[Tensor, Tensor]:
    """Weights of the distribution drawn from; filtered rows in a copy, the others as they are."""
    changed = [i for i, row in enumerate(rows) if not row.sampling.replayable]
    if not changed:
        return stats.weights, stats.block_sums
    weights, sums = stats.weights.clone(), stats.block_sums.clone()
    for i in changed:
        settings = rows[i].sampling
        if settings.temperature == 0:
            # argmax: the lowest of equal ids. With all the weight on it, any noise draws it.
            weights[i] = 0.0
            weights[i, scaled[i].argmax()] = 1.0
        else:
            weights[i] = filter_weights(stats.weights[i], settings.top_k, settings.top_p)
    index = torch.tensor(changed)
    sums[index] = block_sums(weights[index])
    return weights, sums


def filter_weights(weights_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero all but the top_k heaviest ids, then all but the smallest set of them that holds top_p.

    The id that crosses top_p is kept; equal weights rank by lower id. top_p counts against the
    weight left by top_k (Holtzman et al. 2020 for top-p).
    """
    ordered, ids = torch.sort(weights_V, descending=True, stable=True)
    if 0 < top_k < len(ordered):
        ordered, ids = ordered[:top_k], ids[:top_k]
    if top_p < 1.0:
        running = ordered.double().cumsum(-1)
        keep = running - ordered.double() < top_p * running[-1]
        keep[0] = True
        ordered, ids = ordered[keep], ids[keep]
    return torch.zeros_like(weights_V).scatter_(0, ids, ordered)


def _logprobs(
    logits: Tensor, scaled: Tensor, stats: RowStats, weights: Tensor, sums: Tensor, ids: Tensor, rows: Items[SamplerRow]
) -> Tensor:
    logprobs = gather_logprobs(scaled, stats, ids)
    kinds = [row.sampling.logprobs for row in rows]
    if "raw" in kinds:
        raw_logits = logits.float()
        raw = gather_logprobs(raw_logits, row_stats(raw_logits), ids)
        logprobs = torch.where(torch.tensor([kind == "raw" for kind in kinds]), raw, logprobs)
    if "processed" in kinds:
        total = sums.double().cumsum(-1)[:, -1]
        processed = (weights.gather(1, ids[:, None])[:, 0].double() / total).log().float()
        # Where nothing was filtered the two kinds are one distribution: keep one float for it.
        filtered = torch.tensor([not row.sampling.replayable for row in rows])
        wanted = torch.tensor([kind == "processed" for kind in kinds])
        logprobs = torch.where(wanted & filtered, processed, logprobs)
    return logprobs
