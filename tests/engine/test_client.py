"""Coroutines that share an engine: each gets its own answer or its own error, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import torch

from tests.engine.support import answer_of, assert_idle, assert_works, make_engine, naive_answer, request
from unison.core.errors import CapacityError, EngineStateError, NonFiniteLogitsError, RequestError
from unison.core.protocols import EngineClient
from unison.core.records import GenerationOutput
from unison.engine.client import InProcessClient
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.models.names import published_tensors

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run with a deadline: a test that hangs fails."""

    async def within() -> T:
        return await asyncio.wait_for(work, timeout=60)

    return asyncio.run(within())


@pytest.fixture
def client(model: Decoder) -> InProcessClient:
    return InProcessClient(make_engine(model))


def slow_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch, pause_s: float = 0.02) -> None:
    step = engine.step

    def slow() -> list[GenerationOutput]:
        time.sleep(pause_s)
        return step()

    monkeypatch.setattr(engine, "step", slow)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def assert_settled(client: InProcessClient) -> None:
    """Nothing is open any more, and the client works."""
    assert_idle(client.engine)
    assert client._waiting == {} and client._incoming == []
    output = run(client.generate(request("after")))
    assert answer_of(output) == naive_answer(client.engine.model, request("n"))
    assert client._driver is not None and client._driver.done()
    assert_works(client.engine)


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
    async def work() -> list[Any]:
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


def test_a_failure_of_the_engine_reaches_everybody_and_frees_the_engine(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(chunks: Any) -> torch.Tensor:
        raise MemoryError("out of memory")

    async def work() -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(client.engine._runner, "run", broken)
            return await asyncio.gather(*(client.generate(request(f"r{i}")) for i in range(3)), return_exceptions=True)

    assert [type(result) for result in run(work())] == [MemoryError] * 3
    assert_settled(client)


def test_incomplete_weights_reach_everybody(own_model: Decoder) -> None:
    client = InProcessClient(Engine(own_model, path=make_engine(own_model).path, staging="in_place"))
    old = {name: tensor.clone() for name, tensor in published_tensors(own_model).items()}
    update = client.engine.begin_update(1)
    update.stage("model.norm.weight", old["model.norm.weight"])
    with pytest.raises(EngineStateError, match="weights are incomplete"):
        run(client.generate(request("r")))
    for name, tensor in old.items():
        if name != "model.norm.weight":
            update.stage(name, tensor)
    client.engine.commit_update(update)
    assert_settled(client)


def test_logits_of_nan_are_the_error_of_their_own_request(own_model: Decoder) -> None:
    good_request = request("good", [4, 5], max_new_tokens=6, seed=1)
    expected = naive_answer(own_model, good_request)
    own_model.embed.data[77] = float("nan")
    client = InProcessClient(make_engine(own_model))

    async def work() -> list[Any]:
        bad = (client.generate(request(name, [77])) for name in ("bad", "worse"))
        return await asyncio.gather(client.generate(good_request), *bad, return_exceptions=True)

    good, bad, worse = run(work())
    assert answer_of(good) == expected
    assert isinstance(bad, NonFiniteLogitsError) and isinstance(worse, NonFiniteLogitsError)
    assert "bad" in str(bad)
    assert_settled(client)


def test_one_client_serves_several_event_loops_in_turn(client: InProcessClient) -> None:
    for i in range(4):
        output = run(client.generate(request("same id", seed=i)))
        assert answer_of(output) == naive_answer(client.engine.model, request("n", seed=i))
    assert_settled(client)


def test_a_loop_that_ends_with_open_requests_takes_them_along(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(client.engine, monkeypatch, 0.01)
    tasks = []

    async def walk_away() -> None:
        tasks.append(asyncio.create_task(client.generate(request("left", max_new_tokens=500))))
        await until(lambda: client.engine.stats.num_steps > 1)

    for _ in range(2):
        run(walk_away())
    assert_settled(client)


def test_a_second_loop_is_refused_while_the_first_has_open_requests(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(client.engine, monkeypatch, 0.005)
    found: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(client.generate(request("foreign")))
        except EngineStateError as error:
            found.append(error)

    async def work() -> GenerationOutput:
        task = asyncio.create_task(client.generate(request("own", max_new_tokens=10)))
        await until(lambda: client.engine.has_work)
        await asyncio.to_thread(elsewhere)
        return await task

    assert answer_of(run(work())) == naive_answer(client.engine.model, request("n", max_new_tokens=10))
    assert "another event loop" in str(found[0])
    assert_settled(client)


def test_a_cancelled_driver_does_not_leave_anybody_waiting(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(client.engine, monkeypatch, 0.01)

    async def work() -> None:
        task = asyncio.create_task(client.generate(request("r", max_new_tokens=500)))
        await until(lambda: client.engine.stats.num_steps > 1)
        assert client._driver is not None
        client._driver.cancel()
        with pytest.raises(EngineStateError, match="was cancelled"):
            await task

    run(work())
    assert_settled(client)


def test_generate_of_the_engine_is_refused_while_the_client_has_work(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(client.engine, monkeypatch, 0.005)

    async def work() -> GenerationOutput:
        task = asyncio.create_task(client.generate(request("r", max_new_tokens=10)))
        await until(lambda: client.engine.stats.num_steps > 1)
        with pytest.raises(EngineStateError, match="while other requests run"):
            client.engine.generate([[1]])
        return await task

    assert answer_of(run(work())) == naive_answer(client.engine.model, request("n", max_new_tokens=10))
    assert_settled(client)


def test_a_client_waits_for_a_generate_that_runs_in_another_thread(client: InProcessClient) -> None:
    answers: list[GenerationOutput] = []

    def elsewhere() -> None:
        for _ in range(10):
            try:
                answers.append(client.engine.generate([[1, 2, 3]], request("n").sampling)[0][0])
            except EngineStateError:
                time.sleep(0.001)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    outputs = [run(client.generate(request(f"r{i}"))) for i in range(10)]
    thread.join()
    expected = naive_answer(client.engine.model, request("n"))
    assert all(answer_of(output) == expected for output in outputs + answers)
    assert_settled(client)


def test_two_clients_of_one_engine_are_told_so(model: Decoder) -> None:
    engine = make_engine(model)
    first, second = InProcessClient(engine), InProcessClient(engine)

    async def work() -> list[Any]:
        requests = [(first, "a", 9), (second, "b", 3), (first, "c", 2), (second, "d", 9)]
        return await asyncio.gather(
            *(client.generate(request(name, max_new_tokens=length)) for client, name, length in requests),
            return_exceptions=True,
        )

    results = run(work())
    errors = [result for result in results if isinstance(result, EngineStateError)]
    assert errors and all("one client" in str(error) for error in errors)
    assert_settled(first)
    assert_settled(second)


def test_answers_taken_by_somebody_else_are_missed_loudly(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(client.engine, monkeypatch, 0.005)

    async def work() -> None:
        task = asyncio.create_task(client.generate(request("r", max_new_tokens=30)))
        await until(lambda: client.engine.stats.num_steps > 1)
        client.engine.discard(["r"])
        with pytest.raises(EngineStateError, match="no longer knows 1 requests"):
            await task

    run(work())
    assert_settled(client)
