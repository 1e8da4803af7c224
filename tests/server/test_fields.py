"""Every field has a bound and a decision, and nothing that was given is passed over in silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import MakeFront
from tests.server.http_support import call, generated, refusal
from unison.core.sampling import SamplingParams
from unison.server.fields import (
    PROMPT,
    REQUEST_FIELDS,
    REQUEST_TABLE,
    SAMPLING_FIELDS,
    SAMPLING_TABLE,
    UNREAD,
    Field,
    is_neutral,
)
from unison.server.front import Front

CONTRACT_TEXT = """
rid text input_ids input_embeds image_data video_data audio_data sampling_params return_logprob logprob_start_len
top_logprobs_num token_ids_logprob return_text_in_logprobs return_hidden_states return_routed_experts
routed_experts_start_len return_prompt_token_ids return_entropy return_sampling_mask return_flat_raw_top_logprobs
return_indexer_topk stream priority extra_key cache_salt session_id session_params lora_path custom_logit_processor
routed_dp_rank data_parallel_rank bootstrap_host bootstrap_port bootstrap_room routing_key conversation_id custom_labels
external_trace_header log_metrics no_logs background require_reasoning max_thinking_tokens modalities
"""
SAMPLING_CONTRACT_TEXT = """
max_new_tokens min_new_tokens temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty stop
stop_token_ids stop_regex ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim n json_schema regex
ebnf structural_tag logit_bias sampling_seed custom_params stream_interval
"""
HUGE: list[Any] = [
    10**400,
    -(10**400),
    float("inf"),
    float("nan"),
    "x" * 100_000,
    [[]] * 100_000,
    {"a": 1},
    [1.5],
    [-1],
]
ALL = [(field, "") for field in REQUEST_FIELDS] + [(field, "sampling_params.") for field in SAMPLING_FIELDS]
USED = [(field, prefix) for field, prefix in ALL if field.use == "used"]


def test_the_contract_is_decided_field_by_field() -> None:
    assert set(CONTRACT_TEXT.split()) <= set(REQUEST_TABLE)
    assert set(SAMPLING_CONTRACT_TEXT.split()) <= set(SAMPLING_TABLE)
    assert len(REQUEST_TABLE) == len(REQUEST_FIELDS) and len(SAMPLING_TABLE) == len(SAMPLING_FIELDS)


@pytest.mark.parametrize(("field", "prefix"), ALL, ids=[prefix + field.name for field, prefix in ALL])
def test_each_field_has_a_bound_or_a_reason(field: Field, prefix: str) -> None:
    if field.use == "used":
        assert field.kind is not UNREAD and field.kind.bound and not field.why
    else:
        assert field.use in ("ignored", "refused") and field.why and field.kind is UNREAD


def test_each_used_field_of_sampling_reaches_the_sampler() -> None:
    known = {"sampling_seed", "stream_interval"}
    for field in SAMPLING_FIELDS:
        if field.use == "used" and field.name not in known:
            assert field.name in SamplingParams.__dataclass_fields__, field.name


def body_with(name: str, prefix: str, value: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"sampling_params": {"max_new_tokens": 1}}
    if name not in ("text", "input_ids"):
        body["text"] = "a"
    (body["sampling_params"] if prefix else body)[name] = value
    return body


@pytest.mark.parametrize(("field", "prefix"), USED, ids=[prefix + field.name for field, prefix in USED])
def test_a_value_beyond_its_bound_is_refused_by_name(front: Front, field: Field, prefix: str) -> None:
    """Each of the extreme values is either the field's own kind of value, or a 400 that names it."""
    num_refused = 0
    for value in HUGE:
        body = json.dumps(body_with(field.name, prefix, value)).encode()
        response = call(front, body=body)
        assert response.status_code in (200, 400), (value, response.text)
        if response.status_code == 400:
            num_refused += 1
            param = response.json()["error"]["param"]
            assert param.split("[")[0].startswith(prefix + field.name), (str(value)[:50], response.text)
            assert len(response.content) < 1000
    assert num_refused >= 5 or field.kind is PROMPT


@pytest.mark.parametrize(
    "change",
    [
        {"image_data": "http://localhost/x.png"},
        {"image_data": [None, {"url": "x"}]},
        {"video_data": ["x"]},
        {"audio_data": {"a": 1}},
        {"input_embeds": [[0.5]]},
        {"lora_path": "adapter"},
        {"custom_logit_processor": "code"},
        {"session_params": {"id": "x"}},
        {"bootstrap_host": "10.0.0.1"},
        {"return_routed_experts": True},
        {"return_hidden_states": "last"},
        {"max_thinking_tokens": 5},
        {"sampling_params": {"json_schema": '{"type":"object","properties":{"k":{"type":"integr"}}}'}},
        {"sampling_params": {"json_schema": '{"type": 5}'}},
        {"sampling_params": {"json_schema": "{not json"}},
        {"sampling_params": {"regex": "([a-z"}},
        {"sampling_params": {"json_schema": '{"type":"string","format":"email"}'}},
        {"sampling_params": {"json_schema": "{}", "regex": "a"}},
        {"sampling_params": {"ebnf": "root ::= x"}},
        {"sampling_params": {"structural_tag": "x"}},
        {"sampling_params": {"stop_regex": "(a+)+b"}},
        {"sampling_params": {"custom_params": {"return_top_p_token_ids": True}}},
    ],
)
def test_what_would_change_the_answer_and_is_not_supported_is_refused(front: Front, change: dict[str, Any]) -> None:
    param, message = refusal(front, {"text": "a", **change})
    name = next(iter(change))
    expected = [f"sampling_params.{one}" for one in change[name]] if name == "sampling_params" else [name]
    assert param in expected and "not supported" in message


def test_neutral_values_of_refused_fields_ask_for_nothing(front: Front) -> None:
    refused = [field.name for field in REQUEST_FIELDS if field.use == "refused"]
    for neutral in (None, False, "", [], {}, [None]):
        answer = generated(
            front, text="a", sampling_params={"max_new_tokens": 1, "regex": neutral}, **dict.fromkeys(refused, neutral)
        )
        assert "ignored_fields" not in answer["meta_info"]
    assert is_neutral([None, False]) and not is_neutral(0) and not is_neutral([[1]])


def test_what_does_nothing_is_listed(front: Front) -> None:
    meta = generated(
        front,
        text="a",
        sampling_params={"max_new_tokens": 1, "spaces_between_special_tokens": False, "temprature": 0.5},
        cache_salt="x",
        log_metrics=False,
        foo=1,
        top_logprobs_num=2,
        logprob_start_len=0,
        routing_key=None,
    )["meta_info"]
    assert meta["ignored_fields"] == [
        "cache_salt",
        "foo",
        "log_metrics",
        "logprob_start_len",
        "sampling_params.spaces_between_special_tokens",
        "sampling_params.temprature",
        "top_logprobs_num",
    ]


def test_a_strict_server_refuses_what_it_does_not_know(make_front: MakeFront) -> None:
    front = make_front(strict=True)
    assert refusal(front, {"text": "a", "foo": 1})[0] == "foo"
    assert refusal(front, {"text": "a", "sampling_params": {"temprature": 1}})[0] == "sampling_params.temprature"
    assert generated(front, text="a", cache_salt="x", sampling_params={"max_new_tokens": 1})


def test_null_is_as_good_as_leaving_a_field_out(front: Front) -> None:
    names = [field.name for field in REQUEST_FIELDS if field.name not in ("text", "sampling_params")]
    sampling = {**dict.fromkeys(SAMPLING_TABLE), "seed": 1, "max_new_tokens": 5}
    answer = generated(front, text="a", sampling_params=sampling, **dict.fromkeys(names))
    expected = generated(front, text="a", sampling_params={"seed": 1, "max_new_tokens": 5})
    assert answer["output_ids"] == expected["output_ids"]
    assert "ignored_fields" not in answer["meta_info"]
    assert generated(front, text="a", sampling_params=None)["meta_info"]["completion_tokens"] > 0
