from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engine.support import sample
from unison.core.sampling import LOGPROB_KINDS, LogprobKind, SamplingParams
from unison.engine.filters import heaviest
from unison.engine.sampler import NO_TOKEN, SamplerRow
from unison.engine.token_scores import inverse_cdf
from unison.ops.vocab import block_sums

VOCAB_SIZES = [1, 2, 511, 512, 513, 49152]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 3},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.5},
    {},
]


def row(seed: int = 1, position: int = 0, **settings: Any) -> SamplerRow:
    return SamplerRow(SamplingParams(**settings), seed, position)


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    excess = logits - logits.max()
    return excess - np.log(np.exp(excess).sum())  # type: ignore[no-any-return]


def drawn_by(weights_NV: torch.Tensor, noise_N: torch.Tensor) -> list[int]:
    """Inverse CDF over weights that lie there whole."""
    vocab = weights_NV.shape[1]
    return inverse_cdf(lambda ids_NK: weights_NV.gather(1, ids_NK), block_sums(weights_NV), noise_N, vocab).tolist()


def draw(logits: list[float], count: int = 400, **settings: Any) -> set[int]:
    """Distinct ids drawn with many seeds."""
    ids, _ = sample(torch.tensor([logits]).expand(count, -1), [row(seed, 0, **settings) for seed in range(count)])
    return set(ids)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", VOCAB_SIZES)
def test_a_row_depends_on_nothing_but_itself(vocab: int, threads: int) -> None:
    count = 12
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    rows = [
        row(i * 977, i, logprobs=LOGPROB_KINDS[i % 3], **SETTINGS[i % len(SETTINGS)]) for i in range(count)
    ]  # each setting with two kinds of log-prob
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = list(zip(*sample(logits, rows), strict=True))
        for members in [[i] for i in range(count)] + [[4, 4, 4], [7, 0, 11], list(range(count))[::-1]]:
            part = list(zip(*sample(logits[members], [rows[i] for i in members]), strict=True))
            assert part == [whole[i] for i in members]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("vocab", [2, 513, 5000])
def test_each_kind_of_logprob_is_that_of_float64(vocab: int) -> None:
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    for kind in LOGPROB_KINDS:
        rows = [row(i, i, temperature=0.7, logprobs=kind) for i in range(8)]
        for i, (token, logprob) in enumerate(zip(*sample(logits, rows), strict=True)):
            exact = logits[i].double().numpy() / (1.0 if kind == "raw" else np.float64(np.float32(0.7)))
            assert logprob == pytest.approx(log_softmax(exact)[token], abs=2e-6)


@pytest.mark.parametrize(("kind", "expected"), [("raw", -0.407606), ("scaled", -0.142932), ("processed", -0.142932)])
def test_temperature_divides_the_logits_before_the_softmax(kind: LogprobKind, expected: float) -> None:
    ids, logprobs = sample(torch.tensor([[2.0, 1.0, 0.0]]), [row(seed=3, temperature=0.5, logprobs=kind)])
    assert ids == [0]
    assert logprobs == [pytest.approx(expected, abs=1e-6)]


@pytest.mark.parametrize(
    ("kind", "expected"), [("scaled", [-0.693147, -1.203973]), ("processed", [-0.470004, -0.980829])]
)
def test_nucleus_sampling_reports_the_full_distribution_unless_asked(kind: LogprobKind, expected: list[float]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(200, -1)
    ids, logprobs = sample(logits, [row(seed, 0, top_p=0.75, logprobs=kind) for seed in range(200)])
    found = dict(zip(ids, logprobs, strict=True))
    assert sorted(found) == [0, 1]
    assert [found[0], found[1]] == [pytest.approx(value, abs=1e-6) for value in expected]
    assert all(math.isfinite(value) for value in logprobs)


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.zeros(1, 1500)
    logits[0, [700, 1100, 1400]] = 5.0
    for seed in range(50):
        for kind in LOGPROB_KINDS:
            ids, (logprob,) = sample(logits, [row(seed, seed, temperature=0.0, logprobs=kind)])
            assert ids == [700]
            certain = 0.0 if kind == "processed" else log_softmax(logits[0].double().numpy())[700]
            assert logprob == pytest.approx(certain, abs=1e-6)


def test_greedy_is_argmax() -> None:
    logits = torch.randn(64, 999, generator=torch.Generator().manual_seed(1))
    ids, _ = sample(logits, [row(i, i, temperature=0.0) for i in range(64)])
    assert ids == logits.argmax(-1).tolist()
    raw, _ = sample(logits, [row(i, i, temperature=0.0, logprobs="raw") for i in range(64)])
    assert raw == ids


def test_scaled_at_temperature_zero_and_one_is_raw_to_the_bit() -> None:
    logits = torch.randn(32, 700, generator=torch.Generator().manual_seed(2)) * 5
    for temperature in (0.0, 1.0):
        found = [
            sample(logits, [row(i, i, temperature=temperature, logprobs=kind) for i in range(32)])
            for kind in ("raw", "scaled")
        ]
        assert found[0] == found[1]


def test_an_id_at_minus_infinity_is_never_drawn() -> None:
    logits = [-math.inf] * 1200
    logits[600], logits[601], logits[1030] = 1.0, 0.0, 2.0
    for settings in SETTINGS:
        assert draw(logits, **settings) <= {600, 601, 1030}
    assert draw(logits) == {600, 601, 1030}


@pytest.mark.parametrize("noise", [2.0**-53, 1 - 2.0**-53, 0.5])
def test_the_ends_of_the_unit_interval_draw_an_id_with_weight(noise: float) -> None:
    for places in ([0], [511], [512], [1299], [5, 600], [1023, 1024]):
        weights = torch.zeros(1, 1300)
        weights[0, places] = torch.tensor([1e-30, 1.0][: len(places)])
        (found,) = drawn_by(weights, torch.tensor([noise], dtype=torch.float64))
        assert found in places


def test_rounding_never_carries_a_draw_past_the_last_id_with_weight() -> None:
    # Float32 block sums of half of these rows are above the sums they stand for.
    weights = torch.rand(200, 700, generator=torch.Generator().manual_seed(4))
    weights[:, 650:] = 0.0
    weights[100:, 500:] = 0.0
    noise = torch.full((200,), 1 - 2.0**-53, dtype=torch.float64)
    assert drawn_by(weights, noise) == [649] * 100 + [499] * 100


def test_the_first_id_whose_running_weight_exceeds_the_noise_is_drawn() -> None:
    weights = torch.tensor([[1.0, 2.0, 0.0, 1.0]])
    noise = [0.01, 0.24, 0.25, 0.26, 0.74, 0.75, 0.99]
    rows = weights.expand(len(noise), -1)
    assert drawn_by(rows, torch.tensor(noise, dtype=torch.float64)) == [0, 0, 1, 1, 1, 3, 3]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (4, 1.0, [0, 1, 2, 3]),
        (1, 1.0, [1]),
        (3, 1.0, [0, 1, 2]),  # of the three that tie for second place the two with lower ids
        (99, 1.0, [0, 1, 2, 3]),  # what weighs nothing is never kept
        (-1, 0.999999, [0, 1, 2, 3]),
        (-1, 0.4, [1]),  # holds 0.4 exactly
        (-1, 0.41, [0, 1]),
        (-1, 1e-9, [1]),
        (3, 0.7, [0, 1]),  # of the weight that top_k left; of all weight it would be three
        (3, 0.5, [1]),
    ],
)
def test_filters_keep_the_heaviest_ids(top_k: int, top_p: float, kept: list[int]) -> None:
    weights = torch.tensor([2.0, 4.0, 2.0, 2.0, 0.0])
    found, ids = heaviest(weights, top_k, top_p, 0.0)
    assert sorted(ids.tolist()) == kept
    assert found.equal(weights[kept].sort(descending=True).values)


def test_a_row_that_has_no_distribution_yields_no_token_and_spoils_no_other() -> None:
    good = torch.randn(700, generator=torch.Generator().manual_seed(3))
    broken = good.clone()
    broken[5] = math.nan
    infinite = good.clone()
    infinite[699] = math.inf
    empty = torch.full((700,), -math.inf)
    logits = torch.stack([good, broken, infinite, good, empty])
    for settings in SETTINGS:
        for kind in LOGPROB_KINDS:
            ids, logprobs = sample(logits, [row(9, 4, logprobs=kind, **settings)] * 5)
            (token,), (logprob,) = sample(good[None], [row(9, 4, logprobs=kind, **settings)])
            assert ids == [token, NO_TOKEN, NO_TOKEN, token, NO_TOKEN]
            assert logprobs[0] == logprobs[3] == logprob
            assert all(math.isnan(logprobs[i]) for i in (1, 2, 4))


def test_logits_that_overflow_under_the_temperature_yield_no_token() -> None:
    ids, _ = sample(torch.tensor([[3e38, 0.0]]), [row(temperature=0.01)])
    assert ids == [NO_TOKEN]
    ids, _ = sample(torch.tensor([[3e38, 0.0]]), [row(temperature=1.0)])
    assert ids == [0]
