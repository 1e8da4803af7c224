"""Hidden states of an answer are the training forward's, to the bit, whatever happened on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.support import assert_idle, assert_works, make_engine, request
from unison.core.errors import NonFiniteLogitsError, RequestError
from unison.core.records import GenerationOutput
from unison.core.sampling import SamplingParams
from unison.engine import runner
from unison.engine.taps import hidden_tensor
from unison.models.decoder import Decoder, Taps
from unison.models.loading import load_model
from unison.ops.padding import EXACT
from unison.ops.plan import packed_plan

TAPS = ("final", "layer.0", "layer.1")


@torch.no_grad()
def trained_taps(model: Decoder, ids: list[int]) -> dict[str, torch.Tensor]:
    """All rows [len(ids), E] of each tap, from one packed call of the model."""
    plan = packed_plan([len(ids)], path=EXACT)
    padding = [0] * (plan.num_rows - len(ids))
    taps = Taps(frozenset(TAPS))
    model(torch.tensor([*ids, *padding]), torch.tensor([[*range(len(ids)), *padding]]), plan, taps=taps)
    return {name: value[: len(ids)] for name, value in taps.values.items()}


def assert_tapped(model: Decoder, output: GenerationOutput, first: int, stop: int) -> None:
    """The states are those of the positions [first, stop), in the order in which the taps were named."""
    ids = [*output.prompt_ids, *output.resumed_ids, *output.token_ids]
    assert tuple(output.hidden_states) == output.sampling.taps
    expected = trained_taps(model, ids)
    for name, rows in output.hidden_states.items():
        assert (rows.first_position, rows.num_rows, rows.size) == (first, stop - first, model.spec.hidden_size)
        found = hidden_tensor(rows)
        assert found.dtype == model.dtype and found.shape == (stop - first, model.spec.hidden_size)
        assert torch.equal(found.view(torch.uint8), expected[name][first:stop].contiguous().view(torch.uint8))


def only(engine: Any, wanted: Any) -> GenerationOutput:
    engine.add_request(wanted)
    (output,) = engine.run()
    return output  # type: ignore[no-any-return]


@pytest.mark.parametrize("taps_from", [None, 0, 7, 18])
@pytest.mark.parametrize("settings", [{}, {"prefill_chunk": 5, "page_size": 64}])
def test_rows_are_those_of_the_training_forward(
    model: Decoder, taps_from: int | None, settings: dict[str, Any]
) -> None:
    engine = make_engine(model, **settings)
    wanted = request("r", range(1, 20), max_new_tokens=9, taps=TAPS, taps_from=taps_from)
    output = only(engine, wanted)
    assert_tapped(model, output, 18 if taps_from is None else taps_from, 19 + 9 - 1)
    assert_works(engine)


def test_rows_keep_the_dtype_of_the_model(tiny_model_dir: Callable[..., Path]) -> None:
    model = load_model(tiny_model_dir("llama"), torch.bfloat16)
    output = only(make_engine(model), request("r", range(1, 20), taps=TAPS, taps_from=3))
    assert output.hidden_states["final"].dtype == "bfloat16"
    assert_tapped(model, output, 3, 26)


def test_a_cached_prompt_is_computed_again_as_far_as_its_rows_are_asked_for(model: Decoder) -> None:
    engine = make_engine(model, prefill_chunk=6)
    prompt = range(1, 41)
    only(engine, request("fills the cache", prompt))
    for taps_from, first, num_cached in ((None, 39, 39), (25, 25, 25), (0, 0, 0)):
        output = only(engine, request("r", prompt, taps=TAPS, taps_from=taps_from))
        assert output.num_cached_tokens == num_cached
        assert_tapped(model, output, first, 47)
    assert_works(engine)


@pytest.mark.parametrize("taps_from", [None, 4])
def test_rows_survive_retraction_beside_those_who_ask_for_none(model: Decoder, taps_from: int | None) -> None:
    engine = make_engine(model, kv_tokens=256, prefill_chunk=5, new_token_ratio=0.001)
    for i in range(8):
        asked = {"taps": TAPS[: 1 + i % 3], "taps_from": taps_from} if i % 4 else {}
        engine.add_request(request(f"r{i}", [7, 8, 9, *range(i, i + 47)], seed=i, max_new_tokens=30, **asked))
    outputs = engine.run()
    assert engine.stats.num_retractions > 0
    for output in outputs:
        if output.sampling.taps:
            assert_tapped(model, output, 49 if taps_from is None else taps_from, 50 + 30 - 1)
        else:
            assert output.hidden_states == {}
    assert_idle(engine)


def test_each_answer_to_a_prompt_has_its_own_rows(model: Decoder) -> None:
    engine = make_engine(model)
    sampling = SamplingParams(n=4, seed=1, max_new_tokens=6, taps=TAPS, taps_from=10)
    (copies,) = engine.generate([list(range(1, 30))], sampling)
    for output in copies:
        assert_tapped(model, output, 10, 29 + 6 - 1)


@pytest.mark.parametrize("prompt_logprobs_from", [None, 0, 15])
@pytest.mark.parametrize("prefill_chunk", [4, 64])
def test_a_prompt_alone_gives_its_rows(model: Decoder, prompt_logprobs_from: int | None, prefill_chunk: int) -> None:
    engine = make_engine(model, prefill_chunk=prefill_chunk)
    wanted = {"max_new_tokens": 0, "taps": TAPS, "prompt_logprobs_from": prompt_logprobs_from}
    output = only(engine, request("r", range(1, 20), taps_from=5, **wanted))
    assert_tapped(model, output, 5, 19)
    assert (output.finish_reason, output.token_ids) == ("length", [])
    assert len(output.prompt_logprobs) == (0 if prompt_logprobs_from is None else 19 - max(1, prompt_logprobs_from))
    output = only(engine, request("no row draws", range(1, 20), **wanted))
    assert_tapped(model, output, 18, 18)
    assert_works(engine)


def test_an_aborted_answer_has_the_rows_that_were_computed(model: Decoder) -> None:
    engine = make_engine(model, prefill_chunk=4)
    for num_steps, stop in ((0, 2), (1, 4), (3, 10), (5, 12)):
        engine.add_request(request("r", range(1, 11), taps=TAPS, taps_from=2))
        for _ in range(num_steps):
            engine.step()
        engine.abort("r")
        (output,) = engine.step()
        assert_tapped(model, output, 2, stop)
        engine.flush_cache()
    assert_works(engine)


def test_taps_change_no_answer_and_outlive_a_failed_step(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = only(make_engine(model), request("r", range(1, 20)))
    engine = make_engine(model, prefill_chunk=6)
    engine.add_request(request("r", range(1, 20), taps=TAPS, taps_from=0))
    project, calls = runner.vocabulary_logits, 0

    def failing(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in (2, 6):
            raise MemoryError("out of memory")
        return project(*arguments)

    monkeypatch.setattr(runner, "vocabulary_logits", failing)
    outputs: list[GenerationOutput] = []
    for _ in range(3):
        try:
            outputs += engine.run()
        except MemoryError:
            continue
    (output,) = outputs
    assert calls > 6 and (output.token_ids, output.logprobs) == (plain.token_ids, plain.logprobs)
    assert_tapped(model, output, 0, 26)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"taps": ("final", "layer.9")}, "taps holds 'layer.9'; this model has layer.0, layer.1"),
        ({"taps": ("final",), "taps_from": 3}, r"taps_from=3 is outside the prompt, \[0, 2\]"),
    ],
)
def test_what_the_model_has_not_is_refused(model: Decoder, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        make_engine(model).add_request(request("r", **settings))


def test_rows_of_nan_are_an_error(own_model: Decoder) -> None:
    own_model.embed.data[77] = math.nan
    engine = make_engine(own_model)
    wanted = {"max_new_tokens": 0, "taps": ("layer.0",), "taps_from": 0}
    engine.add_request(request("bad", (1, 77, 2), **wanted))
    engine.add_request(request("worse", (1, 77, 2), prompt_logprobs_from=0, **wanted))
    with pytest.raises(NonFiniteLogitsError, match=r"2 requests") as failure:
        engine.run()
    assert {output.request_id for output in failure.value.outputs} == {"bad", "worse"}
    assert_works(engine)
