"""An engine client that answers by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from unison.core.records import FinishReason, GenerationOutput, GenerationRequest, VersionRun


def make_output(
    request: GenerationRequest, *, num_tokens: int = 3, finish_reason: FinishReason = "stop"
) -> GenerationOutput:
    seed = request.sampling.seed or 0
    return GenerationOutput(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        token_ids=[seed % 97 + i for i in range(num_tokens)],
        logprobs=[-0.5 * (i + 1) for i in range(num_tokens)],
        text=f"text of {request.request_id}",
        finish_reason=finish_reason,
        matched_stop=7 if finish_reason == "stop" else None,
        seed=seed,
        weight_versions=[VersionRun(1, 1), VersionRun(2, num_tokens - 1)] if num_tokens > 1 else [],
        kv_versions=[VersionRun(1, len(request.prompt_ids)), VersionRun(2, max(num_tokens - 1, 0))],
        sampling=request.sampling,
    )


class FakeClient:
    """Answers after as many turns of the event loop as ``turns`` says; remembers what was asked and cancelled."""

    def __init__(
        self,
        answer: Callable[[GenerationRequest], GenerationOutput] = make_output,
        turns: Callable[[GenerationRequest], int] = lambda _: 1,
    ) -> None:
        self._answer = answer
        self._turns = turns
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        self.requests.append(request)
        try:
            for _ in range(self._turns(request)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        return self._answer(request)

    def abort(self, request_id: str | None = None) -> None:
        raise AssertionError("a rollout cancels, it does not abort")
