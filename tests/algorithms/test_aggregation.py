from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import all_close, close, gradient, gradient_list, ragged_batches
from unison.algorithms.aggregation import (
    entropy_from_logits,
    logprobs_from_logits,
    masked_mean,
    masked_whiten,
    select,
    token_sum,
)

NAN, INF = math.nan, math.inf
DOUBLE = torch.float64


def test_masked_rubbish_reaches_neither_sum_nor_gradient() -> None:
    values = torch.tensor([1.0, NAN, 3.0, INF, -INF], requires_grad=True)
    total = token_sum(values, torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0]))
    assert total.item() == 2.5
    assert gradient_list(total, values) == [1.0, 0.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    "cut",
    [[[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]]],
)
def test_token_mean_does_not_depend_on_the_cut_into_micro_batches(cut: list[list[int]]) -> None:
    losses = [torch.full((4,), 1.0), torch.tensor([5.0]), torch.full((3,), 7.0)]
    weights = [torch.ones(4), torch.ones(1), torch.zeros(3)]
    scales = [torch.ones(n, requires_grad=True) for n in (4, 1, 3)]
    parts = [
        token_sum(torch.cat([losses[i] * scales[i] for i in piece]), torch.cat([weights[i] for i in piece])) / 5
        for piece in cut
    ]
    total = torch.stack(parts).sum()
    assert close(total.item(), 1.8, 1e-12)
    slopes = [value for scale in scales for value in gradient_list(total, scale)]
    assert all_close(slopes, [0.2] * 4 + [1.0] + [0.0] * 3, 1e-6)


def test_ranks_that_average_gradients_scale_their_share_up() -> None:
    rank0 = token_sum(torch.ones(4), torch.ones(4)) / 5 * 2
    rank1 = token_sum(torch.tensor([5.0, 7, 7, 7]), torch.tensor([1.0, 0, 0, 0])) / 5 * 2
    assert close(rank0.item(), 1.6, 1e-12) and close(rank1.item(), 2.0, 1e-12)
    assert close((rank0.item() + rank1.item()) / 2, 1.8, 1e-12)


def test_an_empty_selection_adds_nothing() -> None:
    values = torch.tensor([NAN, 2.0], requires_grad=True)
    for function in (token_sum, masked_mean):
        result = function(values, torch.zeros(2))
        assert result.item() == 0.0
        assert gradient_list(result, values) == [0.0, 0.0]
    assert masked_whiten(torch.tensor([NAN, 2.0]), torch.zeros(2)).tolist() == [0.0, 0.0]
    assert token_sum(torch.zeros(0), torch.zeros(0)).item() == 0.0


def test_random_ragged_batches_match_plain_sums() -> None:
    for batch in ragged_batches():
        values = torch.tensor(batch.logprobs, dtype=DOUBLE)
        weights = torch.tensor(batch.weights, dtype=DOUBLE)
        kept = [value for value, weight in zip(batch.logprobs, batch.weights, strict=True) if weight != 0]
        expected_sum = math.fsum(v * w for v, w in zip(batch.logprobs, batch.weights, strict=True))
        assert close(token_sum(values, weights).item(), expected_sum, 1e-12)
        assert close(masked_mean(values, weights != 0).item(), statistics.fmean(kept) if kept else 0.0, 1e-12)
        white = [0.0] * len(batch)
        if len(kept) > 1:
            mean, std = statistics.fmean(kept), statistics.stdev(kept)
            white = [(v - mean) / std if w != 0 else 0.0 for v, w in zip(batch.logprobs, batch.weights, strict=True)]
        assert all_close(masked_whiten(values, weights).tolist(), white, 1e-6)


def test_select_keeps_order_and_refuses_other_lengths() -> None:
    first, second = select(torch.tensor([0, 2, 1]), torch.tensor([1, 2, 3]), torch.tensor([[1, 1], [2, 2], [3, 3]]))
    assert first.tolist() == [2, 3] and second.tolist() == [[2, 2], [3, 3]]
    with pytest.raises(ValueError, match="2 values given for 3 weights"):
        select(torch.ones(3), torch.ones(2))
    with pytest.raises(ValueError, match="shape"):
        select(torch.ones(3, 1), torch.ones(3))


def test_whitening_published_values() -> None:
    values = torch.tensor([1.0, 2, 3, 4])
    assert all_close(masked_whiten(values, torch.tensor([1, 1, 1, 0])).tolist(), [-1, 0, 1, 0])
    ones = torch.ones(4)
    expected = [-1.161895, -0.387298, 0.387298, 1.161895]
    assert all_close(masked_whiten(values, ones).tolist(), expected)
    shifted = [1.338105, 2.112702, 2.887298, 3.661895]
    assert all_close(masked_whiten(values, ones, shift_mean=False).tolist(), shifted)


def test_whitening_ignores_rubbish_and_has_no_noise_without_contrast() -> None:
    rubbish = torch.tensor([1.0, NAN, 3.0, INF])
    assert all_close(masked_whiten(rubbish, torch.tensor([1, 0, 1, 0])).tolist(), [-0.707107, 0, 0.707107, 0])
    population = masked_whiten(rubbish, torch.tensor([1, 0, 1, 0]), correction=0)
    assert all_close(population.tolist(), [-1, 0, 1, 0])
    equal = torch.full((7,), 0.9)
    assert masked_whiten(equal, torch.ones(7), correction=0).tolist() == [0.0] * 7
    assert masked_whiten(equal, torch.ones(7)).tolist() == [0.0] * 7
    assert all_close(masked_whiten(equal, torch.ones(7), shift_mean=False).tolist(), [0.9] * 7, 1e-7)
    assert masked_whiten(torch.tensor([5.0, 1.0]), torch.tensor([1, 0])).tolist() == [0.0, 0.0]


def test_entropy_of_rows_with_forbidden_tokens() -> None:
    logits = torch.tensor([[0.0, 0, 0, 0], [2, 0, 0, 0], [1, -INF, 1, -INF], [50, 0, 0, 0]], requires_grad=True)
    entropy = entropy_from_logits(logits, 1.0)
    assert all_close(entropy.tolist()[:3], [1.386294, 0.918284, 0.693147])
    mean = masked_mean(entropy, torch.tensor([1, 1, 1, 0]))
    assert close(mean.item(), 0.999242)
    slopes = gradient(mean, logits)
    assert slopes is not None and bool(slopes.isfinite().all())
    assert slopes[3].tolist() == [0.0] * 4
    assert all_close(entropy_from_logits(torch.tensor([[2.0, 0, 0, 0]]), 0.5).tolist(), [0.261830])


def test_logprob_and_entropy_published_values() -> None:
    logits, ids = torch.tensor([[2.0, 1, 0, -1], [0, 0, 0, 0]]), torch.tensor([1, 3])
    assert all_close(logprobs_from_logits(logits, ids, 1.0).tolist(), [-1.440190, -1.386294])
    assert all_close(entropy_from_logits(logits, 1.0).tolist(), [0.947537, 1.386294])
    kept = torch.tensor([[True, True, False, False], [True, True, False, True]])
    masked = logits.masked_fill(~kept, -INF)
    assert all_close(logprobs_from_logits(masked, ids, 1.0).tolist(), [-1.313262, -1.098612])


def test_logprobs_are_of_the_logits_divided_by_the_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, 3)
    logprobs = logprobs_from_logits(logits, torch.arange(3), 0.5)
    assert all_close(logprobs.tolist(), [-0.142932, -2.142932, -4.142932])
    assert close(logprobs.exp().sum().item(), 1.0, 1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF])
def test_a_temperature_that_cannot_divide_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature="):
        entropy_from_logits(torch.zeros(1, 2), temperature)
    with pytest.raises(ValueError, match="temperature="):
        logprobs_from_logits(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), temperature)


def test_random_logits_match_plain_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 11, dtype=DOUBLE, generator=generator) * 8
    logits[torch.rand(20, 11, generator=generator) < 0.2] = -INF
    logits[:, 3] = 1.0
    ids = torch.full((20,), 3)
    for temperature in (0.3, 1.0, 2.5):
        lps, entropies = [], []
        for row in logits.tolist():
            weights = [math.exp((x - 1.0) / temperature) for x in row]
            total = math.fsum(weights)
            lps.append(-math.log(total))
            entropies.append(-math.fsum(w / total * math.log(w / total) for w in weights if w > 0))
        assert all_close(logprobs_from_logits(logits, ids, temperature).tolist(), lps, 1e-10)
        assert all_close(entropy_from_logits(logits, temperature).tolist(), entropies, 1e-10)


def test_gradients_agree_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, dtype=DOUBLE, generator=generator, requires_grad=True)
    weights = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 1.0])
    logits = torch.randn(4, 5, dtype=DOUBLE, generator=generator, requires_grad=True)
    ids = torch.tensor([0, 4, 2, 2])

    def token_functions(x: Tensor) -> tuple[Tensor, ...]:
        return token_sum(x, weights), masked_mean(x, weights), masked_whiten(x, weights)

    def row_functions(x: Tensor) -> tuple[Tensor, ...]:
        return entropy_from_logits(x, 0.7), logprobs_from_logits(x, ids, 0.7)

    assert torch.autograd.gradcheck(token_functions, (values,))
    assert torch.autograd.gradcheck(row_functions, (logits,))
