"""Answers a workload by asking an HTTP server; one thread for each conversation under way."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from urllib.parse import urlsplit

from unison.bench.http_api import HttpAnswer, HttpApi, Malformed
from unison.bench.measure import Answer, Meter, Repeat
from unison.bench.workload import Conversation, Workload
from unison.core.errors import ConfigError, ServerError

_WARM_UP_TOKENS = 8
_SHOWN_BYTES = 300


class HttpTarget:
    """A server at ``url`` (scheme, host, port, perhaps a path before the API's own).

    Each of a conversation's turns is one request for all its samples. ``timeout_s`` is how long the
    server may stay silent.
    """

    def __init__(
        self, url: str, api: HttpApi, model: str, *, timeout_s: float = 600.0, concurrency: int | None = None
    ) -> None:
        self._url = url
        self._scheme, self._host, self._port, self._base = _split(url)
        self._api = api
        self._model = model
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._connections: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._note: str | None = None

    def describe(self) -> dict[str, str | int]:
        description: dict[str, str | int] = {"target": self._url, "api": self._api.name, "model": self._model}
        return description if self._note is None else {**description, "note": self._note}

    def warm_up(self, workload: Workload) -> None:
        conversation = workload.conversations[0]
        prompt = conversation.turns[0].new_ids[:_WARM_UP_TOKENS]
        sampling = replace(conversation.sampling, n=1, max_new_tokens=4)
        self._request("the warm-up", self._api.path, self._api.body(self._model, prompt, sampling))

    def run(self, workload: Workload) -> Repeat:
        self._stopped = False
        self._flush()
        count = len(workload.conversations)
        executor = ThreadPoolExecutor(min(self._concurrency or count, count), thread_name_prefix="unison-bench")
        try:
            with Meter() as meter:
                futures = [executor.submit(self._talk, one) for one in workload.conversations]
                wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done() and (error := future.exception()) is not None:
                    raise error
        finally:
            self._stop()
            executor.shutdown(cancel_futures=True)
        return Repeat(wall_s=meter.wall_s, answers=tuple(answer for one in futures for answer in one.result()))

    def _talk(self, conversation: Conversation) -> list[Answer]:
        history: list[int] = []
        answers = []
        for k, turn in enumerate(conversation.turns):
            history += turn.new_ids
            name = f"{conversation.name} turn {k}" if len(conversation.turns) > 1 else conversation.name
            sampling = replace(conversation.sampling, max_new_tokens=turn.max_new_tokens)
            body = self._api.body(self._model, history, sampling)
            asked_at = time.perf_counter()
            answer = self._read(name, self._request(name, self._api.path, body), sampling.n)
            answers.append(
                Answer(
                    name=name,
                    num_tokens=answer.num_tokens,
                    wanted_tokens=turn.max_new_tokens * sampling.n,
                    may_end_early=not sampling.ignore_eos,
                    latency_s=time.perf_counter() - asked_at,
                    cached_tokens=answer.cached_tokens,
                )
            )
            if k + 1 < len(conversation.turns):
                history += self._said(name, answer)
        return answers

    def _said(self, name: str, answer: HttpAnswer) -> list[int]:
        if answer.token_ids is None:
            raise ServerError(
                f"{name}: the server's answer holds no token ids, and the next turn has to repeat them; use an API "
                "that gives them (sglang), or a workload of single requests"
            )
        return answer.token_ids

    def _read(self, name: str, data: bytes, num_samples: int) -> HttpAnswer:
        try:
            return self._api.read(json.loads(data), num_samples)
        except ValueError as error:
            raise ServerError(f"{name}: {self._url} answered what is not JSON: {_shown(data)}") from error
        except Malformed as error:
            raise ServerError(
                f"{name}: {self._url} does not answer as {self._api.name} does: it sent {error}: {_shown(data)}"
            ) from error

    def _flush(self) -> None:
        """Empty the server's prefix cache; where it cannot be done, a note says so."""
        note = "the server's prefix cache was not emptied between repeats"
        if self._api.flush_path is None:
            note += f": the {self._api.name} API has no call for it"
        else:
            try:
                self._request("emptying the prefix cache", self._api.flush_path, None)
                return
            except _Refused as error:
                note += f": {error}"
        self._note = note

    def _request(self, name: str, path: str, body: dict[str, object] | None) -> bytes:
        """The body of an answer with status 200. Raises ServerError for all else."""
        data = b"" if body is None else json.dumps(body).encode()
        try:
            with self._connection() as connection:
                connection.request("POST", self._base + path, data, {"Content-Type": "application/json"})
                response = connection.getresponse()
                answer = response.read()
        except TimeoutError as error:
            raise ServerError(
                f"{name}: {self._url} was silent for {self._timeout_s:g} s; give it longer with --timeout"
            ) from error
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise ServerError(f"{name}: {self._url} cannot be asked: {error or type(error).__name__}") from error
        if response.status != 200:
            raise _Refused(f"{name}: {self._url}{path} answered {response.status}: {_shown(answer)}")
        return answer

    @contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        kind = http.client.HTTPSConnection if self._scheme == "https" else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.connect()
            with self._lock:
                if self._stopped:
                    raise ServerError("the run has ended already")
                self._connections.add(connection)
            yield connection
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _stop(self) -> None:
        """Wake the threads that still wait for an answer nobody wants any more."""
        with self._lock:
            self._stopped = True
            for connection in self._connections:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)


class _Refused(ServerError):
    """The server answered, but not with 200."""


def _split(url: str) -> tuple[str, str, int | None, str]:
    """(scheme, host, port, path before the API's own). Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"url={url!r} cannot be read: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url={url!r} must be like http://127.0.0.1:8000")
    if parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"url={url!r} must hold no user, query or fragment; give scheme, host, port and path only")
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/")


def _shown(data: bytes) -> str:
    text = data[:_SHOWN_BYTES].decode("utf-8", errors="replace")
    return repr(text) + (" ..." if len(data) > _SHOWN_BYTES else "")
