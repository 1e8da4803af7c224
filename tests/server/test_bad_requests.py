"""No body takes the server down, and none changes what others get."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import MakeFront
from tests.server.http_support import call, generated, link_of, refusal, served
from unison.server.control import CONTROL_ROUTES
from unison.server.control_operations import UNSUPPORTED
from unison.server.front import Front

IDS = [72, 101, 108, 108, 111]
VOCAB = 512
BAD: list[tuple[Any, str | None]] = [
    ({"input_ids": [4, -3], "sampling_params": {"max_new_tokens": 4}}, "input_ids[1]"),
    ({"input_ids": [VOCAB], "sampling_params": {"max_new_tokens": 4}}, "input_ids"),
    ({"input_ids": [1 << 40]}, "input_ids[0]"),
    ({"input_ids": [True]}, "input_ids[0]"),
    ({"input_ids": [1.0]}, "input_ids[0]"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [[1], 2]}, "input_ids[1]"),
    ({"input_ids": [[[1]]]}, "input_ids[0]"),
    ({"input_ids": {"0": 1}}, "input_ids"),
    ({"text": "a", "sampling_params": {"n": 3_000_000}}, "sampling_params.n"),
    ({"text": ["a"] * 100, "sampling_params": {"n": 100}}, "sampling_params.n"),
    ({"text": ["a"] * 5000}, "text"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 400_000_000}, "top_logprobs_num"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [-5]}, "token_ids_logprob[0]"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [VOCAB]}, "token_ids_logprob"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [1], "logprob_start_len": 0}, "token_ids_logprob"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0}, "top_logprobs_num"),
    ({"text": "a", "return_logprob": 1}, "return_logprob"),
    ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "logprob_mode": "none"}, "logprob_mode"),
    ({"text": "a", "return_logprob": True, "logprob_mode": "processed", "logprob_start_len": 0}, "logprob_start_len"),
    *[
        ({"text": "a", "sampling_params": {name: value}}, f"sampling_params.{name}")
        for name, value in [
            ("temperature", -1), ("temperature", float("nan")), ("temperature", "hot"), ("temperature", 1e-5),
            ("temperature", True), ("temperature", 10**400), ("top_p", 0), ("top_p", 1.5), ("top_k", -7),
            ("top_k", 1.0), ("min_p", 2), ("frequency_penalty", 3), ("repetition_penalty", 0), ("max_new_tokens", -1),
            ("max_new_tokens", True), ("min_new_tokens", 129), ("n", 0), ("seed", -1), ("sampling_seed", 1 << 64),
            ("stop", ["a"] * 65), ("stop", 5), ("stop_token_ids", [VOCAB]), ("ignore_eos", 1),
            ("logit_bias", {"-1": 5}), ("logit_bias", {str(VOCAB): 5}), ("logit_bias", {"abc": 1}),
            ("logit_bias", [1]), ("stop_token_ids", "7"), ("allowed_token_ids", []),
            ("forced_ids", [VOCAB]), ("stream_interval", 0),
        ]
    ],
    ({"text": "a", "sampling_params": {"logit_bias": {"0": "x"}}}, "sampling_params.logit_bias[0]"),
    ({"text": "a", "sampling_params": {"logit_bias": {"0": 1e9}}}, "sampling_params.logit_bias[0]"),
    ({"text": "a", "sampling_params": {"stop_token_ids": [-1]}}, "sampling_params.stop_token_ids[0]"),
    ({"text": "a", "sampling_params": {"logit_bias": {"0": 1, "00": 1}}}, "sampling_params.logit_bias"),
    ({"text": "a", "sampling_params": {"stop": ["a", ""]}}, "sampling_params.stop[1]"),
    ({"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 2}}, "sampling_params.seed"),
    ({"text": "a", "sampling_params": []}, "sampling_params"),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"n": 0}]}, "sampling_params.n"),
    ({"text": 5}, "text"),
    ({"text": ["a", 5]}, "text[1]"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": ["a", ""]}, "text[1]"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({}, "text"),
    ({"text": "a", "rid": 5}, "rid"),
    ({"text": "a", "rid": ""}, "rid"),
    ({"text": "a", "rid": "x\r\nset-cookie: a"}, "rid"),
    ({"text": "a", "rid": ["x"]}, "rid"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
    ({"text": "a", "stream": "yes"}, "stream"),
    ({"input_ids": [1], "output_ids": [VOCAB]}, "output_ids"),
    ({"input_ids": [[1], [2]], "output_ids": [1, 2]}, "output_ids"),
    ({"input_ids": [1] * 2049}, "input_ids"),
    ({"input_ids": [1] * 2000, "output_ids": [1] * 49}, "output_ids"),
    ([1], None),
    ("text", None),
    (5, None),
    (b"[1,2", None),
    (b"", None),
    (b"\xff\xfe{}", None),
    (b'{"text": "\xc3("}', None),
    (b"[" * 200_000, None),
    (b'{"a":' * 100_000, None),
    (b'{"text": "a", "x": ' + b"9" * 10_000 + b"}", None),
    (b'{"text": "\\ud800"}', "text"),
    (b'{"text": "a", "sampling_params": {"stop": ["\\udfff"]}}', "sampling_params.stop[0]"),
    (b'{"text": "a", "rid": "\\ud800"}', "rid"),
    (b'{"text": "a", "text": "b"}', "text"),
    (b'{"text": "a", "sampling_params": {"n": 1, "n": 2}}', "n"),
    (b'{"text": "a", "sampling_params": {"logit_bias": {"1": 1, "1": 2}}}', "1"),
    (b"{" + b",".join(b'"f%d":1' % i for i in range(300)) + b"}", None),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_a_bad_body_is_refused_by_the_fields_name(shared_front: Front, body: Any, param: str | None) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    begun = time.monotonic()
    found, message = refusal(shared_front, data)
    assert found == param, message
    assert message and len(message) < 500
    assert time.monotonic() - begun < 1.0


def test_after_all_of_them_a_normal_request_is_served(shared_front: Front) -> None:
    assert generated(shared_front, text="a", sampling_params={"max_new_tokens": 3})["output_ids"]
    assert link_of(shared_front).num_open == 0


def test_bad_requests_change_nothing_for_the_others(front: Front) -> None:
    """Eight greedy requests, alone and then among a hundred malformed ones."""
    sampling = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
    bodies = [{"input_ids": [i + 1] * (3 + i), "sampling_params": sampling, "return_logprob": True} for i in range(8)]
    keys = ("output_ids", "text")

    def told(answer: dict[str, Any]) -> list[Any]:
        return [answer[key] for key in keys] + [answer["meta_info"]["output_token_logprobs"]]

    quiet = [told(generated(front, **body)) for body in bodies]
    malformed = [body if isinstance(body, bytes) else json.dumps(body).encode() for body, _ in BAD][:100]
    malformed += malformed[: 100 - len(malformed)]
    statuses: list[int] = []
    with served(front) as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def flood() -> None:
            with httpx.Client(base_url=server.url, timeout=60) as other:
                statuses.extend(other.post("/generate", content=body).status_code for body in malformed)

        flooding = threading.Thread(target=flood)
        flooding.start()
        among = [told(client.post("/generate", json=body).json()) for body in bodies]
        flooding.join()
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert among == quiet
    assert statuses == [400] * 100


def test_a_body_beyond_the_limit_takes_no_memory(front: Front) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with served(front) as server:
        response = httpx.post(f"{server.url}/generate", content=(b"x" * (1 << 20) for _ in range(200)), timeout=60)
        assert (response.status_code, response.json()["error"]["type"]) == (413, "too_large")
        assert httpx.post(f"{server.url}/generate", json={"text": "a"}, timeout=60).status_code == 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10


def test_no_control_route_reads_a_body_beyond_the_limit(make_front: MakeFront) -> None:
    front = make_front(limits={"body_bytes": 2048})
    for route in CONTROL_ROUTES:
        taken: list[bytes] = []

        async def pieces(taken: list[bytes] = taken) -> AsyncIterator[bytes]:
            for _ in range(64):
                taken.append(b" " * 1024)
                yield taken[-1]

        response = call(front, route.path, method=route.methods[-1], content=pieces())
        if route.path not in UNSUPPORTED:
            assert (response.status_code, response.json()["error"]["type"]) == (413, "too_large"), route.path


def test_a_mistake_of_the_server_is_a_typed_500_and_logged(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    link_of(front).submit = lambda *_, **__: 1 / 0  # type: ignore[method-assign,assignment]
    response = call(front, body={"text": "a"})
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "internal" and "ZeroDivision" not in response.text
    assert response.headers["x-request-id"] in error["message"]
    assert "ZeroDivisionError" in caplog.text and response.headers["x-request-id"] in caplog.text


def test_unknown_routes_and_methods_are_typed_too(front: Front) -> None:
    for method, path, status, kind in (
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/docs", 404, "not_found"),
        ("GET", "/openapi.json", 404, "not_found"),
        ("GET", "/generate/", 404, "not_found"),
        ("GET", "/generate", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
    ):
        response = call(front, path, method=method)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind), path
    assert "POST" in call(front, "/generate", method="GET").headers["allow"]


@pytest.mark.slow
def test_bounds_and_access_hold_without_assertions() -> None:
    folder = Path(__file__).parent
    names = ["test_access.py", "test_bad_requests.py", "test_fields.py"]
    command = [
        sys.executable,
        "-O",
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *(str(folder / n) for n in names),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder.parents[1])
    assert result.returncode == 0, result.stdout[-2000:]
