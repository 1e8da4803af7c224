"""The reward ``http`` against a server of this test."""

from __future__ import annotations

import contextlib
import email.utils
import gzip
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rewards.samples import finished
from unison.config.schema import RewardConfig
from unison.core.errors import RewardError
from unison.core.records import Sample
from unison.rewards import remote
from unison.rewards.base import load_reward
from unison.rewards.scoring import RewardReport, score

Reply = tuple[int, dict[str, str], bytes]
SECRET = "Bearer canary-of-the-test"


class Judge(http.server.ThreadingHTTPServer):
    """Answers with what ``reply`` makes of a request's JSON; keeps what came."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.reply: Callable[[Any], Reply] = lambda body: (200, {}, json.dumps({"score": len(body["text"])}).encode())
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/judge"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append(body)
        self.server.headers.append(dict(self.headers.items()))
        status, headers, data = self.server.reply(body)
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(data)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.01)
    server = Judge()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def graded(samples: list[Sample], isolation: Any = "none", **options: Any) -> RewardReport:
    reward = load_reward(RewardConfig(function="http", options=options, isolation=isolation))
    report = score(samples, reward)
    reward.close()
    return report


def error_of(judge: Judge, reply: Reply, **options: Any) -> str:
    judge.reply = lambda _: reply
    sample = finished("a")
    assert graded([sample], url=judge.url, **options).num_unscorable == 1
    assert sample.reward is None
    return sample.error or ""


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_each_sample_is_asked_about_and_gets_its_score(judge: Judge, isolation: Any) -> None:
    samples = [finished("x" * i) for i in range(20)]
    samples[3].metadata = {"label": 2**70, "prompt": [{"role": "user", "content": "é"}], "row_id": "r", "level": 3}
    assert graded(samples, isolation, url=judge.url).num_scored == 20
    assert [sample.reward for sample in samples] == [float(i) for i in range(20)]
    assert {
        "text": "xxx",
        "label": 2**70,
        "prompt": [{"role": "user", "content": "é"}],
        "metadata": {"row_id": "r", "level": 3},
    } in judge.seen


def test_a_batch_is_one_request_and_null_is_no_opinion(judge: Judge) -> None:
    def reply(body: Any) -> Reply:
        scores = [{"score": None if one["text"] == "none" else 0.5, "why": "extra"} for one in body]
        return 200, {}, json.dumps(scores).encode()

    judge.reply = reply
    samples = [finished("a"), finished("none"), finished("b")]
    graded(samples, url=judge.url, batch=True)
    assert [sample.reward for sample in samples] == [0.5, None, 0.5]
    assert [len(body) for body in judge.seen] == [3]
    assert "no opinion" in (samples[1].error or "")


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ((200, {}, b"{"), "answered what is no score"),
        ((200, {}, b'{"scor": 1}'), "missing required field `score`"),
        ((200, {}, b'{"score": "1"}'), "Expected `float | null`"),
        ((200, {}, b'{"score": true}'), "Expected `float | null`"),
        ((200, {}, b'{"score": NaN}'), "answered what is no score"),
        ((200, {}, b'{"score": 1e200}'), "at most 1e\\+100"),
        ((200, {}, b'[{"score": 1}]'), "Expected `object`"),
        ((200, {}, b"\xff\xfe"), "answered what is no score"),
        ((200, {}, b'{"score": 1, "x": "' + b"x" * (1 << 17) + b'"}'), "answered more than 65536 bytes"),
        ((404, {}, b""), "status 404"),
        ((302, {"location": "http://127.0.0.1:1/"}, b""), "status 302"),
        ((204, {}, b""), "status 204"),
    ],
)
def test_an_answer_that_is_no_score_makes_its_sample_unscorable(judge: Judge, reply: Reply, told: str) -> None:
    error = error_of(judge, reply)
    pytest.raises(AssertionError, match=told).matches(AssertionError(error))
    assert len(judge.seen) == 1, "tried again"


def test_a_list_of_the_wrong_length_is_one_error_and_then_each_sample_is_asked_about(judge: Judge) -> None:
    judge.reply = lambda _: (200, {}, b'[{"score": 1}]')
    samples = [finished("a"), finished("b")]
    report = graded(samples, url=judge.url, batch=True)
    assert "1 scores for 2 samples" in report.batch_errors[0]
    assert [sample.reward for sample in samples] == [1.0, 1.0]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again_within_bounds(judge: Judge, status: int) -> None:
    assert f"status {status}, 3 times in a row" in error_of(judge, (status, {}, b""), retries=2)
    assert len(judge.seen) == 3

    judge.seen.clear()
    judge.reply = lambda body: (status, {}, b"") if len(judge.seen) < 3 else (200, {}, b'{"score": 2}')
    sample = finished("a")
    graded([sample], url=judge.url)
    assert (sample.reward, len(judge.seen)) == (2.0, 3)


def test_nobody_there_is_said_after_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.01)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    sample = finished("a")
    graded([sample], url=url, retries=1)
    assert "cannot be reached (ConnectError), 2 times in a row" in (sample.error or "")


def test_a_server_that_does_not_answer_is_given_up(judge: Judge) -> None:
    def reply(body: Any) -> Reply:
        time.sleep(0.5)
        return 200, {}, b'{"score": 1}'

    judge.reply = reply
    sample = finished("a")
    graded([sample], url=judge.url, timeout_s=0.1)
    assert "gave no answer: ReadTimeout" in (sample.error or "")


def test_waits_double_are_spread_and_bounded_and_heed_the_server() -> None:
    for attempt, longest_s in [(0, 0.5), (1, 1.0), (3, 4.0), (50, 30.0)]:
        waits_s = {remote.wait_s(attempt, None) for _ in range(50)}
        assert len(waits_s) > 1 and longest_s / 2 <= min(waits_s) and max(waits_s) <= longest_s
    assert remote.wait_s(0, "7") == 7.0
    assert remote.wait_s(0, "86400") == 30.0
    assert 3 < remote.wait_s(0, email.utils.format_datetime(email.utils.localtime()).replace("x", "")) + 4 < 5
    assert remote.wait_s(0, email.utils.formatdate(time.time() + 9)) > 5
    for nonsense in ("", "soon", "-5", "1e9", "9" * 400):
        assert remote.wait_s(0, nonsense) <= 30.0


def test_the_secret_goes_to_the_server_and_nowhere_else(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    samples = [finished("a"), finished("b")]
    judge.reply = lambda body: (200, {}, b'{"score": 1}') if body["text"] == "a" else (403, {}, SECRET.encode())
    report = graded(samples, "process", url=judge.url, header_env="JUDGE_TOKEN")
    assert [headers["Authorization"] for headers in judge.headers] == [SECRET] * 2
    assert samples[0].reward == 1.0
    assert "canary" not in repr(report) + repr(samples)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "url"),
        ({"url": "ftp://x/"}, "http:// or https://"),
        ({"url": "file:///etc/passwd"}, "http:// or https://"),
        ({"url": "http:///x"}, "http:// or https://"),
        ({"url": "http://a:canary@x/"}, "use header_env"),
        ({"url": "http://x/", "retries": 1000}, "retries=1000"),
        ({"url": "http://x/", "timeout_s": 0}, "timeout_s=0"),
        ({"url": "http://x/", "header_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE, which is not set"),
        ({"url": "http://x/", "retry": 1}, "did you mean retries"),
    ],
)
@pytest.mark.parametrize("isolation", ["process", "none"])
def test_settings_that_cannot_work_are_refused_before_the_run(isolation: Any, options: Any, told: str) -> None:
    with pytest.raises(RewardError, match=told) as caught:
        load_reward(RewardConfig(function="http", options=options, isolation=isolation))
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("where", ["head", "body"])
def test_a_server_that_drips_or_inflates_its_answer_is_bounded(where: str) -> None:
    """One byte at a time keeps each read short of its limit; compressed, a little is very much."""
    body = gzip.compress(b" " * (64 << 20))
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body)

    def serve(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            peer.recv(1 << 16)
            if where == "head":
                peer.sendall(head + body)
                return
            peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            for _ in range(100):
                peer.sendall(b" ")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        sample = finished("a")
        began = time.monotonic()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert graded([sample], url=url, timeout_s=0.5, retries=0).num_unscorable == 1
        assert time.monotonic() - began < 3
        thread.join()
    assert ("no score" if where == "head" else "not answered in full") in (sample.error or "") or "65536" in (
        sample.error or ""
    )


def test_an_answer_nested_without_end_is_no_score(judge: Judge) -> None:
    deep = b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b',"score":1}'
    assert "what is no score" in error_of(judge, (200, {}, deep))
