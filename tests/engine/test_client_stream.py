"""Streams of the in-process client: many share an engine, and none is in another's way."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from tests.engine.client_support import assert_settled, run, slow_steps, until
from tests.engine.stream_support import assert_joined
from tests.engine.support import answer_of, make_engine, naive_answer, request
from unison.core.errors import CapacityError, EngineStateError, NonFiniteLogitsError, RequestError
from unison.core.protocols import StreamingClient
from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta
from unison.core.sampling import SamplingParams
from unison.engine.client import InProcessClient
from unison.models.decoder import Decoder


async def read(client: InProcessClient, wanted: GenerationRequest, pause_s: float = 0.0) -> list[OutputDelta]:
    deltas = []
    async for delta in client.stream(wanted):
        deltas.append(delta)
        await asyncio.sleep(pause_s)
    return deltas


def test_it_is_a_streaming_client(client: InProcessClient) -> None:
    assert isinstance(client, StreamingClient)


def test_streams_and_plain_requests_share_the_engine(client: InProcessClient) -> None:
    wanted = [request(f"r{i}", prompt=[i + 1] * (i % 7 + 1), seed=i, max_new_tokens=i % 9) for i in range(24)]

    async def work() -> tuple[list[list[OutputDelta]], list[GenerationOutput]]:
        streams = asyncio.gather(*(read(client, one) for one in wanted[::2]))
        plain = asyncio.gather(*(client.generate(one) for one in wanted[1::2]))
        return await streams, await plain

    streams, plain = run(work())
    for one, output in zip(wanted[1::2], plain, strict=True):
        assert answer_of(output) == naive_answer(client.engine.model, one)
    for one, deltas in zip(wanted[::2], streams, strict=True):
        whole = deltas[-1].output
        assert whole is not None and answer_of(whole) == naive_answer(client.engine.model, one)
        assert_joined(deltas, whole)
    assert client.engine.stats.max_batch_sequences > 1
    assert client._streams == {}
    assert_settled(client)


def test_tokens_come_as_they_are_made(client: InProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(client.engine, monkeypatch, 0.01)
    seen: list[int] = []

    async def work() -> None:
        async for delta in client.stream(request("r", max_new_tokens=6)):
            assert len(delta.token_ids) == 1
            seen.append(client.engine.stats.num_sampled_tokens)

    run(work())
    assert seen[:5] == [1, 2, 3, 4, 5]
    assert_settled(client)


def test_a_slow_consumer_gets_more_at_a_time_and_stops_nobody(client: InProcessClient) -> None:
    async def work() -> tuple[list[OutputDelta], GenerationOutput, bool]:
        slow = asyncio.create_task(read(client, request("slow", max_new_tokens=40), pause_s=0.3))
        plain = await client.generate(request("plain", max_new_tokens=40))
        early = not slow.done()
        return await slow, plain, early

    deltas, plain, early = run(work())
    assert early and len(deltas) < 8
    expected = naive_answer(client.engine.model, request("n", max_new_tokens=40))
    whole = deltas[-1].output
    assert whole is not None and answer_of(whole) == answer_of(plain) == expected
    assert_joined(deltas, whole)
    assert_settled(client)


@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "timeout"])
def test_a_stream_given_up_aborts_its_request_alone(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    slow_steps(client.engine, monkeypatch, 0.004)

    async def give_up() -> None:
        if how == "break":
            async for _ in client.stream(request("doomed", max_new_tokens=500)):
                break
        elif how == "aclose":
            async with contextlib.aclosing(client.stream(request("doomed", max_new_tokens=500))) as stream:
                await anext(stream)
        else:
            reading = asyncio.create_task(read(client, request("doomed", max_new_tokens=500)))
            if how == "timeout":
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reading, timeout=0.05)
            else:
                await until(lambda: client.engine.stats.num_steps > 2)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading

    async def work() -> list[OutputDelta]:
        other = asyncio.create_task(read(client, request("other", max_new_tokens=20)))
        await give_up()
        deltas = await other
        await until(lambda: not client.engine.has_work)
        return deltas

    deltas = run(work())
    whole = deltas[-1].output
    assert whole is not None and answer_of(whole) == naive_answer(client.engine.model, request("n", max_new_tokens=20))
    assert client.engine.stats.num_sampled_tokens < 80
    assert_settled(client)


def test_a_stream_given_up_before_its_first_step_leaves_nothing(client: InProcessClient) -> None:
    async def work() -> None:
        unread = client.stream(request("unread", max_new_tokens=500))
        reading = asyncio.create_task(read(client, request("r", max_new_tokens=500)))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await unread.aclose()
        await until(lambda: client._driver is not None and client._driver.done())

    run(work())
    assert client._streams == {}
    assert_settled(client)


@pytest.mark.parametrize("request_id", ["a", None])
def test_an_aborted_stream_ends_with_what_there_is(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch, request_id: str | None
) -> None:
    slow_steps(client.engine, monkeypatch, 0.004)

    async def work() -> list[OutputDelta]:
        reading = asyncio.create_task(read(client, request("a", max_new_tokens=500)))
        await until(lambda: client.engine.stats.num_sampled_tokens > 3)
        client.abort(request_id)
        return await reading

    deltas = run(work())
    output = deltas[-1].output
    assert output is not None and output.finish_reason == "abort"
    assert_joined(deltas, output)
    expected = naive_answer(client.engine.model, request("n", max_new_tokens=500), max_tokens=len(output.token_ids))
    assert answer_of(output) == expected
    assert_settled(client)


def test_an_error_is_raised_in_its_own_stream(own_model: Decoder) -> None:
    expected = naive_answer(own_model, request("n", [4, 5]))
    own_model.embed.data[77] = float("nan")
    client = InProcessClient(make_engine(own_model))

    async def work() -> tuple[Any, ...]:
        bad = (request("nan", [77]), request("empty", []), request("large", [1] * 1500, max_new_tokens=500))
        every = (request("good", [4, 5]), *bad, request("unknown", taps=("layer.99",)))
        return await asyncio.gather(*(read(client, one) for one in every), return_exceptions=True)

    good, nan, empty, large, unknown = run(work())
    assert answer_of(good[-1].output) == expected
    assert isinstance(nan, NonFiniteLogitsError) and [one.request_id for one in nan.outputs] == ["nan"]
    assert isinstance(empty, RequestError) and isinstance(large, CapacityError)
    assert isinstance(unknown, RequestError) and "layer.99" in str(unknown)
    assert client._streams == {}
    assert_settled(client)


def test_a_failing_engine_reaches_every_stream(client: InProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, calls = client.engine._runner.run, 0

    def broken(chunks: Any, plan: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("out of memory")
        return compute(chunks, plan)

    seen: list[OutputDelta] = []

    async def reads() -> None:
        async for delta in client.stream(request("r")):
            seen.append(delta)

    async def work() -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(client.engine._runner, "run", broken)
            return await asyncio.gather(reads(), client.generate(request("g")), return_exceptions=True)

    assert [type(result) for result in run(work())] == [MemoryError] * 2
    assert len(seen) == 2 and all(delta.output is None for delta in seen)
    assert_settled(client)


def test_a_cancelled_driver_reaches_every_stream(client: InProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(client.engine, monkeypatch, 0.01)

    async def work() -> None:
        reading = asyncio.create_task(read(client, request("r", max_new_tokens=500)))
        await until(lambda: client.engine.stats.num_steps > 1)
        assert client._driver is not None
        client._driver.cancel()
        with pytest.raises(EngineStateError, match="was cancelled"):
            await reading

    run(work())
    assert_settled(client)


def test_an_id_in_use_is_refused_to_a_stream(client: InProcessClient) -> None:
    async def work() -> tuple[list[OutputDelta], list[OutputDelta]]:
        first = asyncio.create_task(read(client, request("twin")))
        await asyncio.sleep(0)
        for again in (read(client, request("twin")), client.generate(request("twin"))):
            with pytest.raises(RequestError, match="'twin' is in use"):
                await again
        return await first, await read(client, request("twin", seed=6))

    for deltas, seed in zip(run(work()), (5, 6), strict=True):
        whole = deltas[-1].output
        assert whole is not None and answer_of(whole) == naive_answer(client.engine.model, request("n", seed=seed))
        assert_joined(deltas, whole)
    assert_settled(client)


def test_siblings_of_a_failed_answer_do_not_run_on(client: InProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(client.engine, monkeypatch, 0.004)
    add, failures = client.engine.add_request, 0

    def refuses_the_second(wanted: GenerationRequest) -> None:
        nonlocal failures
        if wanted.request_id.endswith("-2"):
            failures += 1
            raise CapacityError("no room")
        add(wanted)

    async def work() -> GenerationOutput:
        other = asyncio.create_task(client.generate(request("other", max_new_tokens=30)))
        with monkeypatch.context() as patch:
            patch.setattr(client.engine, "add_request", refuses_the_second)
            with pytest.raises(CapacityError):
                await client.sample([1, 2, 3], SamplingParams(n=3, max_new_tokens=400))
        return await other

    output = run(work())
    assert failures == 1
    assert answer_of(output) == naive_answer(client.engine.model, request("n", max_new_tokens=30))
    assert client.engine.stats.num_sampled_tokens < 60
    assert_settled(client)


def test_cancelling_a_call_for_several_answers_ends_them_all(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(client.engine, monkeypatch, 0.004)

    async def work() -> None:
        task = asyncio.create_task(client.sample([1, 2, 3], SamplingParams(n=3, max_new_tokens=400)))
        await until(lambda: client.engine.stats.num_steps > 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not client.engine.has_work)

    run(work())
    assert client.engine.stats.num_sampled_tokens < 60
    assert_settled(client)
