"""Log-probs and entropy over the vocabulary against plain float64 formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unison.ops import reference
from unison.ops.padding import EXACT, FAST, NumericsPath
from unison.ops.vocab import block_sums, row_stats, scaled_logits, token_logprobs, vocabulary_logits

VOCABULARIES = (1, 7, 511, 512, 513, 1000, 5000)
BOTH_PATHS = pytest.mark.parametrize("path", [EXACT, FAST], ids=["exact", "fast"])


def example(vocab: int, rows: int = 11, hidden: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, ids and temperatures; rows at temperature 0, below and above 1."""
    generator = torch.Generator().manual_seed(vocab)
    states = torch.randn(rows, hidden, generator=generator)
    head = torch.randn(vocab, hidden, generator=generator)
    ids = torch.randint(vocab, (rows,), generator=generator)
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.7, 1.3]).repeat(rows)[:rows]
    return states, head, ids, temperature


def oracle(states: Tensor, head: Tensor, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    return reference.token_logprobs(states.double() @ head.double().t(), ids, temperature)


@BOTH_PATHS
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_values(vocab: int, path: NumericsPath) -> None:
    states, head, ids, temperature = example(vocab)
    logprobs, entropy = token_logprobs(states, head, ids, temperature, path=path)
    expected_logprobs, expected_entropy = oracle(states, head, ids, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)


def test_log_probs_of_three_logits_at_half_temperature() -> None:
    logits, ids, temperature = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, -1), torch.arange(3), torch.full((3,), 0.5)
    values, _ = token_logprobs(logits, torch.eye(3), ids, temperature, path=EXACT)
    torch.testing.assert_close(values, torch.tensor([-0.142932, -2.142932, -4.142932]), rtol=0, atol=1e-6)


def test_a_row_at_temperature_zero_is_the_row_at_one_bit_for_bit() -> None:
    states, head, ids, _ = example(1000)
    at_zero = token_logprobs(states, head, ids, torch.zeros(len(ids)), path=EXACT)
    at_one = token_logprobs(states, head, ids, torch.ones(len(ids)), path=EXACT)
    assert torch.equal(at_zero[0], at_one[0])
    assert torch.equal(at_zero[1], at_one[1])
    logits = torch.tensor([[3.0, -1.0], [3.0, -1.0]])
    assert scaled_logits(logits, torch.tensor([0.0, 2.0])).tolist() == [[3.0, -1.0], [1.5, -0.5]]


def test_log_probs_of_all_ids_sum_to_one() -> None:
    states, head, _, _ = example(1000, rows=1)
    everywhere = states.expand(1000, -1)
    values, entropy = token_logprobs(everywhere, head, torch.arange(1000), torch.ones(1000), path=EXACT)
    torch.testing.assert_close(values.double().exp().sum(), torch.tensor(1.0).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(-(values.exp() * values).sum(), entropy[0], rtol=1e-5, atol=0)


@BOTH_PATHS
@pytest.mark.parametrize("outputs", ["log-prob", "entropy", "both"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_gradients(vocab: int, outputs: str, path: NumericsPath) -> None:
    states, head, ids, temperature = example(vocab)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(2, len(ids), generator=generator) * torch.tensor(
        [[outputs != "entropy"], [outputs != "log-prob"]]
    )
    ours = (states.clone().requires_grad_(), head.clone().requires_grad_())
    theirs = (states.double().requires_grad_(), head.double().requires_grad_())
    logprobs, entropy = token_logprobs(ours[0], ours[1], ids, temperature, path=path, chunk_tokens=4)
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()
    expected = oracle(theirs[0], theirs[1], ids, temperature)
    (expected[0] * weights[0] + expected[1] * weights[1]).sum().backward()
    for own, true in zip(ours, theirs, strict=True):
        assert own.grad is not None and true.grad is not None
        torch.testing.assert_close(own.grad.double(), true.grad, rtol=1e-4, atol=2e-5)


def test_gradients_with_respect_to_one_input_alone() -> None:
    states, head, ids, temperature = example(513)
    tracked = states.clone().requires_grad_()
    token_logprobs(tracked, head, ids, temperature, path=EXACT, with_entropy=False)[0].sum().backward()
    expected = states.double().requires_grad_()
    oracle(expected, head, ids, temperature)[0].sum().backward()
    assert tracked.grad is not None and expected.grad is not None
    torch.testing.assert_close(tracked.grad.double(), expected.grad, rtol=1e-4, atol=2e-5)
    only_head = head.clone().requires_grad_()
    token_logprobs(states, only_head, ids, temperature, path=EXACT)[0].sum().backward()
    assert only_head.grad is not None and only_head.grad.shape == head.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 513, 5000])
def test_values_do_not_depend_on_the_chunk(vocab: int, dtype: torch.dtype) -> None:
    states, head, ids, temperature = example(vocab, rows=37, hidden=64)
    states, head = states.to(dtype), head.to(dtype)
    whole = token_logprobs(states, head, ids, temperature, path=EXACT)
    for chunk in (1, 3, 8, 36, 37):
        parts = token_logprobs(states, head, ids, temperature, path=EXACT, chunk_tokens=chunk)
        assert torch.equal(parts[0], whole[0]), chunk
        assert torch.equal(parts[1], whole[1]), chunk
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    shuffled = token_logprobs(states[order], head, ids[order], temperature[order], path=EXACT)
    assert torch.equal(shuffled[0], whole[0][order])


def test_gradients_do_not_depend_on_the_chunk_but_for_rounding() -> None:
    gradients = []
    for chunk in (1, 5, 512):
        states, head, ids, temperature = example(1000)
        states.requires_grad_()
        head.requires_grad_()
        sum(token_logprobs(states, head, ids, temperature, path=EXACT, chunk_tokens=chunk)).sum().backward()  # type: ignore[union-attr]
        assert states.grad is not None and head.grad is not None
        gradients.append((states.grad, head.grad))
    for other in gradients[1:]:
        for own, first in zip(other, gradients[0], strict=True):
            torch.testing.assert_close(own, first, rtol=1e-4, atol=1e-5)


def test_entropy_left_out_is_zero_and_changes_no_log_prob() -> None:
    states, head, ids, temperature = example(513)
    values, entropy = token_logprobs(states, head, ids, temperature, path=EXACT, with_entropy=False)
    assert torch.equal(values, token_logprobs(states, head, ids, temperature, path=EXACT)[0])
    assert torch.equal(entropy, torch.zeros(len(ids)))


def test_no_rows_give_no_values() -> None:
    states, head, ids, temperature = example(7, rows=1)
    tracked = states[:0].requires_grad_()
    values, entropy = token_logprobs(tracked, head, ids[:0], temperature[:0], path=EXACT)
    assert values.shape == entropy.shape == (0,)


@pytest.mark.parametrize("peak", [30.0, 1e4, 1e30])
def test_far_peaked_rows_stay_finite(peak: float) -> None:
    logits = torch.tensor([[peak, 0.0, -peak], [0.0, 0.0, 0.0], [-peak, -peak, -peak]])
    tracked = logits.clone().requires_grad_()
    values, entropy = token_logprobs(tracked, torch.eye(3), torch.tensor([0, 1, 2]), torch.ones(3), path=EXACT)
    (values + entropy).sum().backward()
    expected = reference.token_logprobs(logits.double(), torch.tensor([0, 1, 2]), torch.ones(3))
    torch.testing.assert_close(values.double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-6, atol=1e-6)
    assert tracked.grad is not None and bool(tracked.grad.isfinite().all())


def test_a_row_that_is_not_finite_reaches_no_other() -> None:
    states, head, ids, temperature = example(513)
    clean = token_logprobs(states, head, ids, temperature, path=EXACT)
    states[4] = float("nan")
    tracked = states.clone().requires_grad_()
    values, entropy = token_logprobs(tracked, head, ids, temperature, path=EXACT)
    (values + entropy).sum().backward()
    others = torch.arange(len(ids)) != 4
    assert bool(values[4].isnan()) and bool(entropy[4].isnan())
    assert torch.equal(values[others], clean[0][others])
    assert tracked.grad is not None and bool(tracked.grad[others].isfinite().all())


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_block_sums_cover_every_id_once(vocab: int) -> None:
    weights = torch.rand(3, vocab, generator=torch.Generator().manual_seed(0))
    sums = block_sums(weights)
    assert sums.shape == (3, -(-vocab // 512))
    for block in range(sums.shape[1]):
        expected = weights[:, block * 512 : (block + 1) * 512].double().sum(-1)
        torch.testing.assert_close(sums[:, block].double(), expected, rtol=1e-6, atol=0)
    stats = row_stats(weights)
    torch.testing.assert_close(
        stats.total, (weights.double() - weights.double().amax(-1, keepdim=True)).exp().sum(-1), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9])
def test_vocabulary_logits_have_the_rows_that_were_asked_for(rows: int) -> None:
    states, head, _, _ = example(7, rows=9)
    logits = vocabulary_logits(states[:rows], head, EXACT)
    torch.testing.assert_close(logits, states[:rows] @ head.t(), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, vocabulary_logits(states, head, EXACT)[:rows])
