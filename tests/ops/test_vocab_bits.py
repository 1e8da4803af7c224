"""Chunks, reused buffers and skipped steps change no bit of what the formulas give, written out one after the other."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unison.ops import vocab
from unison.ops.padding import EXACT, FAST, NumericsPath
from unison.ops.vocab import gather_logprobs, row_stats, token_logprobs, vocabulary_logits


class Plain:
    """Whole-row tensors, one step after the other, nothing in place."""

    def __init__(self, logits: Tensor, temperature: Tensor) -> None:
        self.divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
        self.scaled = logits.float() / self.divisor
        self.maximum = self.scaled.amax(-1, keepdim=True)
        self.weights = (self.scaled - self.maximum).exp()
        self.sums = self.by_blocks(self.weights)
        self.total = self.sums.double().cumsum(-1)[:, -1]

    def by_blocks(self, values: Tensor) -> Tensor:
        padded = F.pad(values, (0, -values.shape[1] % 512))
        return torch.stack([padded[:, i : i + 512].contiguous().sum(-1) for i in range(0, padded.shape[1], 512)], 1)

    def logprobs(self, ids: Tensor) -> Tensor:
        chosen = self.scaled.gather(1, ids[:, None])
        return ((chosen.double() - self.maximum.double())[:, 0] - self.total.log()).float()

    def entropy(self) -> Tensor:
        excess = self.by_blocks(self.weights * (self.scaled - self.maximum)).double().cumsum(-1)[:, -1]
        return (self.total.log() - excess / self.total).float()

    def grad_logits(self, ids: Tensor, of_logprobs: Tensor, of_entropy: Tensor | None) -> Tensor:
        probs = self.weights / self.total.float()[:, None]
        grad = (probs * -of_logprobs[:, None]).scatter_add(1, ids[:, None], of_logprobs[:, None])
        if of_entropy is not None:
            logp = self.scaled - (self.maximum + self.total.log().float()[:, None])
            entropy = -(probs * logp).sum(-1, keepdim=True)
            grad = grad - probs * (logp + entropy) * of_entropy[:, None]
        return grad / self.divisor


def hard_rows(num_rows: int, size: int, seed: int) -> Tensor:
    """Random, tied, constant, far peaked and broken rows in turn."""
    rows = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)) * 4
    for i, row in enumerate(rows):
        kind, place = i % 11, i * 7 % size
        if kind == 1:
            row.round_()
        elif kind == 2:
            row.zero_()
        elif kind == 3:
            row[place] = 1e4
        elif kind == 4:
            row[::2] = -math.inf
        elif kind == 5:
            row.fill_(-math.inf)
        elif kind == 6:
            row[place] = math.nan
        elif kind == 7:
            row[place] = math.inf
        elif kind == 8:
            row *= 1e37
    return rows


def temperatures(num_rows: int, values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).repeat(num_rows)[:num_rows]


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.nan_to_num(nan=1e38), expected.nan_to_num(nan=1e38))
    assert torch.equal(found.isnan(), expected.isnan())


MIXED = pytest.mark.parametrize("mix", [(1.0,), (0.0, 1.0), (0.0, 0.5, 1.0), (0.7,)], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@MIXED
@DTYPES
@pytest.mark.parametrize("chunk_ids", [1, 3000, 1 << 20])
@pytest.mark.parametrize("size", [1, 7, 511, 512, 513, 1000, 5000])
def test_statistics(
    size: int, chunk_ids: int, dtype: torch.dtype, mix: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab, "_CHUNK_IDS", chunk_ids)
    for num_rows in (0, 1, 23):
        logits, temperature = hard_rows(num_rows, size, size).to(dtype), temperatures(num_rows, mix)
        plain, stats, ids = Plain(logits, temperature), row_stats(logits, temperature), torch.arange(num_rows) % size
        assert_same(stats.block_sums, plain.sums)
        assert_same(stats.total, plain.total)
        assert_same(stats.maximum, plain.maximum)
        assert_same(stats.block_maxima.amax(-1, keepdim=True), plain.maximum)
        assert_same(gather_logprobs(logits, stats, ids, temperature), plain.logprobs(ids))


@MIXED
@DTYPES
@pytest.mark.parametrize("path", [EXACT, FAST], ids=["exact", "fast"])
@pytest.mark.parametrize("outputs", ["log-prob", "entropy not asked for", "both"])
@pytest.mark.parametrize("size", [7, 513, 5000])
def test_values_and_gradients(
    size: int, outputs: str, path: NumericsPath, dtype: torch.dtype, mix: tuple[float, ...]
) -> None:
    num_rows, chunk = 29, 13
    hidden, temperature = hard_rows(num_rows, 16, 1).to(dtype), temperatures(num_rows, mix)
    generator = torch.Generator().manual_seed(size)
    head = torch.randn(size, 16, generator=generator).to(dtype)
    ids = torch.randint(size, (num_rows,), generator=generator)
    of_logprobs, of_entropy = torch.randn(2, num_rows, generator=generator)
    if outputs == "log-prob":
        of_entropy = torch.zeros(num_rows)
    with_entropy = outputs != "entropy not asked for"
    tracked, tracked_head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    values, entropy = token_logprobs(
        tracked, tracked_head, ids, temperature, path=path, chunk_tokens=chunk, with_entropy=with_entropy
    )
    torch.autograd.backward([values, entropy], [of_logprobs, of_entropy])

    grad_head = torch.zeros(head.shape)
    assert tracked.grad is not None and tracked_head.grad is not None
    for rows in (slice(0, 13), slice(13, 26), slice(26, 29)):
        plain = Plain(vocabulary_logits(hidden[rows], head, path), temperature[rows])
        assert_same(values[rows].detach(), plain.logprobs(ids[rows]))
        if with_entropy:
            assert_same(entropy[rows].detach(), plain.entropy())
        grad = plain.grad_logits(ids[rows], of_logprobs[rows], of_entropy[rows] if outputs == "both" else None)
        assert_same(tracked.grad[rows], grad.to(dtype) @ head)
        grad_head += grad.to(dtype).t() @ hidden[rows]
    assert_same(tracked_head.grad, grad_head.to(dtype))


def test_temperature_one_costs_no_division_and_none_is_the_logits_as_they_are() -> None:
    logits = hard_rows(11, 600, 3)
    for temperature in (None, torch.ones(11), torch.zeros(11)):
        assert vocab.scaled_logits(logits, temperature) is logits
    assert_same(row_stats(logits).total, row_stats(logits, torch.ones(11)).total)


@pytest.mark.parametrize(("num_rows", "size"), [(0, 5), (1, 5), (1, 1 << 21), (64, 49152), (65, 49152), (3, 1 << 19)])
def test_chunks_of_rows_are_of_even_length_and_leave_no_row_out(num_rows: int, size: int) -> None:
    chunks = vocab._row_chunks(num_rows, size)
    assert [i for rows in chunks for i in range(num_rows)[rows]] == list(range(num_rows))
    lengths = {rows.stop - rows.start for rows in chunks}
    assert all(length * size <= 1 << 20 or length == 1 for length in lengths)
    assert not lengths or max(lengths) - min(lengths) <= 1
