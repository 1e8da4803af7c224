"""One whole answer out of the pieces that dying and restarting servers leave of it.

What was sampled is sent along as output when a request is issued once more, so the joined answer is, to the bit, the
one that nothing had disturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final

from unison.clients.endpoint import BusyError, LostError
from unison.core.errors import ServerError
from unison.core.records import GenerationOutput, GenerationRequest, extend_runs

_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 2.0
_MAX_NAME_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Piece:
    """An answer as a server gave it. ``is_cut``: it stopped before its end, for what ``why`` says."""

    output: GenerationOutput
    is_cut: bool = False
    why: str = ""


@dataclass(slots=True, eq=False)
class Call:
    """One request of ours under way, whatever it takes."""

    request: GenerationRequest
    seed: int
    deadline: float
    """Of ``time.monotonic``."""
    so_far: GenerationOutput | None = None
    rid: str = ""
    """The name of its present attempt: a fresh one each time, as the server may still know the one before."""
    is_open: bool = True
    place: object | None = None
    """The server of its present attempt, where there are several."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, request: GenerationRequest, timeout_s: float) -> Call:
        seed = request.sampling.seed
        return cls(request, secrets.randbits(64) if seed is None else seed, time.monotonic() + timeout_s)

    @property
    def remaining_s(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    @property
    def next_request(self) -> GenerationRequest:
        """What is still to be drawn."""
        if self.so_far is None:
            return self.request
        return replace(self.request, output_ids=(*self.request.output_ids, *self.so_far.token_ids))

    def name_attempt(self) -> str:
        readable = "".join(char for char in self.request.request_id[:_MAX_NAME_CHARS] if char.isprintable())
        self.rid = f"{readable}~{secrets.token_hex(6)}"
        return self.rid

    def add(self, piece: GenerationOutput) -> GenerationOutput:
        """Take a piece; what the answer has come to."""
        self.so_far = joined(self.so_far, piece, self.request)
        return self.so_far

    def cut_off(self) -> GenerationOutput:
        """The answer as far as it is known, as an aborted one."""
        if self.so_far is not None:
            return replace(self.so_far, finish_reason="abort", matched_stop=None)
        return GenerationOutput(
            request_id=self.request.request_id,
            prompt_ids=self.request.prompt_ids,
            token_ids=[],
            logprobs=[],
            text="",
            finish_reason="abort",
            matched_stop=None,
            seed=self.seed,
            weight_versions=[],
            kv_versions=[],
            sampling=self.request.sampling,
            resumed_ids=self.request.output_ids,
            priority=self.request.priority,
        )


async def draw_whole(call: Call, attempt: Callable[[Call], Awaitable[Piece]]) -> GenerationOutput:
    """Attempt the request until it has its end, was aborted by us, or its deadline has passed.

    ``attempt`` draws ``call.next_request``. Raises ServerError, naming what was wrong last, at the deadline.
    """
    wait_s, why = _FIRST_WAIT_S, "no server took it"
    while True:
        if call.aborted.is_set():
            return call.cut_off()
        if call.remaining_s <= 0:
            raise ServerError(f"request {call.request.request_id} did not end by its deadline; at last {why}")
        try:
            piece = await attempt(call)
        except (LostError, BusyError) as error:
            why = str(error)
        else:
            had = 0 if call.so_far is None else len(call.so_far.token_ids)
            whole = call.add(piece.output)
            if not piece.is_cut or call.aborted.is_set():
                return whole
            why = piece.why
            if len(whole.token_ids) > had:
                wait_s = _FIRST_WAIT_S
        await _pause(call, wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


async def _pause(call: Call, wait_s: float) -> None:
    """Wait, with some jitter, unless the request is aborted meanwhile."""
    wait_s = min(wait_s * random.uniform(0.5, 1.0), call.remaining_s)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(call.aborted.wait(), wait_s)


def joined(first: GenerationOutput | None, second: GenerationOutput, request: GenerationRequest) -> GenerationOutput:
    """``second``, drawn with ``first``'s tokens as its output, as one answer to ``request``."""
    if first is None:
        return second
    versions = list(first.weight_versions)
    for run in second.weight_versions:
        extend_runs(versions, run.version, run.count)
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        weight_versions=versions,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        token_id_logprobs=first.token_id_logprobs + second.token_id_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        resumed_ids=request.output_ids,
    )
