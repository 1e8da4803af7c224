from __future__ import annotations

import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.bench.fake_server import openai, serving, sglang
from tests.bench.workloads import load, multiturn, requests
from unison.bench.http_api import APIS
from unison.bench.over_http import HttpTarget
from unison.bench.report import measure
from unison.core.errors import ConfigError, ServerError


def test_sglang_is_asked_and_read(tmp_path: Path) -> None:
    work = load(tmp_path, requests({"n": 2, "temperature": 0.5}, {"prompt_ids": [5], "max_new_tokens": 6}))
    with serving(sglang) as server:
        report = measure(HttpTarget(server.url, APIS["sglang"], "m"), work, 2)
    warm_up, *bodies = server.bodies("/generate")
    assert (warm_up["input_ids"], warm_up["sampling_params"]["max_new_tokens"]) == ([1, 2, 3], 4)
    assert len(bodies) == 4 and len(server.bodies("/flush_cache")) == 2
    two = next(body for body in bodies if body["input_ids"] == [1, 2, 3])
    assert two["sampling_params"] == {
        "max_new_tokens": 4, "temperature": 0.5, "top_p": 1.0, "top_k": -1, "n": 2, "ignore_eos": True,
    }  # fmt: skip
    assert [repeat.output_tokens for repeat in report.repeats] == [14, 14]
    assert [repeat.cached_tokens for repeat in report.repeats] == [6, 6]
    assert report.faults == [] and "note" not in report.target


def test_openai_is_asked_and_read(tmp_path: Path) -> None:
    work = load(tmp_path, requests({"n": 3, "top_k": 5}, {"ignore_eos": False}))
    with serving(openai) as server:
        report = measure(HttpTarget(server.url, APIS["openai"], "some-model"), work, 1)
    _, *bodies = server.bodies("/v1/completions")
    three = next(body for body in bodies if body["n"] == 3)
    assert three == {
        "model": "some-model", "prompt": [1, 2, 3], "max_tokens": 4, "min_tokens": 4, "temperature": 1.0,
        "top_p": 1.0, "top_k": 5, "n": 3, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    other = next(body for body in bodies if body["n"] == 1)
    assert not {"min_tokens", "ignore_eos", "top_k"} & set(other)
    assert report.repeats[0].output_tokens == 16
    assert report.repeats[0].cached_tokens is None
    assert "was not emptied" in str(report.target["note"])


@pytest.mark.parametrize("api", ["sglang", "openai"])
def test_a_turn_repeats_what_was_said_before(tmp_path: Path, api: str) -> None:
    answer, path, key = {
        "sglang": (sglang, "/generate", "input_ids"),
        "openai": (openai, "/v1/completions", "prompt"),
    }[api]
    with serving(answer) as server:
        repeat = HttpTarget(server.url, APIS[api], "m").run(load(tmp_path, multiturn(1)))
    assert [body[key] for body in server.bodies(path)] == [[7, 0, 10, 11], [7, 0, 10, 11, 100, 101, 102, 12]]
    assert [answer.name for answer in repeat.answers] == ["t0 turn 0", "t0 turn 1"]


def test_turns_need_token_ids(tmp_path: Path) -> None:
    with (
        serving(partial(openai, with_ids=False)) as server,
        pytest.raises(ServerError, match="t0 turn 0: the server's answer holds no token ids"),
    ):
        HttpTarget(server.url, APIS["openai"], "m").run(load(tmp_path, multiturn(1)))


def test_short_answers_are_said(tmp_path: Path) -> None:
    work = load(tmp_path, requests({"id": "a", "n": 2}, {"id": "b", "ignore_eos": False}))
    with serving(partial(sglang, missing=1)) as server:
        report = measure(HttpTarget(server.url, APIS["sglang"], "m"), work, 1)
    assert report.faults == ["repeat 1: a brought 6 tokens, not 8"]
    assert "wrong numbers of tokens" in report.table() and report.faults[0] in report.table()


def test_a_server_without_a_flush_call_gets_a_note(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (404, b"no such thing") if path == "/flush_cache" else sglang(path, body)

    with serving(answer) as server:
        report = measure(HttpTarget(server.url, APIS["sglang"], "m"), load(tmp_path, requests({})), 1)
    assert "answered 404: 'no such thing'" in str(report.target["note"])


@pytest.mark.parametrize(
    ("api", "status", "payload", "complaint"),
    [
        ("sglang", 500, b"out of memory", "/generate answered 500: 'out of memory'"),
        ("openai", 400, {"error": "prompt too long"}, 'answered 400: \'{"error": "prompt too long"}\''),
        ("sglang", 200, b"<html>", "answered what is not JSON: '<html>'"),
        ("sglang", 200, {"text": "x"}, "does not answer as sglang does: it sent no object as its meta_info"),
        ("sglang", 200, [1, 2], "it sent 2 samples, not 1"),
        ("sglang", 200, {"meta_info": {"completion_tokens": "4"}}, "completion_tokens='4', which is no number"),
        ("openai", 200, {"choices": []}, "it sent 0 choices, not 1"),
        ("openai", 200, {"choices": [{}]}, "it sent no object as its usage"),
        ("openai", 200, {"choices": [{"token_ids": "ab"}], "usage": {"completion_tokens": 4}}, "no list of token ids"),
    ],
)
def test_what_a_server_answers_wrongly_is_told(
    tmp_path: Path, api: str, status: int, payload: Any, complaint: str
) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (200, b"") if path == "/flush_cache" else (status, payload)

    with serving(answer) as server, pytest.raises(ServerError) as caught:
        HttpTarget(server.url, APIS[api], "m").run(load(tmp_path, requests({"id": "a"})))
    assert complaint in str(caught.value) and str(caught.value).startswith("a: ")


def test_silence_ends_at_the_timeout(tmp_path: Path) -> None:
    leave = threading.Event()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/flush_cache":
            leave.wait(20)
        return sglang(path, body)

    try:
        with serving(answer) as server, pytest.raises(ServerError, match=r"silent for 0\.2 s.*--timeout"):
            HttpTarget(server.url, APIS["sglang"], "m", timeout_s=0.2).run(load(tmp_path, requests({})))
    finally:
        leave.set()


def test_one_failure_ends_the_run_though_others_wait(tmp_path: Path) -> None:
    leave = threading.Event()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/flush_cache" and body["input_ids"] == [5]:
            return 503, b"busy"
        if path != "/flush_cache":
            leave.wait(20)
        return sglang(path, body)

    started = time.perf_counter()
    try:
        with serving(answer) as server, pytest.raises(ServerError, match="503"):
            work = load(tmp_path, requests({}, {}, {"prompt_ids": [5]}))
            HttpTarget(server.url, APIS["sglang"], "m", timeout_s=20).run(work)
    finally:
        leave.set()
    assert time.perf_counter() - started < 10


def test_nobody_listening_is_told(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ServerError, match=r"cannot be asked: .*refused"):
            HttpTarget(url, APIS["openai"], "m").warm_up(load(tmp_path, requests({})))


def test_concurrency_bounds_the_requests_under_way(tmp_path: Path) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return openai(path, body)

    with serving(answer) as server:
        HttpTarget(server.url, APIS["openai"], "m", concurrency=2).run(load(tmp_path, requests(*[{}] * 8)))
    assert most == 2


def test_a_path_before_that_of_the_api_is_kept(tmp_path: Path) -> None:
    with serving(lambda path, body: openai(path, body)) as server:
        HttpTarget(f"{server.url}/proxy/", APIS["openai"], "m").run(load(tmp_path, requests({})))
    assert [path for path, _ in server.asked] == ["/proxy/v1/completions"]


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://h", "http://", "http://h:port", "http://u:p@h", "http://h?a=1"]
)
def test_urls_that_cannot_be_meant_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url="):
        HttpTarget(url, APIS["openai"], "m")
