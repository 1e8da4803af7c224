"""Reward functions as a worker process serves them, and the messages between it and the run."""

from __future__ import annotations

import msgspec

from unison.core.errors import RewardError
from unison.core.wire import decode_samples
from unison.processes.faults import OutOfMemoryError
from unison.rewards.base import PartSpec, open_reward
from unison.rewards.combined import call
from unison.rewards.forms import Form
from unison.rewards.outcomes import Failure

TARGET = "unison.rewards.service:open_service"


class Parts(msgspec.Struct, frozen=True):
    """What the worker is to open; ``named`` as in WeightedReward."""

    specs: dict[str, PartSpec]
    named: bool


class Opened(msgspec.Struct, frozen=True):
    """What it found: a combination has parts that only its module knows."""

    weights: dict[str, float]
    forms: dict[str, Form]
    named: bool
    most_seconds: dict[str, tuple[float, str]] = {}
    """Of the parts that know: the longest that a call takes, and what says so."""


class GradeCall(msgspec.Struct, frozen=True):
    part: str
    samples: bytes


class Graded(msgspec.Struct, frozen=True):
    """One outcome for each sample, or the failure of the call."""

    outcomes: list[float | Failure | None] | None = None
    failure: Failure | None = None
    refused: str | None = None
    """Why the function cannot be used at all, which ends the run."""


class RewardService:
    """Called in the worker with the bytes of a GradeCall; answers with those of a Graded."""

    def __init__(self, parts: Parts) -> None:
        self._reward = open_reward(parts.specs, named=parts.named)
        most = {name: grader.most_seconds for name, (grader, _) in self._reward.parts.items() if grader.most_seconds}
        opened = Opened(self._reward.weights, self._reward.forms, self._reward.named, most)
        self.description = msgspec.msgpack.encode(opened)

    def __call__(self, payload: bytes) -> bytes:
        request = msgspec.msgpack.decode(payload, type=GradeCall)
        samples = decode_samples(request.samples)
        grader, _ = self._reward.parts[request.part]
        try:
            found = call(request.part, grader, samples)
        except RewardError as error:
            return msgspec.msgpack.encode(Graded(refused=str(error)))
        if isinstance(found, Failure):
            if found.kind == "memory":
                raise OutOfMemoryError(f"out of memory: {found.reason}")
            return msgspec.msgpack.encode(Graded(failure=found))
        return msgspec.msgpack.encode(Graded(outcomes=found))


def open_service(argument: bytes) -> RewardService:
    """Load the functions. Raises RewardError for what cannot be found or called as configured."""
    return RewardService(msgspec.msgpack.decode(argument, type=Parts))
