"""Coroutines that share an engine: each gets its own answer or its own error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engine.client_support import assert_settled, run, slow_steps, until
from tests.engine.support import answer_of, naive_answer, request
from unison.core.errors import CapacityError, RequestError
from unison.core.protocols import EngineClient
from unison.core.records import GenerationOutput
from unison.engine.client import InProcessClient


def test_it_is_an_engine_client(client: InProcessClient) -> None:
    assert isinstance(client, EngineClient)


def test_many_coroutines_each_get_their_own_answer(client: InProcessClient) -> None:
    requests = [request(f"r{i}", prompt=[i + 1] * (i % 7 + 1), seed=i, max_new_tokens=i % 5) for i in range(40)]

    async def late(i: int) -> GenerationOutput:
        await asyncio.sleep(0.001 * (i % 4))
        return await client.generate(requests[i])

    async def work() -> list[GenerationOutput]:
        return await asyncio.gather(*(late(i) for i in range(40)))

    outputs = run(work())
    for wanted, output in zip(requests, outputs, strict=True):
        assert output.request_id == wanted.request_id
        assert answer_of(output) == naive_answer(client.engine.model, wanted)
    assert client.engine.stats.max_batch_sequences > 1
    assert_settled(client)


def test_a_request_that_arrives_late_joins_the_running_ones(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(client.engine, monkeypatch, 0.005)

    async def work() -> tuple[GenerationOutput, GenerationOutput]:
        first = asyncio.create_task(client.generate(request("first", max_new_tokens=20)))
        await until(lambda: client.engine.stats.num_steps > 3)
        second = await client.generate(request("second", max_new_tokens=2))
        assert not first.done()
        return await first, second

    first, second = run(work())
    assert answer_of(first) == naive_answer(client.engine.model, request("n", max_new_tokens=20))
    assert answer_of(second) == naive_answer(client.engine.model, request("n", max_new_tokens=2))
    assert_settled(client)


def test_the_event_loop_stays_free_while_the_engine_steps(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(client.engine, monkeypatch, 0.05)

    async def work() -> int:
        task = asyncio.create_task(client.generate(request("r", max_new_tokens=4)))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.002)
            ticks += 1
        return ticks

    assert run(work()) > 12
    assert_settled(client)


def test_an_error_of_one_request_stays_with_it(client: InProcessClient) -> None:
    async def work() -> tuple[Any, ...]:
        return await asyncio.gather(
            client.generate(request("good")),
            client.generate(request("empty", prompt=[])),
            client.generate(request("large", prompt=[1] * 1500, max_new_tokens=500)),
            client.generate(request("several", n=2)),
            return_exceptions=True,
        )

    good, empty, large, several = run(work())
    assert answer_of(good) == naive_answer(client.engine.model, request("n"))
    assert isinstance(empty, RequestError) and "request empty" in str(empty)
    assert isinstance(large, CapacityError) and "request large" in str(large)
    assert isinstance(several, RequestError) and "request several" in str(several)
    assert_settled(client)


def test_with_bad_requests_only_the_driver_ends(client: InProcessClient) -> None:
    async def work() -> None:
        with pytest.raises(RequestError):
            await client.generate(request("bad", prompt=[]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert client._driver is not None and client._driver.done()

    run(work())
    assert_settled(client)


def test_an_id_in_use_is_refused_without_harm_to_its_owner(client: InProcessClient) -> None:
    async def work() -> tuple[GenerationOutput, Any]:
        first = asyncio.create_task(client.generate(request("twin")))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="'twin' is in use"):
            await client.generate(request("twin"))
        return await first, await client.generate(request("twin", seed=6))

    first, again = run(work())
    assert answer_of(first) == naive_answer(client.engine.model, request("n"))
    assert answer_of(again) == naive_answer(client.engine.model, request("n", seed=6))
    assert_settled(client)


def test_a_cancelled_coroutine_ends_its_request_alone(client: InProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(client.engine, monkeypatch, 0.005)

    async def work() -> GenerationOutput:
        doomed = asyncio.create_task(client.generate(request("doomed", max_new_tokens=500)))
        other = asyncio.create_task(client.generate(request("other", max_new_tokens=12)))
        await until(lambda: client.engine.stats.num_steps > 2)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        output = await other
        await until(lambda: not client.engine.has_work)
        return output

    output = run(work())
    assert answer_of(output) == naive_answer(client.engine.model, request("n", max_new_tokens=12))
    assert client.engine.stats.num_sampled_tokens < 60
    assert_settled(client)


@pytest.mark.parametrize("waits", [True, False])
def test_a_request_given_up_at_once_leaves_nothing(client: InProcessClient, waits: bool) -> None:
    tasks = []

    async def work() -> None:
        doomed = asyncio.create_task(client.generate(request("doomed", max_new_tokens=500)))
        await asyncio.sleep(0)
        if waits:
            doomed.cancel()
            await asyncio.gather(doomed, return_exceptions=True)
        else:  # the loop ends, and with it a driver that never ran
            tasks.append(doomed)

    asyncio.run(work())
    asyncio.run(work())
    assert client.engine.stats.num_sampled_tokens < 5
    assert run(client.generate(request("next"))).finish_reason == "length"
    assert_settled(client)


def test_a_deadline_ends_a_request(client: InProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(client.engine, monkeypatch)

    async def work() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.generate(request("slow", max_new_tokens=500)), timeout=0.1)

    run(work())
    assert_settled(client)


@pytest.mark.parametrize("request_id", ["a", None])
def test_abort_answers_with_what_there_is(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch, request_id: str | None
) -> None:
    slow_steps(client.engine, monkeypatch, 0.005)

    async def work() -> list[GenerationOutput]:
        tasks = [asyncio.create_task(client.generate(request(name, max_new_tokens=60))) for name in "ab"]
        await until(lambda: client.engine.stats.num_sampled_tokens > 4)
        client.abort("nobody")
        client.abort(request_id)
        client.abort(request_id)
        return await asyncio.gather(*tasks)

    first, second = run(work())
    tokens, logprobs = naive_answer(client.engine.model, request("n", max_new_tokens=60))
    assert first.finish_reason == "abort"
    assert second.finish_reason == ("abort" if request_id is None else "length")
    for output in (first, second):
        count = len(output.token_ids)
        assert count > 0 and answer_of(output) == (tokens[:count], logprobs[:count])
    assert_settled(client)


def test_abort_reaches_requests_that_are_not_yet_queued(client: InProcessClient) -> None:
    async def work() -> GenerationOutput:
        task = asyncio.create_task(client.generate(request("r")))
        await asyncio.sleep(0)
        client.abort()
        return await task

    output = run(work())
    assert (output.finish_reason, output.token_ids) == ("abort", [])
    assert_settled(client)
