"""The engine process's loop, turn by turn, with its front end at the other end of a socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tests.conftest import TinyModelDir
from unison.core.records import GenerationRequest
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.models.names import published_tensors
from unison.processes.channel import Channel
from unison.server.host import Host
from unison.server.messages import (
    Abort,
    AbortUpdate,
    Beat,
    BeginUpdate,
    Command,
    CommitUpdate,
    Ended,
    Pause,
    Progress,
    Reply,
    StageHandle,
    Submit,
    ToEngine,
    ToFrontEnd,
)
from unison.weights.arena import ArenaLayout
from unison.weights.outbox import Outbox


class Both:
    """A host and who speaks to it."""

    def __init__(self, engine: Engine) -> None:
        ours, theirs = socket.socketpair()
        self.channel: Channel[Any] = Channel(ours, ToFrontEnd)
        self._theirs: Channel[Any] = Channel(theirs, ToEngine)
        self.host = Host(engine, self._theirs, "profiles")
        self.heard: list[Any] = []

    def say(self, *messages: Any) -> None:
        self.channel.send(list(messages))

    def turn(self) -> None:
        self.host.beat_now()
        self.host.turn()
        for messages in self.channel.receive(0.0):
            self.heard += messages

    def turn_until(self, found: Callable[[Any], bool]) -> Any:
        until = time.monotonic() + 20
        while not (hits := [message for message in self.heard if found(message)]):
            assert time.monotonic() < until, self.heard
            self.turn()
        return hits[0]

    def reply(self, call_id: int) -> Any:
        return self.turn_until(lambda message: isinstance(message, Reply) and message.call_id == call_id)

    def close(self) -> None:
        self.host.desk.close()
        self.channel.close()
        self._theirs.close()


def both(folder: Any, staging: Any) -> Both:
    built = Engine.from_pretrained(folder, dtype="float32", kv_tokens=4096)
    return Both(Engine(built.model, path=built.path, config=built.config, tokenizer=built.tokenizer, staging=staging))


@pytest.fixture
def shadow(tiny_model_dir: TinyModelDir) -> Iterator[Both]:
    found = both(tiny_model_dir(), "shadow")
    yield found
    found.close()


@pytest.fixture
def in_place(tiny_model_dir: TinyModelDir) -> Iterator[Both]:
    found = both(tiny_model_dir(), "in_place")
    yield found
    found.close()


def submit(slot: int) -> Submit:
    sampling = SamplingParams(max_new_tokens=200, seed=slot, ignore_eos=True)
    return Submit(slot, GenerationRequest(request_id=f"r{slot}", prompt_ids=(5, 6, 7), sampling=sampling))


def running(pair: Both, *slots: int) -> None:
    pair.say(*(submit(slot) for slot in slots))
    pair.turn_until(lambda message: isinstance(message, Progress) and set(message.slots) == set(slots))


def ended(slot: int) -> Callable[[Any], bool]:
    return lambda message: isinstance(message, Ended) and message.slot == slot


def test_an_abort_of_what_a_pause_has_just_ended_is_answered_once(shadow: Both) -> None:
    running(shadow, 1, 2)
    shadow.say(Command(1, Pause("abort")), Abort([1]), Abort([1]))
    assert shadow.reply(1).error is None
    for slot in (1, 2):
        output = shadow.turn_until(ended(slot)).output
        assert output.finish_reason == "abort" and output.token_ids
    shadow.turn()
    assert sum(isinstance(message, Ended) for message in shadow.heard) == 2


def test_an_abort_is_answered_while_an_in_place_update_holds_the_steps(in_place: Both) -> None:
    running(in_place, 1, 2)
    in_place.say(Command(1, BeginUpdate(1)))
    assert in_place.reply(1).error is None
    in_place.say(Abort([1]))
    assert in_place.turn_until(ended(1)).output.token_ids
    in_place.say(Command(2, AbortUpdate(1)))
    assert in_place.reply(2).error is None
    assert len(in_place.turn_until(ended(2)).output.token_ids) == 200


def staged(pair: Both, version: int) -> None:
    engine = pair.host.engine
    outbox = Outbox(ArenaLayout.of(engine.model.spec, engine.model.dtype))
    filled = outbox.fill({name: tensor * 0.5 for name, tensor in published_tensors(engine.model).items()})
    stage = StageHandle(version, filled.handle, layout=filled.layout)
    pair.say(Command(1, BeginUpdate(version)), Command(2, stage))
    assert (pair.reply(1).error, pair.reply(2).error) == (None, None)
    outbox.close()


def test_a_commit_is_told_before_its_tokens_and_with_the_beat_of_its_version(shadow: Both) -> None:
    running(shadow, 1)
    staged(shadow, 4)
    shadow.say(Command(3, CommitUpdate(4)))
    shadow.reply(3)
    shadow.turn_until(lambda message: isinstance(message, Progress) and message.version == 4)
    news = [message for message in shadow.heard if isinstance(message, (Beat, Progress)) and message.version == 4]
    told = next(i for i, message in enumerate(shadow.heard) if isinstance(message, Reply) and message.call_id == 3)
    assert told < shadow.heard.index(news[0])
    assert sum(isinstance(message, Reply) and message.call_id == 3 for message in shadow.heard) == 1
    assert msgspec.to_builtins(shadow.heard[told])["result"]["version"] == 4
