"""Bounds of a connection, over real sockets: length and time of heads and bodies, and how many there may be."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.server.conftest import MakeFront
from tests.server.http_support import Served, link_of, post_bytes, read_to_end, served
from tests.server.local_link import wait_for
from unison.server.front import Front, Route

BIG = 8 << 20
SMALL = {"body_bytes": 4096, "header_bytes": 2048, "read_s": 1.0}
GOOD = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 2}}).encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def kind(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return str(json.loads(body)["error"]["type"])


def assert_serves(server: Served) -> None:
    assert httpx.post(f"{server.url}/generate", content=GOOD, timeout=20).status_code == 200


def test_a_body_is_counted_as_it_comes(make_front: MakeFront) -> None:
    chunked = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served(make_front(limits=SMALL)) as server:
        assert status(server.send(post_bytes(b"x" * 4096, extra="Connection: close\r\n"))) == 400
        for data in (
            post_bytes(b"x" * 4097),
            post_bytes(b"", length=1 << 60),
            chunked + b"1000\r\n" + b"x" * 4096 + b"\r\n1\r\nx\r\n0\r\n\r\n",
            chunked + b"".join(b"400\r\n" + b"x" * 1024 + b"\r\n" for _ in range(5)),
        ):
            answer = server.send(data)
            assert (status(answer), kind(answer)) == (413, "too_large")
        assert_serves(server)


def test_a_chunked_body_is_read(make_front: MakeFront) -> None:
    with served(make_front()) as server:
        response = httpx.post(f"{server.url}/generate", content=(GOOD[i : i + 7] for i in range(0, len(GOOD), 7)))
        assert response.status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 3000 + b"\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\n" + b"X-Many: y\r\n" * 300 + b"\r\n",
        b"POST /" + b"x" * 3000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 600 + b"\r\n",
    ],
    ids=["one long line", "many lines", "long path", "many empty lines"],
)
def test_a_long_head_is_refused(make_front: MakeFront, head: bytes) -> None:
    with served(make_front(limits=SMALL)) as server:
        answer = server.send(head)
        assert (status(answer), kind(answer)) == (431, "too_large")
        assert_serves(server)


def test_a_head_without_an_end_is_refused_while_it_comes(make_front: MakeFront) -> None:
    """A single header line that never ends: nothing of it is complete, and it must not be kept."""
    with served(make_front(limits=SMALL)) as server, server.connect() as sock:
        sock.sendall(b"GET /live HTTP/1.1\r\nX: ")
        with pytest.raises((BrokenPipeError, ConnectionResetError, TimeoutError)):
            for _ in range(10_000):
                sock.sendall(b"x" * 1000)
                time.sleep(0.001)
        assert_serves(server)


def test_a_slow_body_and_a_slow_head_are_given_up(make_front: MakeFront) -> None:
    with served(make_front(limits=SMALL)) as server:
        begun = time.monotonic()
        answer = server.send(post_bytes(b"{", length=100))
        assert (status(answer), kind(answer)) == (408, "timeout")
        answer = server.send(b"GET /live HTTP/1.1\r\nHost: loc")
        assert (status(answer), kind(answer)) == (408, "timeout")
        assert server.send(b"") == b""
        assert time.monotonic() - begun < 8

        def drip(sock: socket.socket) -> None:
            for _ in range(15):
                time.sleep(0.1)
                sock.sendall(b" ")

        assert status(server.send(post_bytes(b"{", length=1000), drip)) == 408
        assert_serves(server)


def test_a_body_that_nobody_reads_does_not_hold_the_connection(make_front: MakeFront) -> None:
    with served(make_front(api_key="key")) as server:
        begun = time.monotonic()
        assert status(server.send(post_bytes(b"{", length=100))) == 401
        assert time.monotonic() - begun < 5
        # One that comes in time leaves the connection to the next request.
        with httpx.Client(base_url=server.url, headers={"authorization": "Bearer key"}) as client:
            late = client.post("/generate", content=b" " * 300_000, headers={"authorization": "Bearer x"})
            assert late.status_code == 401 and late.headers["www-authenticate"] == "Bearer"
            time.sleep(1.5)
            assert client.post("/generate", content=GOOD).status_code == 200


async def _big(front: Front, request: Request) -> Response:
    return Response(b"x" * BIG)


def narrow(server: Served) -> socket.socket:
    """A connection with little room for what is not read yet, on which a big answer was asked for."""
    sock = socket.socket()
    sock.settimeout(20)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(b"GET /big HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    return sock


def test_an_answer_that_nobody_reads_is_given_up_and_a_slow_reader_is_not(make_front: MakeFront) -> None:
    routes = [Route("/big", ("GET",), "open", _big)]
    with served(make_front(limits={"write_s": 0.5}), routes) as server:
        with narrow(server) as sock:
            assert sock.recv(100)
            time.sleep(2.0)
            assert len(read_to_end(sock)) < BIG
        with narrow(server) as sock:
            found = b""
            for _ in range(20):
                found += sock.recv(1 << 14)
                time.sleep(0.1)
            found += read_to_end(sock)
            assert found.count(b"x", found.index(b"\r\n\r\n")) == BIG


def test_an_idle_connection_costs_no_answer(make_front: MakeFront) -> None:
    """Between two requests the deadline of a head does not run."""
    with served(make_front(limits=SMALL)) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/live").status_code == 200
        time.sleep(1.5)
        assert client.get("/live").status_code == 200


def test_a_request_longer_than_the_deadline_of_its_head_goes_on(make_front: MakeFront) -> None:
    front = make_front(limits={"read_s": 0.3})
    link = link_of(front)
    link.before_step = lambda: time.sleep(0.1 if link.engine.has_work else 0)
    with served(front) as server:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        assert httpx.post(f"{server.url}/generate", json=body, timeout=20).status_code == 200


def test_connections_beyond_the_limit_are_told_so(make_front: MakeFront) -> None:
    with served(make_front(limits={"connections": 4, "read_s": 1.0})) as server:
        idle = [server.connect() for _ in range(4)]
        wait_for(lambda: status(server.send(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")) == 503)
        answer = server.send(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kind(answer) == "busy" and b"retry-after: 1" in answer.lower()
        for sock in idle:
            sock.close()
        wait_for(lambda: httpx.get(f"{server.url}/live").status_code == 200)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x80\x04\x95\x20\x00\x00\x00",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /generate HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET http:// HTTP/1.1\r\n\r\n",
        b"GET /live HTTP/1.1\r\nUpgrade: websocket\r\nConnection: upgrade\r\nBad Header: x\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_harms_nobody(make_front: MakeFront, data: bytes) -> None:
    with served(make_front(limits={"read_s": 1.0})) as server:
        answer = server.send(data)
        assert status(answer) == 400, answer
        assert kind(answer) == "invalid_request"
        assert_serves(server)


def test_pipelined_requests_are_answered_in_order(make_front: MakeFront) -> None:
    with served(make_front()) as server:
        last = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = server.send(post_bytes(GOOD) + post_bytes(b"[") + last)
        lines = [line for line in answer.split(b"\r\n") if b"HTTP/1.1 " in line]
        assert [int(line.split(b" ")[-3 if b"Bad" in line or b"Not" in line else -2]) for line in lines] == [
            200,
            400,
            404,
        ]


def test_a_stopped_server_ends_its_requests_and_lets_the_port_go(make_front: MakeFront) -> None:
    front = make_front(drain_s=0.5)
    link = link_of(front)
    link.before_step = lambda: time.sleep(0.02 if link.engine.has_work else 0)
    answers: list[httpx.Response] = []
    with served(front) as server:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/generate", json=body, timeout=30))
        )
        asking.start()
        wait_for(lambda: link.num_open == 1)
        server.begin_to_stop()
        wait_for(lambda: front.is_draining)
        late = httpx.post(f"{server.url}/generate", content=GOOD, timeout=20)
        assert (late.status_code, late.json()["error"]["type"]) == (503, "draining")
        asking.join(20)
        port = server.port
    (answer,) = answers
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer.json()["output_ids"]
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))


def test_a_server_that_is_stopped_lets_short_requests_finish(make_front: MakeFront) -> None:
    front = make_front(drain_s=10.0)
    link = link_of(front)
    link.before_step = lambda: time.sleep(0.02 if link.engine.has_work else 0)
    answers: list[httpx.Response] = []
    with served(front) as server:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/generate", json=body, timeout=30))
        )
        asking.start()
        wait_for(lambda: link.num_open == 1)
        server.begin_to_stop()
        asking.join(20)
    assert answers[0].json()["meta_info"]["finish_reason"] == {"type": "length", "length": 30}


def test_a_raw_answer_is_whole(front: Front) -> None:
    with served(front) as server, server.connect() as sock:
        sock.sendall(post_bytes(GOOD, extra="Connection: close\r\n"))
        head, _, body = read_to_end(sock).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head.lower()
