"""Penalties, bias, masks, filters and further log-probs against an oracle in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import sampling_oracle as oracle
from unison.core.sampling import LOGPROB_KINDS, SamplingParams
from unison.engine.logit_edits import LogitEdits, make_edits
from unison.engine.sampler import NO_TOKEN, NONE_ALLOWED, Draws, SamplerRow, sample
from unison.engine.token_scores import top_ids
from unison.ops.philox import uniforms


def edits_of(
    params: SamplingParams, vocab: int, prompt: Sequence[int] = (), output: Sequence[int] = (), ends: Sequence[int] = ()
) -> LogitEdits | None:
    edits = make_edits(params, vocab_size=vocab, prompt_ids=prompt, end_ids=ends)
    for token in output if edits is not None else ():
        edits.observe(token)
    return edits


def draw(
    logits: Sequence[float],
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    ends: Sequence[int] = (),
    forced: int | None = None,
    seed: int = 1,
    **chosen: Any,
) -> Draws:
    params = SamplingParams(**chosen)
    row = SamplerRow(params, seed, 0, edits_of(params, len(logits), prompt, output, ends), forced)
    return sample(torch.tensor([logits], dtype=torch.float32), [row])


def all_logprobs(logits: Sequence[float], **chosen: Any) -> list[float]:
    """The whole distribution drawn from, or the one named."""
    chosen = {"logprobs": "processed"} | chosen
    return draw(logits, logprob_token_ids=tuple(range(len(logits))), **chosen).scores[0].chosen


def random_settings(noise: np.random.Generator, vocab: int) -> SamplingParams:
    """Each setting is neutral in about half of the cases."""

    def maybe(value: Any, neutral: Any) -> Any:
        return value if noise.random() < 0.5 else neutral

    ids = [int(i) for i in noise.permutation(vocab)]
    return SamplingParams(
        temperature=maybe(float(noise.uniform(0.3, 2)), float(noise.integers(2))),
        top_k=maybe(int(noise.integers(1, vocab + 3)), -1),
        top_p=maybe(float(noise.uniform(0.05, 1)), 1.0),
        min_p=maybe(float(noise.uniform(0, 0.9)), 0.0),
        repetition_penalty=maybe(float(noise.uniform(0.5, 2)), 1.0),
        frequency_penalty=maybe(float(noise.uniform(-2, 2)), 0.0),
        presence_penalty=maybe(float(noise.uniform(-2, 2)), 0.0),
        logit_bias=maybe({i: float(noise.normal(0, 3)) for i in ids[:3]}, {}),
        allowed_token_ids=maybe(tuple(ids[: 1 + vocab // 2]), None),
        forbidden_token_ids=maybe(tuple(ids[1 : 1 + vocab // 4]), ()),
        min_new_tokens=maybe(3, 0),
        logprob_token_ids=tuple(range(vocab)),
        top_logprobs=int(noise.integers(1, 9)),
    )


@settings(max_examples=150, deadline=None)
@given(case=st.integers(0, 2**32), vocab=st.sampled_from([2, 3, 17, 600]), kind=st.sampled_from(LOGPROB_KINDS))
def test_tokens_and_logprobs_are_those_of_the_float64_oracle(case: int, vocab: int, kind: str) -> None:
    noise = np.random.default_rng(case)
    params = replace(random_settings(noise, vocab), logprobs=kind)  # type: ignore[arg-type]
    logits = noise.normal(0, 3, vocab).astype(np.float32).astype(np.float64)
    prompt = [int(i) for i in noise.integers(0, vocab, 5)]
    output = [int(i) for i in noise.integers(0, vocab, noise.integers(0, 6))]
    ends = [int(i) for i in noise.integers(0, vocab, 2)] if vocab > 3 else []
    row = SamplerRow(params, case, 9, edits_of(params, vocab, prompt, output, ends))
    edited = oracle.edited_logits(logits, params, prompt, output, ends)
    found = sample(torch.tensor(logits, dtype=torch.float32)[None], [row])
    if np.isneginf(edited).all():
        assert found.ids == [NONE_ALLOWED] and math.isnan(found.logprobs[0])
        return

    drawn = oracle.probabilities(edited, params)
    u = float(uniforms([case], [9])[0])
    (token,) = found.ids
    before = drawn[:token].sum()
    assert drawn[token] > 0
    assert before - 1e-5 <= u <= before + drawn[token] + 1e-5

    temperature = 1.0 if kind == "raw" else params.temperature or 1.0
    named = drawn if kind == "processed" else oracle.softmax(logits / temperature)
    with np.errstate(divide="ignore"):
        expected = np.log(named)
    scores = found.scores[0]
    np.testing.assert_allclose(scores.chosen, expected, atol=1e-5, rtol=1e-6)
    assert found.logprobs == [scores.chosen[token]], "one float for one token"
    assert [(one.token_id, one.logprob) for one in scores.top] == [
        (int(i), scores.chosen[i]) for i in np.argsort(-named, kind="stable")[: params.top_logprobs] if named[i] > 0
    ]


def test_a_row_with_settings_depends_on_nothing_but_itself() -> None:
    noise = np.random.default_rng(5)
    vocab, count = 1031, 16
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)) * 4
    rows = []
    for i in range(count):
        params = SamplingParams() if i % 4 == 0 else random_settings(noise, 600)
        params = replace(params, logprobs=LOGPROB_KINDS[i % 3], min_new_tokens=0)
        rows.append(SamplerRow(params, i, i, edits_of(params, vocab, [1, 2, i], [3, i, i])))

    def answers(members: list[int]) -> list[Any]:
        found = sample(logits[members], [rows[i] for i in members])
        return [(found.ids[k], found.logprobs[k], found.scores.get(k)) for k in range(len(members))]

    whole = answers(list(range(count)))
    assert any(one[2] is not None for one in whole)
    for members in [[i] for i in range(count)] + [[4, 4, 5], [7, 0, 11], list(range(count))[::-1]]:
        assert answers(members) == [whole[i] for i in members]


def test_a_bias_is_added_to_the_logit() -> None:
    expected = [-1.180270, -1.680270, -0.680270]
    assert all_logprobs([1, 2, 3], logit_bias={0: 1.5}) == pytest.approx(expected, abs=1e-6)


def test_a_repetition_penalty_acts_once_for_each_id_seen_and_never_makes_one_likelier() -> None:
    params = SamplingParams(repetition_penalty=1.25)
    edits = edits_of(params, 3, prompt=[0, 1], output=[0, 0])
    assert edits is not None
    logits = torch.tensor([2.0, -1.0, 0.5])
    assert edits.apply(logits).tolist() == pytest.approx([1.6, -1.25, 0.5])
    assert logits.tolist() == [2.0, -1.0, 0.5], "the model's logits stay as they are"


def test_frequency_counts_occurrences_and_presence_does_not_and_neither_sees_the_prompt() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    edits = edits_of(params, 4, prompt=[0, 3], output=[1, 1, 2])
    assert edits is not None
    assert edits.apply(torch.ones(4)).tolist() == pytest.approx([1.0, -0.25, 0.25, 1.0])


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ({"min_p": 0.4}, [0, 1]),
        ({"min_p": 0.61}, [0]),
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.05}, [0, 1, 2, 3]),
        ({"min_p": 0.05, "top_k": 3}, [0, 1, 2]),
        ({"min_p": 0.25, "top_p": 0.96}, [0, 1, 2]),
        ({"min_p": 0.2, "temperature": 0.5}, [0, 1]),
    ],
)
def test_min_p_measures_against_the_likeliest_token_after_the_temperature(
    chosen: dict[str, Any], kept: list[int]
) -> None:
    logprobs = all_logprobs([math.log(p) for p in (0.5, 0.3, 0.15, 0.05)], **chosen)
    assert [i for i, value in enumerate(logprobs) if value > -math.inf] == kept


def test_the_reported_distribution_is_the_full_one_unless_the_processed_one_is_asked_for() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    full = [-0.693147, -1.203973, -1.897120, -2.995732]
    assert all_logprobs(logits, logprobs="scaled", top_p=0.75) == pytest.approx(full, abs=1e-6)
    top = draw(logits, top_p=0.75, top_logprobs=4).scores[0].top
    assert [one.token_id for one in top] == [0, 1, 2, 3]
    top = draw(logits, top_p=0.75, top_logprobs=4, logprobs="processed").scores[0].top
    assert [one.token_id for one in top] == [0, 1], "what was cut is left out"
    assert [one.logprob for one in top] == pytest.approx([-0.470004, -0.980829], abs=1e-6)


def test_greedy_takes_the_likeliest_token_of_the_changed_logits() -> None:
    logits = [3.0, 2.0, 1.0]
    assert draw(logits, temperature=0).ids == [0]
    assert draw(logits, temperature=0, forbidden_token_ids=(0,)).ids == [1]
    assert draw(logits, temperature=0, logit_bias={2: 5.0}).ids == [2]
    assert draw(logits, temperature=0, logit_bias={1: 1.0}).ids == [0], "the lowest of equals"
    found = draw(logits, temperature=0, forbidden_token_ids=(0,), logprobs="processed")
    assert found.logprobs == [0.0]


def test_every_end_id_is_impossible_until_the_minimum() -> None:
    logits = [0, 1, 2.5, 0.5, 3, 1.5]
    output: list[int] = []
    for kind, expected in (("processed", -0.787339), ("scaled", -2.240445)):
        found = draw(logits, ends=[2, 4], min_new_tokens=2, logprob_token_ids=(5,), logprobs=kind)
        assert found.scores[0].chosen == [pytest.approx(expected, abs=1e-6)]
    while len(output) < 3:
        (token,) = draw(logits, output=output, ends=[2, 4], min_new_tokens=2, temperature=0).ids
        output.append(token)
    assert output == [5, 5, 4]
    found = draw(logits, output=[5, 5], ends=[2, 4], min_new_tokens=2, temperature=0)
    assert found.logprobs == [pytest.approx(-0.740445, abs=1e-6)]


def test_a_forced_token_has_its_real_logprob() -> None:
    logits = [1.0, 2.0, 3.0]
    found = draw(logits, forced=0)
    assert found.ids == [0]
    assert found.logprobs == [pytest.approx(-2.407606, abs=1e-6)]
    assert draw(logits, forced=0, top_k=1, logprobs="processed").logprobs == [-math.inf]
    assert draw(logits, forced=0, temperature=0).logprobs == found.logprobs
    assert draw([math.nan, 1.0], forced=0).ids == [NO_TOKEN]


def test_masks_that_leave_nothing_are_told_from_broken_logits() -> None:
    assert draw([-math.inf, 1.0], allowed_token_ids=(0,)).ids == [NONE_ALLOWED]
    assert draw([-math.inf, 1.0], allowed_token_ids=(0,), temperature=0).ids == [NONE_ALLOWED]
    assert draw([-math.inf, 1.0], allowed_token_ids=(0,), top_k=1).ids == [NONE_ALLOWED]
    assert draw([math.nan, 1.0], allowed_token_ids=(0,)).ids == [NO_TOKEN]
    assert draw([-math.inf, 1.0], allowed_token_ids=(0, 1)).ids == [1]


def test_a_row_cannot_leave_its_changes_behind() -> None:
    with pytest.raises(ValueError, match="give the row its LogitEdits"):
        SamplerRow(SamplingParams(presence_penalty=1.0), 0, 0)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.integers(-2, 2), min_size=1, max_size=40), count=st.integers(1, 50))
def test_the_likeliest_ids_are_those_of_a_stable_sort(values: list[int], count: int) -> None:
    expected = sorted(range(len(values)), key=lambda i: -values[i])[:count]
    assert top_ids(torch.tensor(values, dtype=torch.float32), count) == expected
