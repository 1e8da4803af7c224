"""The client against ``unison serve`` itself: every setting comes back as from an engine in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clients.test_server_client import LONG, SETTINGS, alone, essence, make_engine, request
from tests.run.served import engines
from unison.clients.http import ServerClient
from unison.clients.launch import Launch, ServerProcess
from unison.config.schema import EngineConfig
from unison.core.errors import RequestError
from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta
from unison.engine.engine import Engine

TinyModelDir = Callable[..., Path]
pytestmark = pytest.mark.slow
FOREVER = replace(LONG, max_new_tokens=480)


@pytest.fixture(scope="module")
def process(tiny_model_dir: TinyModelDir) -> Iterator[ServerProcess]:
    launch = Launch(
        model=tiny_model_dir(),
        dtype="float32",
        numerics="exact",
        engine=EngineConfig(kv_tokens=4096),
        staging="shadow",
        threads=1,
        start_s=120.0,
        update_s=120.0,
    )
    process = ServerProcess(launch)
    try:
        asyncio.run(process.start())
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def reference(tiny_model_dir: TinyModelDir) -> Engine:
    return make_engine(tiny_model_dir())


def over_http(process: ServerProcess, *requests: GenerationRequest) -> list[GenerationOutput]:
    async def draw() -> list[GenerationOutput]:
        async with ServerClient(process.url, key=process.key, request_s=60.0) as client:
            return await asyncio.gather(*map(client.generate, requests))

    return asyncio.run(draw())


@pytest.mark.parametrize("name", SETTINGS)
def test_an_answer_is_the_one_of_an_engine_in_this_process(
    process: ServerProcess, reference: Engine, name: str
) -> None:
    asked = request(sampling=SETTINGS[name])
    (output,) = over_http(process, asked)
    assert essence(output) == essence(alone(reference, asked))


def test_stop_strings_and_stop_ids_end_an_answer_as_they_do_here(process: ServerProcess, reference: Engine) -> None:
    free = alone(reference, request())
    by_id = request("id", replace(LONG, stop_token_ids=(free.token_ids[5],)))
    by_text = request("text", replace(LONG, stop=(free.text[3:5],)))
    for output, asked in zip(over_http(process, by_id, by_text), (by_id, by_text), strict=True):
        assert output.finish_reason == "stop"
        assert essence(output) == essence(alone(reference, asked))


def test_a_resumed_request_goes_on_as_it_does_here(process: ServerProcess, reference: Engine) -> None:
    whole = alone(reference, request())
    asked = request(output_ids=tuple(whole.token_ids[:10]))
    (output,) = over_http(process, asked)
    assert essence(output) == essence(alone(reference, asked))


def test_streamed_deltas_join_to_the_whole_answer(process: ServerProcess, reference: Engine) -> None:
    async def draw() -> list[OutputDelta]:
        asked = request(sampling=replace(LONG, top_logprobs=2))
        async with (
            ServerClient(process.url, key=process.key) as client,
            aclosing(client.stream(asked)) as deltas,
        ):
            return [delta async for delta in deltas]

    deltas = asyncio.run(draw())
    expected = alone(reference, request(sampling=replace(LONG, top_logprobs=2)))
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
    assert [row for delta in deltas for row in delta.top_logprobs] == expected.top_logprobs
    assert "".join(delta.text for delta in deltas) == expected.text
    assert deltas[-1].output is not None and essence(deltas[-1].output) == essence(expected)


def test_aborts_come_back_with_what_there_is(process: ServerProcess, reference: Engine) -> None:
    async def draw() -> list[GenerationOutput]:
        async with ServerClient(process.url, key=process.key) as client:
            tasks = [asyncio.create_task(client.generate(request(f"a/{i}", FOREVER))) for i in range(3)]
            await asyncio.sleep(0.3)
            client.abort()
            return await asyncio.gather(*tasks)

    whole = alone(reference, request(sampling=FOREVER))
    for output in asyncio.run(draw()):
        assert output.finish_reason == "abort"
        assert whole.token_ids[: len(output.token_ids)] == output.token_ids


def test_a_bad_request_is_told_by_its_own_name(process: ServerProcess) -> None:
    with pytest.raises(RequestError, match="1000000"):
        over_http(process, replace(request(), prompt_ids=(1, 10**6)))


def test_answers_go_on_over_a_killed_engine_to_the_bit(process: ServerProcess, reference: Engine) -> None:
    asked = [request(f"g/{i}", replace(FOREVER, seed=i)) for i in range(4)]

    async def draw() -> list[GenerationOutput]:
        async with ServerClient(process.url, key=process.key, request_s=120.0) as client:
            tasks = [asyncio.create_task(client.generate(one)) for one in asked]
            await asyncio.sleep(0.4)
            (engine,) = engines()
            os.kill(engine, signal.SIGKILL)
            return await asyncio.gather(*tasks)

    started = time.monotonic()
    for output, one in zip(asyncio.run(draw()), asked, strict=True):
        assert essence(output) == essence(alone(reference, one))
    assert time.monotonic() - started < 100
