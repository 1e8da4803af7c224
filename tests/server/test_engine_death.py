"""An engine process that dies or hangs costs time: everybody is answered, and the next one serves the same weights."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.conftest import TinyModelDir
from tests.server.serving import Served, assert_gone, descendants, serving
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.models.names import published_tensors
from unison.weights.arena import ArenaLayout
from unison.weights.outbox import Outbox

PROMPT = [5, 6, 7, 8]
LONG = 900


@pytest.fixture(scope="module")
def model(tiny_model_dir: TinyModelDir) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with serving(model, "--hang-s", "4") as served:
        yield served


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine.from_pretrained(model)


def expected(engine: Engine, seed: int, count: int) -> tuple[list[int], list[float]]:
    sampling = SamplingParams(max_new_tokens=count, seed=seed, ignore_eos=True)
    output = engine.generate([PROMPT], sampling)[0][0]
    return output.token_ids, output.logprobs


class Waiter(threading.Thread):
    """A client that waits for one long answer, streamed or not."""

    def __init__(self, url: str, seed: int, streamed: bool) -> None:
        super().__init__()
        self._url, self.seed, self._streamed = url, seed, streamed
        self.answer: Any = None
        self.status = 0
        self.began = threading.Event()
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        sampling = {"max_new_tokens": LONG, "sampling_seed": self.seed, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "stream": self._streamed}
        with httpx.stream("POST", f"{self._url}/generate", json=body, timeout=120) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                self.began.set()
                text = line.removeprefix("data: ")
                if text and text != "[DONE]":
                    self.answer = json.loads(text)
        self.ended_at = time.monotonic()


def start_waiters(server: Served, count: int = 4) -> list[Waiter]:
    waiters = [Waiter(server.url, seed, streamed=seed % 2 == 0) for seed in range(count)]
    assert waiters[0].began.wait(60)
    time.sleep(0.3)
    return waiters


def assert_answered_with_what_was_sampled(waiters: list[Waiter], engine: Engine) -> None:
    for waiter in waiters:
        waiter.join(30)
        info = waiter.answer["meta_info"]
        assert waiter.status == 200
        assert info["finish_reason"]["type"] == "abort"
        assert info["finish_reason"]["err_type"] == "EngineDied"
        count = len(waiter.answer["output_ids"])
        assert 0 < count < LONG
        ids, logprobs = expected(engine, waiter.seed, count)
        assert waiter.answer["output_ids"] == ids
        assert [entry[0] for entry in info["output_token_logprobs"]] == logprobs


def test_a_killed_engine_is_seen_at_once_answered_for_and_replaced(server: Served, engine: Engine) -> None:
    waiters = start_waiters(server)
    pid = server.engine_pid
    killed_at = time.monotonic()
    num_restarts = server.strike_engine()
    for waiter in waiters:
        waiter.join(30)
    assert server.get("/health")[0] == 503
    status, refusal = server.post("/generate", input_ids=PROMPT)
    assert (status, refusal["error"]["type"]) == (503, "restarting")
    assert max(waiter.ended_at for waiter in waiters) - killed_at < 2
    assert_answered_with_what_was_sampled(waiters, engine)
    server.wait_for_restart(num_restarts)
    assert server.get("/health")[0] == 200
    assert server.engine_pid != pid
    ids, logprobs = expected(engine, 11, 16)
    answer = server.generate(PROMPT, seed=11, max_new_tokens=16)
    assert answer["output_ids"] == ids
    assert [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] == logprobs


def test_a_hanging_engine_is_killed_answered_for_and_replaced(server: Served, engine: Engine) -> None:
    waiters = start_waiters(server, 2)
    num_restarts = server.strike_engine(signal.SIGSTOP)
    assert_answered_with_what_was_sampled(waiters, engine)
    server.wait_for_restart(num_restarts)
    assert server.generate(PROMPT, seed=3)["output_ids"] == expected(engine, 3, 8)[0]


def push(server: Served, engine: Engine, version: int, scale: float) -> str:
    """Publish the engine's weights, scaled, as ``version``; their checksum."""
    layout = ArenaLayout.of(engine.model.spec, engine.model.dtype)
    outbox = Outbox(layout)
    try:
        tensors = {name: tensor.float() * scale for name, tensor in published_tensors(engine.model).items()}
        filled = outbox.fill(tensors)
        handle = {
            "type": "memfd",
            "pid": filled.handle.pid,
            "fd": filled.handle.fd,
            "num_bytes": filled.handle.num_bytes,
        }
        entries = [
            {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "offset": e.offset}
            for e in filled.layout.entries
        ]
        server.ask("/weights/begin", version=version, label=str(version))
        server.ask(
            "/weights/stage",
            version=version,
            transport="handles",
            handle=handle,
            layout={"entries": entries, "num_bytes": filled.layout.num_bytes},
        )
        checksum = outbox.checksum(tensors)
        assert server.ask("/weights/prepare", version=version, checksum=checksum)["checksum"] == checksum
        assert server.ask("/weights/commit", version=version)["checksum"] == checksum
        return checksum
    finally:
        outbox.close()


def test_the_next_engine_serves_the_version_committed_last(server: Served, engine: Engine) -> None:
    checksum = push(server, engine, 7, scale=0.5)
    before = server.generate(PROMPT, seed=5)
    server.wait_for_restart(server.strike_engine())
    status = server.get("/weights/status")[1]
    assert (status["version"], status["label"], status["checksum"]) == (7, "7", checksum)
    after = server.generate(PROMPT, seed=5)
    assert after["meta_info"]["weight_version"] == "7"
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["output_token_logprobs"] == before["meta_info"]["output_token_logprobs"]
    push(server, engine, 8, scale=1.0)
    assert server.generate(PROMPT, seed=5)["output_ids"] == expected(engine, 5, 8)[0]


def test_a_pause_outlives_the_engine(server: Served, engine: Engine) -> None:
    server.ask("/pause_generation", mode="retract")
    server.wait_for_restart(server.strike_engine(), "paused")
    asked = threading.Thread(target=server.generate, args=(PROMPT,))
    asked.start()
    asked.join(0.5)
    assert asked.is_alive()
    server.ask("/continue_generation")
    asked.join(30)
    assert not asked.is_alive()


def test_weights_that_died_with_an_in_place_engine_are_not_sampled_from(model: Path, engine: Engine) -> None:
    with serving(model, "--staging", "in_place") as server:
        server.wait_for_restart(server.strike_engine())  # the folder's weights were never replaced
        assert server.generate(PROMPT, seed=5)["output_ids"] == expected(engine, 5, 8)[0]
        push(server, engine, 3, scale=1.0)
        server.wait_for_restart(server.strike_engine(), "weights_invalid")
        status, refusal = server.post("/generate", input_ids=PROMPT)
        assert (status, refusal["error"]["type"]) == (503, "weights_invalid")
        assert server.get("/live")[0] == 200
        push(server, engine, 4, scale=1.0)
        assert server.generate(PROMPT, seed=5)["output_ids"] == expected(engine, 5, 8)[0]


@pytest.mark.slow
def test_an_engine_killed_at_a_commit_leaves_one_version_or_the_other(model: Path, engine: Engine) -> None:
    for point, version in (("server.staged", "default"), ("server.prepared", "default")):
        with serving(model, env={"UNISON_FAULT": f"{point}:1:kill"}) as server:
            with pytest.raises(AssertionError):
                push(server, engine, 2, scale=0.5)
            server.wait_for_restart(0)
            answer = server.generate(PROMPT, seed=5)
            assert answer["meta_info"]["weight_version"] == version
            assert answer["output_ids"] == expected(engine, 5, 8)[0]


@pytest.mark.slow
def test_a_commit_that_fails_after_the_swap_leaves_the_version_that_the_front_end_knows(
    model: Path, engine: Engine
) -> None:
    with serving(model, env={"UNISON_FAULT": "server.committed:1:raise"}) as server:
        with pytest.raises(AssertionError):
            push(server, engine, 2, scale=0.5)
        server.wait_for_restart(0)
        answer = server.generate(PROMPT, seed=5)
        assert answer["meta_info"]["weight_version"] == "default"
        assert answer["output_ids"] == expected(engine, 5, 8)[0]


def test_a_killed_front_end_takes_its_engine_along(model: Path) -> None:
    with serving(model) as server:
        family = descendants(server.process.pid)
        assert family
        os.kill(server.process.pid, signal.SIGKILL)
        assert_gone(family)


def test_a_terminated_server_lets_what_runs_end(model: Path, engine: Engine) -> None:
    with serving(model) as server:
        waiter = Waiter(server.url, 2, streamed=True)
        assert waiter.began.wait(60)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        status, refusal = server.post("/generate", input_ids=PROMPT)
        assert (status, refusal["error"]["type"]) == (503, "draining")
        waiter.join(60)
        assert waiter.answer["meta_info"]["finish_reason"] == {"type": "length", "length": LONG}
        assert waiter.answer["output_ids"] == expected(engine, 2, LONG)[0]
        assert server.process.wait(20) == 0


@pytest.mark.slow
def test_a_terminated_server_ends_what_takes_too_long_with_what_it_has(model: Path, engine: Engine) -> None:
    with serving(model, "--drain-s", "0.2") as server:
        waiter = Waiter(server.url, 2, streamed=False)
        time.sleep(1.0)
        server.process.send_signal(signal.SIGTERM)
        waiter.join(30)
        count = len(waiter.answer["output_ids"])
        assert waiter.answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert waiter.answer["output_ids"] == expected(engine, 2, count)[0]
        assert server.process.wait(20) == 0


def test_steps_that_fail_fail_their_requests_alone(model: Path, engine: Engine) -> None:
    with serving(model, env={"UNISON_FAULT": "server.engine_step:2:raise"}) as server:
        status, refusal = server.post("/generate", input_ids=PROMPT, sampling_params={"max_new_tokens": 4})
        assert status == 500
        assert refusal["error"]["type"] == "internal"
        assert "FaultError" in refusal["error"]["message"]
        assert server.generate(PROMPT, seed=5)["output_ids"] == expected(engine, 5, 8)[0]


def test_torch_is_on_one_thread_as_asked(server: Served) -> None:
    assert server.get("/server_info")[1]["engine_threads"] == 1
    assert torch.get_num_threads() == 1
