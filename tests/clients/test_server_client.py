"""A client of a server gives what an engine in this process gives, whatever happens to the server on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.clients.small_server import Running, SmallServer
from unison.clients.http import ServerClient
from unison.config.schema import EngineConfig
from unison.core.errors import RequestError, ServerError
from unison.core.protocols import StreamingClient
from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta
from unison.core.sampling import SamplingParams
from unison.engine.build import build_engine
from unison.engine.engine import Engine

TinyModelDir = Callable[..., Path]
PROMPT = (5, 9, 2, 77, 31)
LONG = SamplingParams(max_new_tokens=24, seed=7, ignore_eos=True)


def make_engine(folder: Path) -> Engine:
    config = EngineConfig(kv_tokens=4096)
    return build_engine(str(folder), dtype="float32", numerics="exact", config=config)


@pytest.fixture(scope="module")
def server(tiny_model_dir: TinyModelDir) -> Iterator[SmallServer]:
    yield SmallServer(make_engine(tiny_model_dir()))


@pytest.fixture(scope="module")
def url(server: SmallServer) -> Iterator[str]:
    with Running(server) as running:
        yield running.url


@pytest.fixture(scope="module")
def reference(tiny_model_dir: TinyModelDir) -> Engine:
    return make_engine(tiny_model_dir())


@pytest.fixture(autouse=True)
def no_faults(server: SmallServer) -> Iterator[None]:
    yield
    server.faults.clear()


def request(name: str = "a/0", sampling: SamplingParams = LONG, **fields: Any) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling, **fields)


def alone(engine: Engine, asked: GenerationRequest) -> GenerationOutput:
    engine.add_request(asked)
    while True:
        for output in engine.step():
            return output


def over_http(url: str, *requests: GenerationRequest, **options: Any) -> list[GenerationOutput]:
    async def draw() -> list[GenerationOutput]:
        async with ServerClient(url, **options) as client:
            return await asyncio.gather(*map(client.generate, requests))

    return asyncio.run(draw())


def essence(output: GenerationOutput) -> GenerationOutput:
    """Without what says how the answer came about, and not what it is."""
    return replace(output, num_cached_tokens=0)


SETTINGS = {
    "plain": LONG,
    "greedy": SamplingParams(max_new_tokens=9, temperature=0.0, seed=1),
    "filters": SamplingParams(max_new_tokens=9, top_p=0.9, top_k=20, min_p=0.01, seed=2, logprobs="processed"),
    "penalties": SamplingParams(
        max_new_tokens=12, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=-0.25, seed=3, logprobs="raw"
    ),
    "bias and masks": SamplingParams(
        max_new_tokens=9, logit_bias={4: 2.5, 9: -1.0}, forbidden_token_ids=(5, 6), min_new_tokens=3, seed=4
    ),
    "allowed": SamplingParams(max_new_tokens=5, allowed_token_ids=(3, 4, 5), seed=5),
    "forced": SamplingParams(max_new_tokens=9, forced_ids=(8, 9), seed=6),
    "alternatives": SamplingParams(max_new_tokens=6, top_logprobs=4, logprob_token_ids=(1, 2, 3), seed=7),
    "prompt from its start": SamplingParams(max_new_tokens=3, prompt_logprobs_from=0, seed=8),
    "prompt from within": SamplingParams(max_new_tokens=3, prompt_logprobs_from=3, seed=9),
    "scoring alone": SamplingParams(max_new_tokens=0, prompt_logprobs_from=1, seed=10),
    "largest seed": SamplingParams(max_new_tokens=4, seed=(1 << 64) - 1),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_answer_over_http_is_the_one_of_an_engine_in_this_process(url: str, reference: Engine, name: str) -> None:
    asked = request(sampling=SETTINGS[name])
    (output,) = over_http(url, asked)
    assert essence(output) == essence(alone(reference, asked))


def test_a_resumed_request_is_sent_as_one(url: str, reference: Engine) -> None:
    whole = alone(reference, request())
    asked = request(output_ids=tuple(whole.token_ids[:10]), priority=0)
    (output,) = over_http(url, asked)
    assert output.token_ids == whole.token_ids[10:] and output.logprobs == whole.logprobs[10:]
    assert output.resumed_ids == asked.output_ids and output.text == whole.text


def test_without_a_seed_the_client_draws_one_and_reports_it(url: str, reference: Engine) -> None:
    (output,) = over_http(url, request(sampling=replace(LONG, seed=None)))
    again = alone(reference, request(sampling=replace(LONG, seed=output.seed)))
    assert again.token_ids == output.token_ids


@pytest.mark.parametrize(
    "faults", [["die after 5"], ["die after 0", "die after 3", "die after 1", "busy", "die after 8"]]
)
def test_an_answer_cut_short_by_a_dying_engine_comes_whole_and_to_the_bit(
    url: str, server: SmallServer, reference: Engine, faults: list[str]
) -> None:
    server.faults += faults
    asked = request(sampling=replace(LONG, top_logprobs=2))
    (output,) = over_http(url, asked)
    assert not server.faults
    assert essence(output) == essence(alone(reference, asked))


def test_names_of_requests_are_new_at_each_attempt(url: str, server: SmallServer) -> None:
    server.requests.clear()
    server.faults += ["die after 2", "die after 2"]
    over_http(url, request("row\n@0/1"))
    names = [body["rid"] for body in server.requests]
    assert len(set(names)) == 3 and all(name.startswith("row@0/1~") for name in names)


def test_many_requests_at_once_come_back_each_to_its_own(url: str, reference: Engine) -> None:
    asked = [request(f"g{i // 4}/{i % 4}", replace(LONG, seed=i, max_new_tokens=5)) for i in range(40)]
    for output, one in zip(over_http(url, *asked), asked, strict=True):
        assert essence(output) == essence(alone(reference, one))


def test_our_own_abort_comes_back_as_an_abort_with_what_there_is(url: str, reference: Engine) -> None:
    async def draw() -> GenerationOutput:
        async with ServerClient(url) as client:
            task = asyncio.create_task(client.generate(request(sampling=replace(LONG, max_new_tokens=480))))
            await asyncio.sleep(0.15)
            client.abort("someone else")
            client.abort()
            return await task

    output = asyncio.run(draw())
    assert output.finish_reason == "abort" and len(output.token_ids) < 480
    whole = alone(reference, request(sampling=replace(LONG, max_new_tokens=480)))
    assert whole.token_ids[: len(output.token_ids)] == output.token_ids
    assert output.resume("again").output_ids == tuple(output.token_ids)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_somebody_else_aborts_is_drawn_to_its_end(
    url: str, server: SmallServer, reference: Engine, is_streamed: bool
) -> None:
    asked = request(sampling=replace(LONG, max_new_tokens=120))

    async def draw() -> GenerationOutput | None:
        async with ServerClient(url) as client:
            if is_streamed:
                task = asyncio.create_task(_last_of(client, asked))
            else:
                task = asyncio.create_task(client.generate(asked))
            while not server.engine.has_work:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            server.client.abort()
            return await task

    server.requests.clear()
    output = asyncio.run(draw())
    assert output is not None and essence(output) == essence(alone(reference, asked))
    assert len(server.requests) == 2


async def _last_of(client: ServerClient, asked: GenerationRequest) -> GenerationOutput | None:
    return [delta async for delta in client.stream(asked)][-1].output


def test_an_abort_that_overtakes_its_request_still_ends_it(url: str) -> None:
    async def draw() -> GenerationOutput:
        async with ServerClient(url) as client:
            task = asyncio.create_task(client.generate(request(sampling=replace(LONG, max_new_tokens=480))))
            await asyncio.sleep(0)
            client.abort("a/0")
            return await task

    assert asyncio.run(draw()).finish_reason == "abort"


def test_cancelling_ends_the_request_on_the_server(url: str, server: SmallServer) -> None:
    async def cancel() -> None:
        async with ServerClient(url) as client:
            task = asyncio.create_task(client.generate(request(sampling=replace(LONG, max_new_tokens=480))))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(100):
                if not server.engine.has_work:
                    return
                await asyncio.sleep(0.02)
            raise AssertionError("the server still works on it")

    asyncio.run(cancel())


@pytest.mark.parametrize("faults", [[], ["break stream"]])
def test_deltas_join_to_the_whole_answer(url: str, server: SmallServer, reference: Engine, faults: list[str]) -> None:
    server.faults += faults

    async def draw() -> list[OutputDelta]:
        async with ServerClient(url) as client:
            assert isinstance(client, StreamingClient)
            return [delta async for delta in client.stream(request())]

    deltas = asyncio.run(draw())
    expected = alone(reference, request())
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
    assert [value for delta in deltas for value in delta.logprobs] == expected.logprobs
    assert "".join(delta.text for delta in deltas) == expected.text
    assert deltas[-1].output is not None and essence(deltas[-1].output) == essence(expected)
    assert all(delta.output is None for delta in deltas[:-1])


def test_what_the_contract_cannot_carry_is_refused_before_it_is_sent(url: str, server: SmallServer) -> None:
    server.requests.clear()
    with pytest.raises(RequestError, match=r"taps=\('final',\)"):
        over_http(url, request(sampling=replace(LONG, taps=("final",))))
    assert not server.requests


def test_a_request_that_cannot_be_served_says_why_and_is_not_tried_again(url: str, server: SmallServer) -> None:
    server.requests.clear()
    with pytest.raises(RequestError, match=r"request a/0: token id 1000000"):
        over_http(url, replace(request(), prompt_ids=(1, 10**6)))
    assert len(server.requests) == 1


def test_two_requests_of_one_name_are_refused(url: str) -> None:
    with pytest.raises(RequestError, match="in use"):
        over_http(url, request(), request())


def test_a_full_queue_is_waited_for_until_the_deadline(url: str, server: SmallServer) -> None:
    server.faults += ["busy"] * 3
    assert over_http(url, request())[0].finish_reason == "length"
    server.faults += ["busy"] * 1000
    with pytest.raises(ServerError, match=r"deadline.*queue is full"):
        over_http(url, request(), request_s=0.5)


def test_a_server_that_is_not_there_is_named_at_the_deadline() -> None:
    with pytest.raises(ServerError, match=r"deadline.*http://127\.0\.0\.1:9/generate cannot be reached"):
        over_http("http://127.0.0.1:9", request(), request_s=0.3)


def test_a_silent_server_is_given_up_at_the_deadline(url: str, server: SmallServer) -> None:
    server.faults += ["silence"]
    with pytest.raises(ServerError, match="did not answer within"):
        over_http(url, request(), request_s=0.4)


def test_an_answer_that_is_none_is_an_error(url: str, server: SmallServer) -> None:
    server.faults += ["garbage"]
    with pytest.raises(ServerError, match="no answer of /generate"):
        over_http(url, request())


def test_a_key_is_shown_and_a_wrong_one_is_named(tiny_model_dir: TinyModelDir) -> None:
    with Running(SmallServer(make_engine(tiny_model_dir()), key="right")) as running:
        assert over_http(running.url, request(), key="right")[0].finish_reason == "length"
        with pytest.raises(ServerError, match="refuses the key"):
            over_http(running.url, request(), key="wrong")
        with pytest.raises(ServerError, match="no key was given"):
            over_http(running.url, request())
