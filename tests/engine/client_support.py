"""What the tests of the in-process client share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from tests.engine.support import answer_of, assert_idle, assert_works, naive_answer, request
from unison.core.records import GenerationOutput
from unison.engine.client import InProcessClient
from unison.engine.engine import Engine

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run with a deadline: a test that hangs fails."""

    async def within() -> T:
        return await asyncio.wait_for(work, timeout=60)

    return asyncio.run(within())


def slow_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch, pause_s: float = 0.02) -> None:
    step = engine.step

    def slow() -> list[GenerationOutput]:
        time.sleep(pause_s)
        return step()

    monkeypatch.setattr(engine, "step", slow)


async def until(condition: Callable[[], bool]) -> None:
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
