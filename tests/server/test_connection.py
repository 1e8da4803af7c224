"""The front end's link, over engine processes that are only talked about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.server.fake_link import INFO
from unison.config.schema import EngineConfig
from unison.core.records import GenerationOutput, GenerationRequest
from unison.core.sampling import SamplingParams
from unison.processes.channel import frame
from unison.processes.shared_memory import MemfdHandle
from unison.server import connection
from unison.server.child import EngineChild
from unison.server.connection import EngineConnection
from unison.server.link import CommandFailed
from unison.server.messages import (
    Abort,
    Beat,
    Command,
    CommitUpdate,
    Ended,
    NotStarted,
    Progress,
    Ready,
    Reply,
    Setup,
    StageHandle,
    Submit,
)

REQUEST = GenerationRequest(request_id="a", prompt_ids=(1, 2), sampling=SamplingParams(max_new_tokens=0))


class Child:
    """Says what it is told to, and ends when None is put."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pid = 1
        self.said: asyncio.Queue[list[Any] | None] = asyncio.Queue()
        self.heard: list[Any] = []
        self.silence_s = 0.0

    def send(self, messages: list[Any]) -> None:
        frame(messages)
        self.heard += messages

    async def receive(self) -> list[Any] | None:
        return await self.said.get()

    def say(self, *messages: Any) -> None:
        self.said.put_nowait(list(messages))

    def kill(self, why: str | None = None) -> None:
        self.said.put_nowait(None)

    async def bury(self, patience_s: float = 0.2) -> str:
        return "was killed"

    def last(self, kind: type[Any]) -> Any:
        return [message for message in self.heard if isinstance(message, kind)][-1]


class Children:
    """Those that were started; ``starts`` says what each begins with, the last one for all further ones."""

    def __init__(self, *starts: Any) -> None:
        self.starts = list(starts)
        self.all: list[Child] = []

    async def start(self, setup: Setup) -> Child:
        child = Child(setup)
        first = self.starts.pop(0) if len(self.starts) > 1 else self.starts[0]
        child.said.put_nowait(None if first is None else [first])
        self.all.append(child)
        return child


READY = Ready(INFO, 0)
Scenario = Callable[[EngineConnection, Children, list[str]], Coroutine[Any, Any, None]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(scenario: Scenario, *starts: Any) -> None:
        children = Children(*(starts or (READY,)))
        monkeypatch.setattr(EngineChild, "start", children.start)
        monkeypatch.setattr(connection, "_RETRY_S", 0.01)
        setup = Setup(
            model="m",
            dtype="auto",
            numerics="auto",
            engine=EngineConfig(),
            staging="shadow",
            threads=1,
            segments=(3, 4),
        )

        async def go() -> None:
            dead: list[str] = []
            link = EngineConnection(setup, start_s=5, hang_s=60, on_dead=dead.append)
            await link.start()
            try:
                await scenario(link, children, dead)
            finally:
                await link.close()

        asyncio.run(asyncio.wait_for(go(), 20))

    return run


async def until(found: Callable[[], Any]) -> None:
    end = time.monotonic() + 5
    while not found():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def output(reason: Any, *tokens: int) -> GenerationOutput:
    return GenerationOutput(
        request_id="a",
        prompt_ids=(1, 2),
        token_ids=list(tokens),
        logprobs=[-1.0] * len(tokens),
        text="",
        finish_reason=reason,
        matched_stop=None,
        seed=0,
        weight_versions=[],
        kv_versions=[],
        sampling=SamplingParams(),
    )


def test_a_process_that_dies_while_it_starts_anew_is_replaced_like_any_other(play: Callable[..., None]) -> None:
    async def scenario(link: EngineConnection, children: Children, dead: list[str]) -> None:
        children.all[0].said.put_nowait(None)
        await until(lambda: link.num_restarts == 1)
        assert link.state == "running" and not dead
        assert len(children.all) == 4

    play(scenario, READY, None, None, READY)


def test_processes_that_keep_dying_while_they_start_end_the_server(play: Callable[..., None]) -> None:
    async def scenario(link: EngineConnection, children: Children, dead: list[str]) -> None:
        children.all[0].said.put_nowait(None)
        await until(lambda: dead)
        assert "died 6 times" in dead[0]
        assert link.state == "dead" and len(children.all) == 6

    play(scenario, READY, None)


def test_a_process_that_says_why_it_cannot_start_is_not_tried_again(play: Callable[..., None]) -> None:
    async def scenario(link: EngineConnection, children: Children, dead: list[str]) -> None:
        children.all[0].said.put_nowait(None)
        await until(lambda: dead)
        assert dead == ["no model there"] and len(children.all) == 2

    play(scenario, READY, NotStarted("no model there"))


def test_weights_that_changed_while_nobody_served_them_are_not_served(play: Callable[..., None]) -> None:
    async def scenario(link: EngineConnection, children: Children, dead: list[str]) -> None:
        children.all[0].said.put_nowait(None)
        await until(lambda: link.num_restarts == 1)
        assert [child.setup.weights_lost for child in children.all] == [False, False, True]
        assert link.state == "weights_invalid"

    other = Ready(msgspec.structs.replace(INFO, checksum="1" * 32), 0)
    play(scenario, READY, other)


def test_the_weights_of_a_commit_are_those_looked_for_afterwards(play: Callable[..., None]) -> None:
    async def scenario(link: EngineConnection, children: Children, dead: list[str]) -> None:
        commit = asyncio.create_task(link.command(CommitUpdate(3)))
        await until(lambda: children.all[0].heard)
        call_id = children.all[0].last(Command).call_id
        children.all[0].say(Reply(call_id, {"version": 3, "checksum": "1" * 32, "live": 1}))
        await commit
        children.all[0].said.put_nowait(None)
        await until(lambda: link.num_restarts == 1)
        assert (children.all[1].setup.version, children.all[1].setup.live) == (3, 1)
        assert link.state == "running"

    play(scenario, READY, Ready(msgspec.structs.replace(INFO, checksum="1" * 32), 3))


def test_requests_that_sample_nothing_prove_a_scheduler_too(play: Callable[..., None]) -> None:
    async def scenario(link: EngineConnection, children: Children, dead: list[str]) -> None:
        tickets = [link.submit(replace(REQUEST, request_id=name)) for name in "ab"]
        probe = asyncio.create_task(link.check_alive(5))
        await asyncio.sleep(0.02)
        children.all[0].say(Ended(tickets[0].slot, output("length")))
        await asyncio.wait_for(probe, 1)

    play(scenario)


def test_an_abort_is_no_proof(play: Callable[..., None]) -> None:
    async def scenario(link: EngineConnection, children: Children, dead: list[str]) -> None:
        ticket = link.submit(REQUEST)
        probe = asyncio.create_task(link.check_alive(0.3))
        await asyncio.sleep(0.02)
        children.all[0].say(Ended(ticket.slot, output("abort", 4)))
        with pytest.raises(CommandFailed, match="sampled nothing"):
            await probe
        assert children.all[0].last(Abort).slots == [children.all[0].last(Submit).slot]

    play(scenario)


@pytest.mark.parametrize("others", [True, False])
def test_a_pause_that_overtakes_a_probe_does_not_fail_it(play: Callable[..., None], others: bool) -> None:
    async def scenario(link: EngineConnection, children: Children, dead: list[str]) -> None:
        if others:
            link.submit(REQUEST)
        probe = asyncio.create_task(link.check_alive(5))
        await until(lambda: children.all[0].heard)
        children.all[0].say(Beat("paused", 0, pause_mode="in_place"))
        await until(lambda: isinstance(children.all[0].heard[-1], Command))
        children.all[0].say(Reply(children.all[0].last(Command).call_id))
        await asyncio.wait_for(probe, 1)

    play(scenario)


def test_a_probe_fails_with_the_process_it_waits_for(play: Callable[..., None]) -> None:
    async def scenario(link: EngineConnection, children: Children, dead: list[str]) -> None:
        link.submit(REQUEST)
        probe = asyncio.create_task(link.check_alive(15))
        await asyncio.sleep(0.02)
        children.all[0].said.put_nowait(None)
        with pytest.raises(CommandFailed, match="was killed"):
            await asyncio.wait_for(probe, 2)

    play(scenario)


def test_tokens_of_others_prove_a_scheduler(play: Callable[..., None]) -> None:
    async def scenario(link: EngineConnection, children: Children, dead: list[str]) -> None:
        ticket = link.submit(REQUEST)
        probe = asyncio.create_task(link.check_alive(5))
        await asyncio.sleep(0.02)
        children.all[0].say(Progress(0, [ticket.slot], [7], [-1.0]))
        await asyncio.wait_for(probe, 1)

    play(scenario)


def test_a_command_with_a_number_beyond_64_bits_is_refused(play: Callable[..., None]) -> None:
    async def scenario(link: EngineConnection, children: Children, dead: list[str]) -> None:
        with pytest.raises(CommandFailed, match="does not fit") as caught:
            await link.command(StageHandle(1, MemfdHandle(2**70, 3, 4), "x"))
        assert caught.value.kind == "request"

    play(scenario)
