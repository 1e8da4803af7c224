"""Caches and resumed answers across weight updates, and requests that want nothing new."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.stream_support import assert_joined, scripted, take_all
from tests.engine.support import answer_of, assert_works, make_engine, piece_tokenizer, request
from unison.core.records import GenerationOutput, VersionRun, expand_runs
from unison.engine import drawing
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.models.names import published_tensors
from unison.weights.push import push_weights

VALUES = "model.layers.0.self_attn.v_proj.weight"


def only(engine: Engine, name: str, **settings: Any) -> GenerationOutput:
    engine.add_request(request(name, range(1, 101), temperature=0.0, **({"prompt_logprobs_from": 0} | settings)))
    (output,) = engine.run()
    return output


@pytest.mark.parametrize("staging", ["shadow", "in_place"])
@pytest.mark.parametrize("scores_prompt", [True, False])
def test_after_an_update_no_earlier_key_is_matched(own_model: Decoder, staging: Any, scores_prompt: bool) -> None:
    # Log-probs of a prompt need its hidden states, so a request that asks for all of them takes nothing cached.
    asked: dict[str, Any] = {} if scores_prompt else {"prompt_logprobs_from": 90}
    engine = make_engine(own_model, staging=staging)
    first, second = (only(engine, name, **asked) for name in ("first", "second"))
    assert answer_of(first) == answer_of(second) and first.prompt_logprobs == second.prompt_logprobs
    assert second.num_cached_tokens == (0 if scores_prompt else 89)
    new = {name: tensor.clone() for name, tensor in published_tensors(own_model).items()}
    new[VALUES] = -new[VALUES]
    push_weights(engine.weights, new, 1)
    third, fourth = (only(engine, name, **asked) for name in ("third", "fourth"))
    fresh = only(make_engine(own_model), "fresh", **asked)
    assert third.num_cached_tokens == 0
    assert fourth.num_cached_tokens == (0 if scores_prompt else 89)
    for output in (third, fourth):
        assert answer_of(output) == answer_of(fresh) and output.prompt_logprobs == fresh.prompt_logprobs
        assert set(expand_runs(output.weight_versions)) == set(expand_runs(output.kv_versions)) == {1}
    difference = torch.tensor(third.prompt_logprobs) - torch.tensor(first.prompt_logprobs)
    assert float(difference.abs().max()) > 0.1


def test_an_answer_aborted_at_an_update_and_resumed_keeps_its_books(
    own_model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "sample", scripted({5: [11, 12, 13, 14, 15]}, 3))
    engine = make_engine(own_model, end_ids=[15])
    push_weights(engine.weights, {k: v.clone() for k, v in published_tensors(own_model).items()}, 1)
    engine.add_request(request("first", [1, 2, 3], max_new_tokens=8))
    engine.add_request(request("waiting", [1, 2, 3], max_new_tokens=8))
    for _ in range(3):
        engine.step()
    # The one that waits for memory when it is aborted has its tokens all the same.
    engine.pause("retract")
    engine.pause("abort")
    first, waiting = engine.step()
    for output in (first, waiting):
        assert (output.finish_reason, output.token_ids, output.logprobs) == ("abort", [11, 12, 13], [-3.0, -4.0, -5.0])
        assert (output.weight_versions, output.num_retractions) == ([VersionRun(1, 3)], 1)
    push_weights(engine.weights, {k: v * 1.5 for k, v in published_tensors(own_model).items()}, 2)
    engine.resume()
    following = first.resume("second")
    assert (following.sampling.max_new_tokens, following.output_ids) == (8, (11, 12, 13))
    engine.add_request(following)
    (second,) = engine.run()
    assert (second.token_ids, second.logprobs) == ([14, 15], [-6.0, -7.0])
    assert (second.finish_reason, second.matched_stop, second.weight_versions) == ("stop", 15, [VersionRun(2, 2)])
    # Without the end token five more fit into the budget of eight.
    monkeypatch.setattr(drawing, "sample", scripted({5: [11, 12, 13, 14, 16, 17, 18, 19, 20]}, 3))
    engine.add_request(first.resume("third"))
    (third,) = engine.run()
    assert (third.finish_reason, third.token_ids) == ("length", [14, 16, 17, 18, 19])


def test_an_abort_before_the_first_token_is_an_empty_answer(model: Decoder) -> None:
    engine = make_engine(model)
    engine.add_request(request("r"))
    engine.pause("abort")
    (output,) = engine.step()
    assert (output.finish_reason, output.token_ids, output.logprobs, output.weight_versions) == ("abort", [], [], [])
    engine.resume()
    assert_works(engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("asked", [{}, {"prompt_logprobs_from": 0}])
def test_a_thousand_requests_for_nothing_new_leave_memory_as_it_was(
    model: Decoder, prefix_cache: bool, asked: dict[str, Any]
) -> None:
    engine = make_engine(model, prefix_cache=prefix_cache)
    num_free = None
    for i in range(1000):
        engine.add_request(request(f"r{i}", [1, 2, 3, 4, 5], max_new_tokens=0, **asked))
        (output,) = engine.run()
        assert (output.finish_reason, output.token_ids) == ("length", [])
        assert len(output.prompt_logprobs) == (4 if asked else 0)
        num_free = engine.pool.num_free_pages if num_free is None else num_free
        assert engine.pool.num_free_pages == num_free
    assert num_free == engine.pool.num_pages - bool(prefix_cache and asked)
    assert_works(engine)


def test_no_streamed_piece_shows_the_beginning_of_a_stop_string(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "sample", scripted({5: [0, 1, 2, 3]}, 1))
    engine = make_engine(model, tokenizer=piece_tokenizer(["ro", "ll st", "op th", "en"]))
    deltas, output = take_all(engine, request("r", [1], stop=("stop",)))
    assert_joined(deltas, output)
    assert (output.text, output.matched_stop, len(output.token_ids)) == ("roll ", "stop", 3)
    assert not any("s" in delta.text for delta in deltas)


def test_the_bytes_of_a_character_are_streamed_together(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    # GPT-2 writes the bytes f0 9f | 8c | 8d as these letters.
    tokenizer = piece_tokenizer(["HiĠ", "ðŁ", "Į", "į", "!"], byte_level=True)
    monkeypatch.setattr(drawing, "sample", scripted({5: [0, 1, 2, 3, 4]}, 1))
    deltas, output = take_all(make_engine(model, tokenizer=tokenizer), request("r", [1], max_new_tokens=5))
    assert_joined(deltas, output)
    assert [delta.text for delta in deltas] == ["Hi ", "", "", "\N{EARTH GLOBE EUROPE-AFRICA}", "!"]
    deltas, output = take_all(make_engine(model, tokenizer=tokenizer), request("r", [1], max_new_tokens=3))
    assert_joined(deltas, output)
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("Hi \ufffd", "length", 3)
