"""Requests under way as the front end sees them: what was sampled so far, whatever becomes of the engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from unison.core.records import (
    GenerationOutput,
    GenerationRequest,
    OutputDelta,
    VersionRun,
    extend_runs,
)
from unison.server.link import Answer, RequestFailed


class PendingTicket:
    """One submitted request; implements ``unison.server.link.Ticket``."""

    def __init__(self, slot: int, request: GenerationRequest) -> None:
        self.slot = slot
        self.request = request
        self.token_ids: list[int] = []
        """Sampled so far, for the case that the engine cannot say it itself any more."""
        self.logprobs: list[float] = []
        self.versions: list[VersionRun] = []
        self._ended: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pieces: list[OutputDelta] = []
        self._changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    async def answer(self) -> Answer:
        return await asyncio.shield(self._ended)

    async def next_delta(self) -> OutputDelta | None:
        while not self._pieces and not self._ended.done():
            self._changed.clear()
            await self._changed.wait()
        if self._ended.done():
            # What no delta has shown is in the answer.
            return None
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else joined(pieces)

    def progress(self, version: int, token_id: int, logprob: float) -> None:
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        extend_runs(self.versions, version, 1)

    def piece(self, delta: OutputDelta) -> None:
        self._pieces.append(delta)
        self._changed.set()

    def end(self, result: Answer | RequestFailed) -> None:
        if not self._ended.done():
            if isinstance(result, Answer):
                self._ended.set_result(result)
            else:
                self._ended.set_exception(result)
                # Whoever asked may have left: then nobody looks.
                self._ended.exception()
        self._changed.set()

    def cut_short(self, how: str) -> None:
        """The engine process is gone: answer with what was sampled."""
        request = self.request
        output = GenerationOutput(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            text="",
            finish_reason="abort",
            matched_stop=None,
            seed=request.sampling.seed or 0,
            weight_versions=self.versions,
            kv_versions=[],
            sampling=request.sampling,
            resumed_ids=request.output_ids,
            priority=request.priority,
        )
        self.end(Answer(output, died=how))


def joined(pieces: Sequence[OutputDelta]) -> OutputDelta:
    """Several deltas of one request as one."""
    runs: list[VersionRun] = []
    for piece in pieces:
        for run in piece.weight_versions:
            extend_runs(runs, run.version, run.count)
    return OutputDelta(
        request_id=pieces[0].request_id,
        token_ids=[token for piece in pieces for token in piece.token_ids],
        logprobs=[value for piece in pieces for value in piece.logprobs],
        text="".join(piece.text for piece in pieces),
        weight_versions=runs,
        top_logprobs=[row for piece in pieces for row in piece.top_logprobs],
        token_id_logprobs=[row for piece in pieces for row in piece.token_id_logprobs],
    )
