"""Draws follow the distribution they should, and the noise behind them is independent from row to row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from tests.engine import sampling_oracle as oracle
from tests.engine.support import sample
from unison.core.sampling import SamplingParams
from unison.core.seeds import copy_seed, derive_seed
from unison.engine.filters import heaviest
from unison.engine.logit_edits import LogitEdits, make_edits
from unison.engine.sampler import SamplerRow
from unison.engine.token_scores import inverse_cdf
from unison.ops.philox import uniforms
from unison.ops.vocab import block_sums, row_stats, scaled_logits

NUM_DRAWS = 100_000
SMALLEST_P = 1e-4
Floats = NDArray[np.float64]

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.5": {"temperature": 1.5},
    "top_k": {"top_k": 7},
    "top_k with ties": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "both": {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
    "min_p": {"temperature": 1.3, "min_p": 0.05},
    "all filters": {"top_k": 60, "top_p": 0.95, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": -0.3},
    "bias": {"logit_bias": {600: 4.0, 601: -4.0, 5: 2.0}, "temperature": 0.8},
    "masks": {"allowed_token_ids": tuple(range(0, 1300, 3)), "forbidden_token_ids": (0, 9, 600), "min_new_tokens": 9},
}
PROMPT, OUTPUT, ENDS = (1, 2, 3, 600), (4, 4, 600, 7), (9, 30)


def known_logits(name: str) -> Floats:
    if name == "top_k with ties":
        return np.array([1.0, 2.0, 1.0, 0.5, 1.0, 1.0, -1.0])
    # Three blocks of the sampler's running sums, the last one cut short.
    return np.random.default_rng(0).normal(0, 2.5, 1300)


def expected_probabilities(logits: Floats, settings: SamplingParams) -> Floats:
    """By definition, in float64."""
    if settings.edits_logits:
        logits = oracle.edited_logits(logits, settings, PROMPT, OUTPUT, ENDS)
    return oracle.probabilities(logits, settings)


def edits_of(settings: SamplingParams, vocab: int) -> LogitEdits | None:
    edits = make_edits(settings, vocab_size=vocab, prompt_ids=PROMPT, end_ids=ENDS)
    for token in OUTPUT if edits is not None else ():
        edits.observe(token)
    return edits


def draws(
    logits: Floats, settings: SamplingParams, seeds: Sequence[int], positions: Sequence[int]
) -> NDArray[np.int64]:
    """What ``sample`` draws; its parts are called one by one, so that a row is filtered once and not 100,000 times."""
    row = torch.tensor(logits, dtype=torch.float32)
    edits = edits_of(settings, len(row))
    scaled = scaled_logits((row if edits is None else edits.apply(row))[None], torch.tensor([settings.temperature]))
    weights = (scaled - row_stats(scaled).maximum).exp()
    if settings.filters:
        kept, ids = heaviest(weights[0], settings.top_k, settings.top_p, settings.min_p)
        weights = torch.zeros_like(weights).index_put_((torch.zeros_like(ids), ids), kept)
    noise = torch.from_numpy(uniforms(seeds, positions))
    parts = [
        inverse_cdf(lambda ids: weights[0][ids], block_sums(weights).expand(len(u), -1), u, len(row))
        for u in torch.split(noise, 500)
    ]
    return torch.cat(parts).numpy()


def chi_square_p(counts: Floats, probabilities: Floats) -> float:
    """p of the counts; ids expected fewer than 10 times are taken together."""
    expected = probabilities * counts.sum()
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    assert observed[~used].sum() == 0
    return float(stats.chisquare(observed[used], expected[used]).pvalue)


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_distribution(name: str) -> None:
    settings = SamplingParams(**FILTERS[name])
    logits = known_logits(name)
    expected = expected_probabilities(logits, settings)
    ids = draws(logits, settings, range(NUM_DRAWS), [17] * NUM_DRAWS)
    counts = np.bincount(ids, minlength=len(logits)).astype(float)
    assert counts[expected == 0].sum() == 0, "a filtered id was drawn"
    assert chi_square_p(counts, expected) > SMALLEST_P

    rows = [SamplerRow(settings, seed, 17, edits_of(settings, len(logits))) for seed in range(500)]
    sampled, _ = sample(torch.tensor(logits, dtype=torch.float32).expand(500, -1), rows)
    assert sampled == ids[:500].tolist(), "the parts are not the whole"


def test_the_chi_square_test_would_see_a_wrong_distribution() -> None:
    logits = known_logits("none")
    ids = draws(logits, SamplingParams(temperature=0.95), range(NUM_DRAWS), [17] * NUM_DRAWS)
    counts = np.bincount(ids, minlength=len(logits)).astype(float)
    assert chi_square_p(counts, expected_probabilities(logits, SamplingParams())) < SMALLEST_P


def neighbours(kind: str) -> Floats:
    """Noise in an order in which a weak generator would show."""
    count = range(NUM_DRAWS)
    seed = derive_seed("neighbours")
    if kind == "seeds":
        return uniforms(range(seed, seed + NUM_DRAWS), [33] * NUM_DRAWS)
    if kind == "small seeds":
        return uniforms(count, [0] * NUM_DRAWS)
    if kind == "positions":
        return uniforms([seed] * NUM_DRAWS, count)
    if kind == "copies":
        return uniforms([copy_seed(seed, k) for k in count], [33] * NUM_DRAWS)
    # Seed and position move together: a sum or exclusive or of the two would repeat itself.
    return uniforms([seed + k for k in count], [NUM_DRAWS - k for k in count])


@pytest.mark.parametrize("kind", ["seeds", "small seeds", "positions", "copies", "seeds against positions"])
def test_neighbouring_noise_is_uniform_and_uncorrelated(kind: str) -> None:
    noise = neighbours(kind)
    assert noise.min() > 0 and noise.max() < 1
    assert stats.kstest(noise, "uniform").pvalue > SMALLEST_P
    for lag in (1, 2, 4, 8, 64):
        correlation = np.corrcoef(noise[:-lag], noise[lag:])[0, 1]
        assert 2 * stats.norm.sf(abs(correlation) * np.sqrt(NUM_DRAWS - lag)) > SMALLEST_P
        # Correlation sees lines only; a grid of pairs sees any pattern.
        pairs, _, _ = np.histogram2d(noise[:-lag], noise[lag:], bins=16, range=[[0, 1], [0, 1]])
        assert stats.chisquare(pairs.ravel()).pvalue > SMALLEST_P


def test_one_seed_at_one_position_has_one_noise_and_any_other_another() -> None:
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1]
    positions = [0, 1, 2**31, 2**32 + 1]
    pairs = [(seed, position) for seed in seeds for position in positions]
    noise = uniforms([seed for seed, _ in pairs], [position for _, position in pairs]).tolist()
    assert len(set(noise)) == len(pairs)
    assert [uniforms([seed], [position])[0] for seed, position in pairs] == noise
