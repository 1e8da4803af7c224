"""Streamed answers joined are the unstreamed ones, and a reader costs nobody else anything."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.server.conftest import MakeFront
from tests.server.http_support import call, events, generated, link_of, post_bytes, served, streamed
from tests.server.local_link import wait_for
from unison.server.front import Front
from unison.server.link import RequestFailed

IDS = [72, 101, 108, 108, 111]
TIMES = ("e2e_latency", "queue_time", "cached_tokens")
"""What no two requests share; nor do they find the same in the prefix cache."""


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "meta_info": {k: v for k, v in answer["meta_info"].items() if k not in TIMES}}


@pytest.mark.parametrize(
    "further",
    [
        {},
        {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [1]},
        {"return_logprob": True, "logprob_start_len": 0, "return_prompt_token_ids": True},
        {"output_ids": [72, 105, 0xF0, 0x9F], "return_logprob": True},
        {"output_ids": [72, 258, 0x7A], "sampling_params": {"stop": ["zq"], "skip_special_tokens": False}},
        {"output_ids": [72, 0x7A, 0x71], "sampling_params": {"stop": ["zq"], "no_stop_trim": True}},
    ],
)
def test_pieces_are_cumulative_and_the_last_is_the_whole_answer(front: Front, further: dict[str, Any]) -> None:
    body = {
        "input_ids": IDS,
        "rid": "one",
        "sampling_params": {"stop": ["zq"]},
        **further,
    }
    body["sampling_params"] = {"max_new_tokens": 24, "seed": 4, "ignore_eos": True, **body["sampling_params"]}
    whole = generated(front, **body)
    pieces = streamed(front, **body)
    assert len(pieces) > 2 or whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": "zq"}
    assert all(piece["meta_info"]["finish_reason"] is None for piece in pieces[:-1])
    for one, next_one in pairwise(pieces):
        assert next_one["text"].startswith(one["text"])
        assert next_one["output_ids"][: len(one["output_ids"])] == one["output_ids"]
        assert len(one["output_ids"]) == one["meta_info"]["completion_tokens"]
    assert without_times(pieces[-1]) == without_times(whole)


@pytest.mark.parametrize("further", [{}, {"output_ids": [72, 105, 0xF0, 0x9F]}])
def test_incremental_pieces_joined_are_the_whole_answer(front: Front, further: dict[str, Any]) -> None:
    body = {
        "input_ids": IDS,
        "sampling_params": {"max_new_tokens": 24, "seed": 4, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
        **further,
    }
    whole = generated(front, **body)
    pieces = streamed(front, **body, stream_incremental=True)
    assert len(pieces) > 2
    assert [token for piece in pieces for token in piece["output_ids"]] == whole["output_ids"]
    text = "".join(piece["text"] for piece in pieces)
    assert whole["text"].endswith(text)
    assert text == whole["text"] if not further else whole["text"].startswith("Hi")
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert [row for piece in pieces for row in piece["meta_info"][name]] == whole["meta_info"][name]
    place = 0
    for piece in pieces:
        spans = piece["meta_info"]["weight_versions"]
        assert not piece["output_ids"] or spans[0]["start"] == place
        place += len(piece["output_ids"])
        assert piece["meta_info"]["completion_tokens"] == place


def test_the_servers_default_may_be_incremental(make_front: MakeFront) -> None:
    front = make_front(incremental_streaming=True)
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "seed": 1}}
    assert sum(len(piece["output_ids"]) for piece in streamed(front, **body)) == 6
    assert len(streamed(front, **body, stream_incremental=False)[-1]["output_ids"]) == 6


def test_every_copy_streams_to_its_end_under_its_own_index(front: Front) -> None:
    body = {"text": "Write one random word:", "sampling_params": {"n": 4, "max_new_tokens": 16, "seed": 11}}
    whole = generated(front, **body)
    pieces = streamed(front, **body)
    last = {piece["index"]: piece for piece in pieces if piece["meta_info"]["finish_reason"]}
    assert sorted(last) == [0, 1, 2, 3]
    assert [last[i]["output_ids"] for i in range(4)] == [one["output_ids"] for one in whole]
    assert sum(piece["meta_info"]["finish_reason"] is not None for piece in pieces) == 4


def test_no_piece_shows_what_may_begin_a_stop_string(front: Front) -> None:
    """The bytes of 'roll stop' are forced, one token each: a stop string over four tokens."""
    forced = list(b"roll stop")
    body = {"input_ids": IDS, "sampling_params": {"forced_ids": forced, "stop": ["stop"], "max_new_tokens": 20}}
    whole = generated(front, **body)
    for pieces in (streamed(front, **body), streamed(front, **body, stream_incremental=True)):
        assert not any("s" in piece["text"] for piece in pieces)
        assert pieces[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "stop"}
    assert whole["text"] == "roll " and whole["output_ids"] == forced
    for stop in (None, []):
        assert generated(front, text="a", sampling_params={"stop": stop, "max_new_tokens": 2})["output_ids"]
    assert call(front, body={"text": "a", "sampling_params": {"stop": [""]}}).status_code == 400
    assert call(front, body={"text": "a", "sampling_params": {"stop": ""}}).status_code == 400


def test_a_character_is_shown_when_it_is_whole(front: Front) -> None:
    forced = [0x48, 0x69, 0x20, 0xF0, 0x9F, 0x8C, 0x8D, 0x21]
    body = {"input_ids": IDS, "sampling_params": {"forced_ids": forced, "max_new_tokens": 8}}
    pieces = streamed(front, **body, stream_incremental=True)
    text = "".join(piece["text"] for piece in pieces)
    assert text == generated(front, **body)["text"] == "Hi 🌍!"
    assert not any("\ufffd" in piece["text"] for piece in pieces)
    cut = {"input_ids": IDS, "sampling_params": {"forced_ids": forced[:5], "max_new_tokens": 5}}
    pieces = streamed(front, **cut)
    assert pieces[-1]["text"] == generated(front, **cut)["text"] == "Hi \ufffd"
    assert pieces[-1]["output_ids"] == forced[:5]
    assert pieces[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_an_interval_makes_fewer_pieces(front: Front) -> None:
    sampling = {"max_new_tokens": 20, "ignore_eos": True, "seed": 1, "stream_interval": 8}
    pieces = streamed(front, input_ids=IDS, sampling_params=sampling, stream_incremental=True)
    assert all(len(piece["output_ids"]) >= 8 for piece in pieces[:-1])
    assert sum(len(piece["output_ids"]) for piece in pieces) == 20


def test_an_aborted_stream_ends_with_what_it_has(front: Front) -> None:
    link = link_of(front)
    steps = [0]

    def stop() -> None:
        steps[0] += link.engine.has_work
        if steps[0] == 10:
            link.abort("one")

    link.before_step = stop
    sampling = {"max_new_tokens": 1000, "ignore_eos": True, "seed": 1}
    pieces = streamed(front, input_ids=IDS, rid="one", sampling_params=sampling)
    assert pieces[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(pieces[-1]["output_ids"]) < 1000


def test_an_error_in_a_stream_is_an_event(front: Front) -> None:
    link = link_of(front)
    submit = link.submit

    def failing(request: Any, *, streamed: bool = False) -> Any:
        ticket = submit(request, streamed=streamed)
        failed = RequestFailed("non_finite", "logits are not finite")
        asyncio.get_running_loop().call_soon(ticket.ended.set_exception, failed)
        return ticket

    link.submit = failing  # type: ignore[method-assign]
    pieces = streamed(front, text="a", sampling_params={"max_new_tokens": 2})
    assert pieces[-1]["error"] == {"message": "logits are not finite", "type": "non_finite", "param": None}
    assert pieces[-1]["meta_info"]["finish_reason"]["status_code"] == 500


def slow(front: Front, seconds: float) -> None:
    link = link_of(front)
    link.before_step = lambda: time.sleep(seconds if link.engine.has_work else 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_requests_with_it(front: Front, stream: bool) -> None:
    slow(front, 0.01)
    sampling = {"max_new_tokens": 2000, "ignore_eos": True, "n": 2}
    body = json.dumps({"input_ids": IDS, "stream": stream, "sampling_params": sampling}).encode()
    with served(front) as server:
        with server.connect() as sock:
            sock.sendall(post_bytes(body))
            if stream:
                assert b"200 OK" in sock.recv(200)
            wait_for(lambda: link_of(front).num_open == 2)
        wait_for(lambda: link_of(front).num_open == 0, timeout_s=2)
        assert not link_of(front).engine.has_work
        link_of(front).engine.check()


def test_clients_that_drop_off_at_any_moment_leave_nothing_behind(front: Front) -> None:
    slow(front, 0.002)
    link, random_ = link_of(front), random.Random(3)
    with served(front) as server:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(60):
            body = {
                "input_ids": [random_.randrange(256) for _ in range(random_.randint(1, 300))],
                "stream": random_.random() < 0.5,
                "sampling_params": {"max_new_tokens": 200, "ignore_eos": True, "n": random_.randint(1, 3)},
            }
            data = post_bytes(json.dumps(body).encode())
            with server.connect() as sock:
                sock.sendall(data[: random_.choice([len(data), len(data), random_.randrange(len(data))])])
                time.sleep(random_.random() * 0.05)
        wait_for(lambda: link.num_open == 0)
        link.before_step = lambda: None
        assert httpx.post(f"{server.url}/generate", json={"text": "a"}, timeout=20).status_code == 200
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)
    assert not link.engine.has_work
    link.engine.check()


def test_the_request_id_is_known_before_the_first_token(front: Front) -> None:
    slow(front, 0.3)
    with served(front) as server:
        body = {"text": "a", "stream": True, "rid": "me", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=20) as response:
            begun = time.monotonic()
            assert response.headers["x-request-id"] == "me"
            assert time.monotonic() - begun < 0.2
            assert len(events(response.read().decode())[-1]["output_ids"]) == 3


def test_a_slow_reader_gets_fewer_pieces_and_a_silent_one_is_cut_off(make_front: MakeFront) -> None:
    front = make_front(limits={"write_s": 1.0}, model={"max_position_embeddings": 8192}, engine={"kv_tokens": 16384})
    # Cumulative pieces with many log-probs: soon more than any socket holds.
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    body = {
        "input_ids": IDS,
        "stream": True,
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": 20,
    }
    with served(front) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(post_bytes(json.dumps(body).encode()))
        wait_for(lambda: link_of(front).num_open == 1)
        wait_for(lambda: link_of(front).num_open == 0, timeout_s=15)
        assert not link_of(front).engine.has_work
        # The others never noticed.
        assert httpx.post(f"{server.url}/generate", json={"text": "a"}, timeout=20).status_code == 200
        sock.close()


def test_no_character_of_an_answer_ends_a_line_of_the_stream(front: Front) -> None:
    ids = list("a\x85b\u2028c\u2029d".encode())
    body = {"input_ids": IDS, "stream": True, "sampling_params": {"forced_ids": ids, "max_new_tokens": len(ids)}}
    response = call(front, "/generate", body)
    lines = [line for line in response.content.decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["text"] == "a\x85b\u2028c\u2029d"
