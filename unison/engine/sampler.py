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
    scaled = _Patched(Distribution.of(logits_NV, temperature))
    drawn = _drawn_from(scaled.base, rows)
    ids = drawn.draw(torch.from_numpy(uniforms([row.seed for row in rows], [row.position for row in rows])))
    for i, row in enumerate(rows):
        if row.forced is not None:
            ids[i] = row.forced
    logprobs, scores = _logprobs(scaled, drawn, ids, rows)
    if drawn.patch is not None:
        barred = drawn.index[~drawn.patch.stats.total.isfinite()]
        ids[barred], logprobs[barred] = NONE_ALLOWED, torch.nan
    broken = ~scaled.base.stats.total.isfinite()
    return Draws(ids.masked_fill(broken, NO_TOKEN).tolist(), logprobs.masked_fill(broken, torch.nan).tolist(), scores)


@dataclass(slots=True)
class _Patched:
    """A distribution of each row, some of them others than the base's: row patched[k] has row k of the patch."""

    base: Distribution
    patch: Distribution | None = None
    patched: Items[int] = ()

    @property
    def index(self) -> Tensor:
        return torch.tensor(self.patched, dtype=torch.int64)

    def draw(self, noise_N: Tensor) -> Tensor:
        ids = self.base.draw(noise_N)
        if self.patch is not None:
            ids[self.index] = self.patch.draw(noise_N[self.index])
        return ids

    def logprobs(self, ids_N: Tensor) -> Tensor:
        values = self.base.logprobs(ids_N)
        if self.patch is not None:
            values[self.index] = self.patch.logprobs(ids_N[self.index])
        return values

    def row_scores(self, row: int, settings: SamplingParams) -> RowScores:
        wanted = settings.top_logprobs, settings.logprob_token_ids
        if self.patch is not None and row in self.patched:
            return self.patch.row_scores(self.patched.index(row), *wanted)
        return self.base.row_scores(row, *wanted)


def _drawn_from(scaled: Distribution, rows: Items[SamplerRow]) -> _Patched:
    """The distributions drawn from: the scaled ones where nothing is changed about them."""
    cut = {i: row.sampling for i, row in enumerate(rows) if row.sampling.temperature == 0 or row.sampling.filters}
    edits = {i: row.edits for i, row in enumerate(rows) if row.edits is not None}
    base = scaled.cut_by({i: settings for i, settings in cut.items() if i not in edits})
    if not edits:
        return _Patched(base)
    patched = list(edits)
    changed = torch.stack([one.apply(scaled.logits[i]) for i, one in edits.items()])
    patch = Distribution.of(changed, scaled.temperature[torch.tensor(patched)])
    return _Patched(base, patch.cut_by({k: cut[i] for k, i in enumerate(patched) if i in cut}), patched)


def _raw(scaled: Distribution, rows: Items[SamplerRow]) -> _Patched:
    """The distributions at temperature 1 of the rows that ask for them; those scaled by nothing are there already."""
    patched = [
        i for i, row in enumerate(rows) if row.sampling.logprobs == "raw" and row.sampling.temperature not in (0, 1)
    ]
    if not patched:
        return _Patched(scaled)
    logits = scaled.logits if len(patched) == len(rows) else scaled.logits[torch.tensor(patched)]
    return _Patched(scaled, Distribution.of(logits, torch.ones(len(patched))), patched)


def _logprobs(
    scaled: _Patched, drawn: _Patched, ids: Tensor, rows: Items[SamplerRow]
) -> tuple[Tensor, dict[int, RowScores]]:
    """Log-probs of ids, each of the kind its row asks for, and further ones where a row wants them."""
    kinds = [row.sampling.logprobs for row in rows]
    known = {"scaled": scaled, "processed": drawn}
    if "raw" in kinds:
        known["raw"] = _raw(scaled.base, rows)
    logprobs = scaled.logprobs(ids)
    for kind in ("raw", "processed"):
        if kind in kinds:
            wanted = torch.tensor([other == kind for other in kinds])
            logprobs = torch.where(wanted, known[kind].logprobs(ids), logprobs)
    scores = {
        i: known[kinds[i]].row_scores(i, row.sampling)
        for i, row in enumerate(rows)
        if row.sampling.top_logprobs or row.sampling.logprob_token_ids
    }
    return logprobs, scores
