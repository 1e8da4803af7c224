"""Requests under way: known by the client's ids until they end, and counted then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from tests.server.fake_link import make_front
from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta
from unison.core.sampling import SamplingParams
from unison.server.front import Front
from unison.server.link import Answer, RequestFailed
from unison.server.requests import Asked, Batch, Shown
from unison.server.submission import Submitted

REQUEST = GenerationRequest(request_id="a_0", prompt_ids=(1, 2, 3), sampling=SamplingParams())


class FakeTicket:
    def __init__(self) -> None:
        self.ended: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    @property
    def has_ended(self) -> bool:
        return self.ended.done()

    async def answer(self) -> Answer:
        return await asyncio.shield(self.ended)

    async def next_delta(self) -> OutputDelta | None:
        return None


def output(num_tokens: int, reason: Any) -> GenerationOutput:
    return GenerationOutput(
        request_id="a_0",
        prompt_ids=(1, 2, 3),
        token_ids=[7] * num_tokens,
        logprobs=[-1.0] * num_tokens,
        text="",
        finish_reason=reason,
        matched_stop=None,
        seed=0,
        weight_versions=[],
        kv_versions=[],
        sampling=SamplingParams(),
        num_cached_tokens=2,
    )


def end(ticket: FakeTicket, result: Answer | RequestFailed) -> None:
    if isinstance(result, Answer):
        ticket.ended.set_result(result)
    else:
        ticket.ended.set_exception(result)


@pytest.mark.parametrize(
    ("make", "reason", "num_sampled"),
    [
        (lambda: Answer(output(4, "stop"), queue_s=0.5), "stop", 4),
        (lambda: Answer(output(0, "abort")), "abort", 0),
        (lambda: RequestFailed("queue_full", "too many"), "queue_full", 0),
        (lambda: RequestFailed("non_finite", "NaN", output(2, "abort")), "non_finite", 2),
    ],
)
def test_a_sample_is_under_way_until_it_ends_and_then_counted(
    make: Callable[[], Answer | RequestFailed], reason: str, num_sampled: int
) -> None:
    async def scenario(front: Front) -> None:
        ticket = FakeTicket()
        front.live.follow("a", REQUEST, ticket, front.metrics)
        assert [entry.engine_ids for entry in front.live.find("a")] == [("a_0",)]
        assert front.live.num_samples == 1 and front.live.find("a_0") == []
        entries = front.live.find(None)
        end(ticket, make())
        await asyncio.wait_for(front.live.wait_for(entries), 5)
        assert front.live.num_samples == 0
        text = front.metrics.text().decode()
        assert f'unison_requests_total{{finish_reason="{reason}",model_name="/models/tiny"}} 1.0' in text
        assert f'sglang:generation_tokens_total{{model_name="/models/tiny"}} {float(num_sampled)}' in text
        assert 'sglang:prompt_tokens_total{model_name="/models/tiny"} 3.0' in text

    run(scenario)


def test_copies_of_one_request_are_found_by_its_id() -> None:
    async def scenario(front: Front) -> None:
        tickets = [FakeTicket() for _ in range(3)]
        for ticket in tickets:
            front.live.follow("a", REQUEST, ticket, front.metrics)
        assert len(front.live.find("a")) == 3
        end(tickets[1], Answer(output(1, "stop")))
        await asyncio.sleep(0.01)
        assert len(front.live.find("a")) == 2
        for ticket in (tickets[0], tickets[2]):
            end(ticket, Answer(output(1, "stop")))
        await asyncio.sleep(0.01)
        assert front.live.find(None) == []

    run(scenario)


def run(scenario: Callable[[Front], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario(make_front()))


def test_an_id_that_is_free_again_is_not_aborted_for_its_first_owner() -> None:
    async def scenario() -> None:
        front = make_front()
        tickets = [FakeTicket(), FakeTicket()]
        shown = Shown(logprobs=False, prompt_from=None, token_text=False, prompt_ids=False, ignored=(), notes=())
        asked = [Asked(replace(REQUEST, request_id=name), name, shown, 1) for name in ("a", "b")]
        submitted = Submitted(Batch("a", asked, True, True, False), tickets, 0.0)
        end(tickets[0], Answer(output(4, "stop")))  # and its reader has not come to see it
        assert submitted.is_open
        submitted.abort(front)
        assert front.link.aborted == ["b"]  # type: ignore[attr-defined]

    asyncio.run(scenario())
