"""What /generate answers is what the engine samples, to the bit."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.server.conftest import MakeFront
from tests.server.http_support import call, call_all, generated, link_of, refusal
from unison.core.records import GenerationRequest
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.server.front import Front
from unison.server.link import RequestFailed

IDS = [72, 101, 108, 108, 111]


def values(triples: list[list[Any]]) -> list[float | None]:
    assert all(len(triple) == 3 for triple in triples)
    return [triple[0] for triple in triples]


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        ({}, {}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1e-7}, {"temperature": 0.0}),
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}),
        ({"top_k": 0, "min_p": 0.05}, {"min_p": 0.05}),
        ({"repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}),
        ({"presence_penalty": -1, "logit_bias": {"65": 3.5}}, {"presence_penalty": -1.0, "logit_bias": {65: 3.5}}),
        ({"forbidden_token_ids": [1, 2]}, {"forbidden_token_ids": (1, 2)}),
        ({"stop_token_ids": list(range(40))}, {"stop_token_ids": tuple(range(40))}),
        ({"allowed_token_ids": [65, 258], "ignore_eos": True}, {"allowed_token_ids": (65, 258), "ignore_eos": True}),
    ],
)
def test_an_answer_is_the_engines_to_the_bit(
    front: Front, reference: Engine, given: dict[str, Any], sampling: dict[str, Any]
) -> None:
    ((expected,),) = reference.generate([IDS], SamplingParams(**sampling, max_new_tokens=10, seed=7))
    answer = generated(
        front,
        input_ids=IDS,
        sampling_params={**given, "max_new_tokens": 10, "sampling_seed": 7},
        return_logprob=True,
    )
    meta = answer["meta_info"]
    assert answer["output_ids"] == expected.token_ids
    assert values(meta["output_token_logprobs"]) == expected.logprobs
    assert [triple[1] for triple in meta["output_token_logprobs"]] == expected.token_ids
    assert answer["text"] == expected.text
    assert meta["completion_tokens"] == len(expected.token_ids)
    assert meta["prompt_tokens"] == len(IDS)
    assert meta["seed"] == expected.seed == 7
    assert meta["finish_reason"]["type"] == expected.finish_reason
    assert meta["logprob_mode"] == "scaled"
    assert "ignored_fields" not in meta and "notes" not in meta


def test_text_is_encoded_with_its_control_tokens_and_nothing_before_it(front: Front) -> None:
    answer = generated(front, text="Hi<|end|>", sampling_params={"max_new_tokens": 0}, return_prompt_token_ids=True)
    assert front.tokenizer is not None
    expected = front.tokenizer.encode("Hi<|end|>", special_tokens="parse")
    assert answer["meta_info"]["prompt_token_ids"] == expected
    assert expected[:2] == [72, 105]


def test_further_log_probs_are_those_of_the_engine(front: Front, reference: Engine) -> None:
    sampling = SamplingParams(max_new_tokens=5, seed=3, top_logprobs=4, logprob_token_ids=(0, 511), logprobs="raw")
    ((expected,),) = reference.generate([IDS], sampling)
    meta = generated(
        front,
        input_ids=IDS,
        sampling_params={"max_new_tokens": 5, "seed": 3},
        return_logprob=True,
        top_logprobs_num=4,
        token_ids_logprob=[0, 511],
        logprob_mode="raw",
        return_text_in_logprobs=True,
    )["meta_info"]
    assert meta["logprob_mode"] == "raw"
    assert [[[one[0], one[1]] for one in row] for row in meta["output_top_logprobs"]] == [
        [[one.logprob, one.token_id] for one in row] for row in expected.top_logprobs
    ]
    assert [values(row) for row in meta["output_token_ids_logprobs"]] == expected.token_id_logprobs
    assert [[one[1] for one in row] for row in meta["output_token_ids_logprobs"]] == [[0, 511]] * 5
    assert front.tokenizer is not None
    for _, token, text in meta["output_token_logprobs"]:
        assert text == front.tokenizer.decode([token], skip_special=False)


@pytest.mark.parametrize("start", [0, 1, 3, 4])
def test_a_prompt_is_scored_from_the_position_asked_for(front: Front, reference: Engine, start: int) -> None:
    ((expected,),) = reference.generate(
        [IDS], SamplingParams(max_new_tokens=0, temperature=0.0, prompt_logprobs_from=0)
    )
    answer = generated(
        front,
        input_ids=IDS,
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        logprob_start_len=start,
    )
    whole = [None, *expected.prompt_logprobs]
    assert values(answer["meta_info"]["input_token_logprobs"]) == whole[start:]
    assert [triple[1] for triple in answer["meta_info"]["input_token_logprobs"]] == IDS[start:]
    assert answer["output_ids"] == [] and answer["meta_info"]["output_token_logprobs"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_a_position_beyond_the_prompt_is_refused(front: Front) -> None:
    param, message = refusal(front, {"input_ids": IDS, "return_logprob": True, "logprob_start_len": 5})
    assert param == "logprob_start_len" and "5 tokens" in message


def test_copies_draw_their_own_noise_and_come_in_order(front: Front, reference: Engine) -> None:
    body = {"text": "Write one random word:", "sampling_params": {"n": 4, "max_new_tokens": 16, "seed": 11}}
    ids = reference.tokenizer.encode("Write one random word:") if reference.tokenizer else []
    (expected,) = reference.generate([ids], SamplingParams(n=4, max_new_tokens=16, seed=11))
    first, second = generated(front, **body), generated(front, **body)
    assert [one["output_ids"] for one in first] == [one.token_ids for one in expected]
    assert [one["output_ids"] for one in second] == [one.token_ids for one in expected]
    assert len({tuple(one["output_ids"]) for one in first}) == 4
    body["sampling_params"]["seed"] = 12  # type: ignore[index]
    assert [one["output_ids"] for one in generated(front, **body)] != [one.token_ids for one in expected]


def test_without_a_seed_answers_differ_and_tell_theirs(front: Front) -> None:
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 16}}
    one, other = generated(front, **body), generated(front, **body)
    assert one["output_ids"] != other["output_ids"]
    body["sampling_params"] |= {"seed": one["meta_info"]["seed"]}  # type: ignore[operator]
    assert generated(front, **body)["output_ids"] == one["output_ids"]


def test_a_batch_is_answered_in_the_order_of_its_prompts(front: Front, reference: Engine) -> None:
    prompts = [IDS, [1, 2, 3], [9] * 20]
    settings = [SamplingParams(max_new_tokens=m, n=n, seed=s) for m, n, s in ((3, 1, 1), (9, 2, 2), (5, 1, 3))]
    expected = [one for p, s in zip(prompts, settings, strict=True) for one in reference.generate([p], s)[0]]
    answers = generated(
        front,
        input_ids=prompts,
        rid="many",
        sampling_params=[{"max_new_tokens": s.max_new_tokens, "n": s.n, "sampling_seed": s.seed} for s in settings],
        return_logprob=[True, False, True],
    )
    assert [one["output_ids"] for one in answers] == [one.token_ids for one in expected]
    assert [one["meta_info"]["id"] for one in answers] == ["many_0", "many_1_0", "many_1_1", "many_2"]
    assert ["output_token_logprobs" in one["meta_info"] for one in answers] == [True, False, False, True]


def test_a_batch_of_one_is_a_list(front: Front) -> None:
    (answer,) = generated(front, text=["a"], rid=["mine"], sampling_params={"max_new_tokens": 1})
    assert answer["meta_info"]["id"] == "mine"


def test_an_id_is_the_clients_and_stands_in_the_header(front: Front) -> None:
    response = call(front, body={"text": "a", "rid": "Grüße 1", "sampling_params": {"max_new_tokens": 1}})
    assert response.json()["meta_info"]["id"] == "Grüße 1"
    assert response.headers["x-request-id"] == "Gr%C3%BC%C3%9Fe 1"


def test_an_id_in_use_is_refused_until_its_request_has_ended(front: Front) -> None:
    body = {"text": "a", "rid": "x", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
    one, other = call_all(front, [{"method": "POST", "url": "/generate", "json": body}] * 2)
    assert sorted((one.status_code, other.status_code)) == [200, 400]
    assert call(front, body=body).status_code == 200
    assert refusal(front, {"text": ["a", "b"], "rid": ["x", "x"]})[0] == "rid"


def test_a_resumed_answer_goes_on_to_the_bit(front: Front) -> None:
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 20, "seed": 5}, "return_logprob": True}
    whole = generated(front, **body)
    rest = generated(front, **body, output_ids=whole["output_ids"][:8])
    assert rest["output_ids"] == whole["output_ids"][8:]
    assert rest["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][8:]
    assert rest["text"] == whole["text"]
    assert rest["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert rest["meta_info"]["resumed_tokens"] == 8
    assert rest["meta_info"]["completion_tokens"] == 12


def test_minus_infinity_is_null_and_said(front: Front) -> None:
    meta = generated(
        front,
        input_ids=IDS,
        sampling_params={"max_new_tokens": 2, "forced_ids": [7, 8], "top_k": 1, "forbidden_token_ids": [7, 8]},
        return_logprob=True,
        logprob_mode="processed",
    )["meta_info"]
    assert values(meta["output_token_logprobs"]) == [None, None]
    assert "infinity" in meta["notes"][0]


def test_no_end_token_is_drawn_before_the_minimum(front: Front) -> None:
    """Two end ids and one other: below the minimum only the other is left."""
    answer = generated(
        front,
        input_ids=IDS,
        sampling_params={
            "min_new_tokens": 2, "max_new_tokens": 5, "stop_token_ids": [7], "allowed_token_ids": [5, 7, 258],
            "logit_bias": {"7": 50, "258": 50}, "seed": 1,
        },
        return_logprob=True,
        logprob_mode="processed",
    )  # fmt: skip
    assert answer["output_ids"][:2] == [5, 5]
    assert values(answer["meta_info"]["output_token_logprobs"])[:2] == [0.0, 0.0]
    assert answer["output_ids"][2] in (7, 258) and len(answer["output_ids"]) == 3
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": answer["output_ids"][2]}


def test_the_edges_of_the_context(make_front: MakeFront) -> None:
    front = make_front(model={"max_position_embeddings": 16})
    engine = link_of(front).engine
    scored = generated(
        front,
        input_ids=IDS,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert scored["output_ids"] == [] and len(values(scored["meta_info"]["input_token_logprobs"])) == 5
    for length in (16, 20):
        param, message = refusal(front, {"input_ids": [1] * length, "sampling_params": {"max_new_tokens": 1}})
        assert param == "input_ids" and str(length) in message and "16" in message
    clipped = generated(
        front, input_ids=[1] * 12, sampling_params={"max_new_tokens": 10, "ignore_eos": True, "seed": 0}
    )
    assert len(clipped["output_ids"]) == 4
    assert clipped["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert "clipped to 4" in clipped["meta_info"]["notes"][0]
    for _ in range(4):
        generated(front, input_ids=[IDS] * 50, sampling_params={"max_new_tokens": 0})
    engine.check()
    assert generated(front, text="ok", sampling_params={"max_new_tokens": 3})["meta_info"]["completion_tokens"] >= 1


def test_versions_are_told_by_label(front: Front) -> None:
    front.versions.name(0, "step-7")
    answer = generated(front, input_ids=IDS, sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    meta = answer["meta_info"]
    assert meta["weight_version"] == "step-7"
    assert meta["weight_versions"] == [{"version": "step-7", "start": 0, "end": 3}]
    assert meta["kv_versions"] == [{"version": "step-7", "start": 0, "end": 7}]


def test_an_answer_that_spans_an_update_tells_the_older_version(front: Front) -> None:
    link = link_of(front)
    link.engine.weights.version = 0
    num_steps = [0]

    def bump() -> None:
        num_steps[0] += link.engine.has_work
        if num_steps[0] == 4:
            link.engine.weights.version = 3

    link.before_step = bump
    front.versions.name(3, None)
    meta = generated(front, input_ids=IDS, sampling_params={"max_new_tokens": 8, "ignore_eos": True})["meta_info"]
    assert meta["weight_version"] == "default"
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "3"]
    assert meta["weight_versions"][0]["end"] == meta["weight_versions"][1]["start"]
    assert meta["weight_versions"][-1]["end"] == 8


def test_the_death_of_the_engine_leaves_what_was_sampled(front: Front) -> None:
    link = link_of(front)
    steps = [0]

    def die() -> None:
        steps[0] += link.engine.has_work
        if steps[0] == 9:
            link.die("killed by signal 9")

    link.before_step = die
    sampling = {"max_new_tokens": 100, "ignore_eos": True, "seed": 2}
    answer = generated(front, input_ids=IDS, sampling_params=sampling, return_logprob=True)
    link.before_step = lambda: None
    whole = generated(front, input_ids=IDS, sampling_params=sampling, return_logprob=True)
    assert 0 < len(answer["output_ids"]) < 100
    assert answer["output_ids"] == whole["output_ids"][: len(answer["output_ids"])]
    assert answer["text"] and whole["text"].startswith(answer["text"])
    assert answer["meta_info"]["finish_reason"] == {
        "type": "abort", "message": "killed by signal 9", "status_code": None, "err_type": "EngineDied",
    }  # fmt: skip


def test_broken_logits_are_an_error_with_what_was_sampled(front: Front) -> None:
    link = link_of(front)
    steps = [0]
    weight = next(link.engine.model.parameters())
    whole = weight.detach().clone()

    def spoil() -> None:
        steps[0] += link.engine.has_work
        if steps[0] == 5:
            weight.fill_(math.nan)

    link.before_step = spoil
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}, "rid": "broken"}
    response = call(front, body=body)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "non_finite"
    assert response.json()["meta_info"]["finish_reason"]["err_type"] == "NonFiniteError"
    assert 0 < len(response.json()["output_ids"]) < 50
    link.before_step = lambda: None
    weight.copy_(whole)
    assert generated(front, **body)["meta_info"]["completion_tokens"] == 50


def test_a_full_queue_is_a_503_that_says_when_to_come_again(front: Front) -> None:
    link_of(front).refuses = RequestFailed("queue_full", "8 requests wait already")
    response = call(front, body={"text": "a"})
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "queue_full"
    reason = response.json()["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 503)
    assert response.json()["output_ids"] == []
    assert call(front, body={"text": ["a", "b"], "stream": True}).status_code == 503


@pytest.mark.parametrize(
    ("state", "kind"),
    [("starting", "starting"), ("restarting", "restarting"), ("weights_invalid", "weights_invalid"), ("dead", "dead")],
)
def test_an_engine_that_cannot_serve_is_a_typed_503(front: Front, state: Any, kind: str) -> None:
    link_of(front).state = state
    response = call(front, body={"text": "a"})
    assert response.status_code == 503 and "retry-after" in response.headers
    assert response.json()["error"]["type"] == kind


def test_a_server_that_drains_takes_nothing_new(front: Front) -> None:
    front.is_draining = True
    response = call(front, body={"text": "a"})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "draining")


def test_an_error_of_the_engine_is_the_requests_own(front: Front) -> None:
    """The engine's own check, had the server's let something pass."""
    ticket = RequestFailed("capacity", "needs 99 pages of 10")
    link_of(front).refuses = ticket
    assert refusal(front, {"text": "a"}) == (None, "needs 99 pages of 10")


def test_put_serves_as_post_does(front: Front) -> None:
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4, "seed": 1}}
    assert call(front, body=body, method="PUT").json()["output_ids"] == generated(front, **body)["output_ids"]


def test_floats_come_back_to_the_bit() -> None:
    from unison.server.errors import json_response

    numbers = [-0.1, -1e-320, 5e-324, -1.7976931348623157e308, 0.1 + 0.2, -7.62939453125e-06, 1 / 3]
    assert json.loads(bytes(json_response(numbers).body)) == numbers


def test_priorities_count_where_the_engine_has_them(make_front: MakeFront) -> None:
    taken: list[GenerationRequest] = []
    for policy, ignored in (("priority", None), ("fcfs", ["priority"])):
        front = make_front(engine={"policy": policy})
        link = link_of(front)
        submit = link.submit

        def spy(request: GenerationRequest, *, streamed: bool = False, submit: Any = submit) -> Any:
            taken.append(request)
            return submit(request, streamed=streamed)

        link.submit = spy  # type: ignore[method-assign]
        meta = generated(front, text="a", priority=9, sampling_params={"max_new_tokens": 1})["meta_info"]
        assert meta.get("ignored_fields") == ignored
    assert [request.priority for request in taken] == [9, 9]
