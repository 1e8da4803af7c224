"""An HTTP server on loopback that answers as it is told, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]
"""(path, body) -> (status, payload); a payload of bytes is sent as it is, all else as JSON."""


class FakeServer:
    def __init__(self, answer: Answer) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.loads(data) if data else {}
                fake.asked.append((self.path, body))
                status, payload = answer(self.path, body)
                content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        # Clients that left while they waited are what some tests are about.
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.asked if asked == path]


@contextmanager
def serving(answer: Answer) -> Iterator[FakeServer]:
    fake = FakeServer(answer)
    thread = threading.Thread(target=fake._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake._server.shutdown()
        fake._server.server_close()
        thread.join()


def sglang(path: str, body: dict[str, Any], *, missing: int = 0) -> tuple[int, Any]:
    """As SGLang answers; each sample lacks ``missing`` of its tokens."""
    if path == "/flush_cache":
        return 200, b"Cache flushed."
    settings = body["sampling_params"]
    count = settings["max_new_tokens"] - missing
    samples = [
        {
            "text": "x",
            "output_ids": [100 + i for i in range(count)],
            "meta_info": {"completion_tokens": count, "cached_tokens": 2, "prompt_tokens": len(body["input_ids"])},
        }
        for _ in range(settings["n"])
    ]
    return 200, samples if settings["n"] > 1 else samples[0]


def openai(path: str, body: dict[str, Any], *, with_ids: bool = True) -> tuple[int, Any]:
    """As an OpenAI completions server answers, with vLLM's token ids where asked for."""
    count = body["max_tokens"]
    choice: dict[str, Any] = {"text": "x", "finish_reason": "length"}
    if with_ids and body["return_token_ids"]:
        choice["token_ids"] = [100 + i for i in range(count)]
    usage = {"completion_tokens": count * body["n"], "prompt_tokens": len(body["prompt"])}
    return 200, {"choices": [choice] * body["n"], "usage": usage}
