"""Whatever fails around a shared engine, nobody waits for ever and the engine is left usable."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from tests.engine.client_support import assert_settled, run, slow_steps, until
from tests.engine.support import answer_of, make_engine, naive_answer, request
from unison.core.errors import EngineStateError, NonFiniteLogitsError
from unison.core.records import GenerationOutput
from unison.engine.client import InProcessClient
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.models.names import published_tensors


def test_a_failure_of_the_engine_reaches_everybody_and_frees_the_engine(
    client: InProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(chunks: Any, plan: Any) -> torch.Tensor:
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
