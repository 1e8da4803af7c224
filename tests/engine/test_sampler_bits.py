"""Tokens and log-probs, to the bit, against whole rows treated one by one: all weights, full sorts, plain loops."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from unison.core.sampling import LOGPROB_KINDS, SamplingParams
from unison.engine.filters import heaviest
from unison.engine.logit_edits import make_edits
from unison.engine.sampler import NO_TOKEN, NONE_ALLOWED, SamplerRow, sample
from unison.ops.philox import uniforms

SIZES = [1, 2, 511, 513, 1300, 49152]


def sort_and_cut(weights: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The filters by one sort of the whole row."""
    ordered, ids = torch.sort(weights, descending=True, stable=True)
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
    return torch.zeros_like(weights).scatter_(0, ids, ordered)


def sums_by_blocks(weights: Tensor) -> Tensor:
    return torch.stack(
        [torch.nn.functional.pad(part, (0, 512 - len(part))).sum() for part in torch.split(weights, 512)]
    )


def softmax_parts(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    maximum = logits.amax()
    weights = (logits - maximum).exp()
    return weights, sums_by_blocks(weights).double().cumsum(0)[-1], maximum


def first_above(steps: NDArray[np.float32], target: float) -> tuple[int, float]:
    """Place of the first running sum above the target, else of the last positive step; and what ran before it."""
    running, last = 0.0, (0, 0.0)
    for i, step in enumerate(steps.tolist()):
        if step > 0:
            last = (i, running)
        running += step
        if running > target:
            break
    return last


def expected_draw(logits: Tensor, row: SamplerRow) -> tuple[int, float]:
    settings = row.sampling
    temperature = settings.temperature or 1.0
    divisor = torch.tensor(temperature, dtype=torch.float32)
    scaled = logits.float() / divisor
    weights, total, maximum = softmax_parts(scaled)
    if not bool(total.isfinite()):
        return NO_TOKEN, math.nan
    known = {"scaled": (scaled, total, maximum)}
    raw = logits.float()
    known["raw"] = (raw, *softmax_parts(raw)[1:])
    drawn = scaled if row.edits is None else row.edits.apply(logits) / divisor
    weights, total, maximum = softmax_parts(drawn)
    if not bool(total.isfinite()):
        return NONE_ALLOWED, math.nan
    if settings.temperature == 0:
        weights = torch.zeros_like(weights)
        weights[int(np.argmax(drawn.numpy()))] = 1.0
    elif settings.filters:
        weights = sort_and_cut(weights, settings.top_k, settings.top_p, settings.min_p)
    sums = sums_by_blocks(weights)
    total = sums.double().cumsum(0)[-1]
    known["processed"] = (drawn, total, maximum)
    target = float(uniforms([row.seed], [row.position])[0]) * float(total)
    block, before = first_above(sums.numpy(), target)
    inside, _ = first_above(weights[block * 512 : block * 512 + 512].numpy(), target - before)
    token = block * 512 + inside if row.forced is None else row.forced

    is_cut = settings.temperature == 0 or settings.filters
    if settings.logprobs == "processed" and is_cut and weights[token] == 0:
        return token, -math.inf
    values, total, maximum = known[settings.logprobs]
    logprob = (values[token].double() - maximum.double()) - total.log()
    return token, float(logprob.float())


def hard_row(vocab: int, kind: int, generator: torch.Generator) -> Tensor:
    row = torch.randn(vocab, generator=generator) * (0.3, 3.0, 12.0)[kind % 3]
    place = kind * 37 % vocab
    if kind == 1:
        row.round_()
    elif kind == 2:
        row.fill_(1.5)
    elif kind == 3:
        row[place:] = -math.inf
    elif kind == 4:
        row.fill_(-math.inf)
        row[place] = 2.0
    elif kind == 5:
        row[place] = math.nan
    elif kind == 6:
        row[place] = math.inf
    elif kind == 7:
        row.fill_(-math.inf)
    elif kind == 8:
        row[place] = 300.0
    return row


def settings_of(noise: random.Random, vocab: int) -> SamplingParams:
    def maybe(value: Any, neutral: Any) -> Any:
        return value if noise.random() < 0.35 else neutral

    return SamplingParams(
        temperature=noise.choice([0.0, 0.5, 1.0, 1.0]),
        top_k=maybe(noise.choice([1, 2, 40, vocab, noise.randint(1, vocab)]), -1),
        top_p=maybe(noise.choice([1e-9, 0.5, 0.9, 0.999999, noise.uniform(0.01, 1.0)]), 1.0),
        min_p=maybe(noise.choice([0.05, 1.0, noise.random()]), 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        allowed_token_ids=maybe(tuple(range(vocab // 2, vocab)), None),
        logprobs=noise.choice(LOGPROB_KINDS),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("plain", [True, False], ids=["temperatures alone", "all settings"])
def test_a_batch_gives_what_its_rows_give_one_by_one(vocab: int, dtype: torch.dtype, plain: bool) -> None:
    noise = random.Random(vocab + plain)
    generator = torch.Generator().manual_seed(vocab)
    count = 44
    logits = torch.stack([hard_row(vocab, i % 11, generator) for i in range(count)]).to(dtype)
    rows = []
    for i in range(count):
        params = SamplingParams(temperature=(0.0, 0.5, 1.0)[i % 3]) if plain else settings_of(noise, vocab)
        edits = make_edits(params, vocab_size=vocab, prompt_ids=[0, vocab // 2], end_ids=[])
        forced = noise.randrange(vocab) if noise.random() < 0.1 else None
        rows.append(SamplerRow(params, noise.getrandbits(60), i, edits, forced))
    found = sample(logits, rows)
    for i, row in enumerate(rows):
        token, logprob = expected_draw(logits[i], row)
        assert found.ids[i] == token, (i, row)
        assert found.logprobs[i] == logprob or (math.isnan(found.logprobs[i]) and math.isnan(logprob)), (i, row)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("vocab", [1, 2, 600, 49152])
def test_the_ids_left_are_those_a_full_sort_leaves(vocab: int, scale: float) -> None:
    noise = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    for case in range(60):
        logits = torch.randn(vocab, generator=generator) * scale
        logits = logits.round() if case % 3 == 0 else logits
        weights = (logits - logits.amax()).exp()
        top_k = noise.choice([-1, -1, 1, 5, 100, noise.randint(1, vocab)])
        top_p = noise.choice([1.0, 0.5, 0.75, 0.9, 1e-9, 1 - 1e-9, 1 - 2**-53, noise.uniform(0.01, 1)])
        min_p = noise.choice([0.0, 0.0, 0.1, 1.0, noise.random()])
        kept, ids = heaviest(weights, top_k, top_p, min_p)
        assert torch.zeros(vocab).scatter_(0, ids, kept).equal(sort_and_cut(weights, top_k, top_p, min_p))
        order = [(-weight, token) for weight, token in zip(kept.tolist(), ids.tolist(), strict=True)]
        assert order == sorted(order)


def test_a_share_that_is_met_exactly_is_cut_where_a_full_sort_cuts() -> None:
    for count in (1, 2, 3, 64, 1024):
        weights = torch.zeros(2048)
        weights[::2][:count] = 0.25
        for held in range(1, count + 1):
            kept, _ = heaviest(weights, -1, held / count, 0.0)
            expected = sort_and_cut(weights, -1, held / count, 0.0)
            assert len(kept) == int((expected > 0).sum())
