from __future__ import annotations

from pathlib import Path

import pytest

from unison.checks.workload import make_workload
from unison.text.tokenizer import Tokenizer


def test_requests_are_the_same_in_every_cell_but_for_the_temperature() -> None:
    workload = make_workload(512, None, 40, 140)
    assert workload == make_workload(512, None, 40, 140)
    few, many = workload.requests(0.7, 6), workload.requests(1.0, 40)
    for a, b in zip(few, many, strict=False):
        assert (a.request_id, a.prompt_ids, a.sampling.seed) == (b.request_id, b.prompt_ids, b.sampling.seed)
        assert a.sampling.max_new_tokens == b.sampling.max_new_tokens
    assert len({request.sampling.seed for request in many}) == 40


def test_prompts_have_mixed_lengths_within_the_limits() -> None:
    workload = make_workload(300, None, 60, 100)
    lengths = [len(prompt) for prompt in workload.prompts]
    assert min(lengths) == 1 and max(lengths) <= 100 and len(set(lengths)) >= 9
    assert all(0 <= token < 300 for prompt in workload.prompts for token in prompt)
    assert all(4 <= length <= 24 for length in workload.lengths)


def test_with_a_tokenizer_some_prompts_are_natural_text(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_folder(smollm2)
    workload = make_workload(49152, tokenizer, 16, 140)
    texts = [tokenizer.decode(prompt) for prompt in workload.prompts]
    assert "The capital of France is" in texts


@pytest.mark.parametrize(("longest", "expected"), [(520, [513, 385, 375]), (400, [385, 375, 255]), (300, [255])])
def test_even_a_few_requests_hold_the_longest_prompts(longest: int, expected: list[int]) -> None:
    lengths = [len(prompt) for prompt in make_workload(512, None, 16, longest).prompts]
    assert lengths[: len(expected)] == expected
    assert set(lengths) > {1, 33, 129}


def test_a_short_context_gets_short_prompts() -> None:
    assert {len(prompt) for prompt in make_workload(512, None, 16, 5).prompts} == {1, 2}
