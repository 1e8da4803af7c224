"""Answers while they are being made: what is new in a running sequence, for whoever asks."""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from unison.core.errors import EngineStateError
from unison.core.records import OutputDelta, last_runs
from unison.core.sampling import SamplingParams
from unison.engine.sequence import Sequence

if TYPE_CHECKING:
    from unison.engine.engine import Engine


class OutputStream:
    """Remembers how much of one request's answer was handed out. Sequences know nothing of their streams.

    Nobody is hurried: what came since the last ``take`` is one delta, however many tokens it is.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._num_tokens = 0
        self._num_pieces = sequence.num_prior_pieces
        self._num_characters = sum(map(len, sequence.text_pieces[: sequence.num_prior_pieces]))
        self.is_done = False
        """Whether the delta with the whole output was taken."""

    def take(self) -> OutputDelta | None:
        """What is new; None where nothing is. Not to be called while the engine steps."""
        sequence, output = self._sequence, self._sequence.answer
        num_new = len(sequence.logprobs) - self._num_tokens
        if self.is_done or (output is None and num_new == 0):
            return None
        if output is None:
            text = "".join(sequence.text_pieces[self._num_pieces :])
            self._num_pieces = len(sequence.text_pieces)
        else:
            text = output.text[self._num_characters :]
        self._num_characters += len(text)
        start, self._num_tokens = self._num_tokens, self._num_tokens + num_new
        self.is_done = output is not None
        first = sequence.num_prior + start
        asked = sequence.request.sampling
        return OutputDelta(
            request_id=sequence.request_id,
            token_ids=sequence.token_ids[first : first + num_new],
            logprobs=sequence.logprobs[start:],
            text=text,
            weight_versions=last_runs(sequence.weight_versions, num_new),
            top_logprobs=sequence.top_logprobs[start:] if asked.top_logprobs else [],
            token_id_logprobs=sequence.token_id_logprobs[start:] if asked.logprob_token_ids else [],
            output=output,
        )


def stream_answers(
    engine: Engine, prompts: Items[str] | Items[Items[int]], sampling: SamplingParams
) -> Generator[tuple[int, int, OutputDelta], None, None]:
    """``Engine.stream``: steps the engine whenever more is asked for than has been made."""
    if engine.has_work:
        raise EngineStateError("stream was called while other requests run; use the async client to share")
    requests = engine.requests(prompts, sampling)
    names = [request.request_id for copies in requests for request in copies]
    own = set(names)
    streams: list[tuple[int, int, OutputStream]] = []
    try:
        for i, copies in enumerate(requests):
            for k, request in enumerate(copies):
                engine.add_request(request)
                streams.append((i, k, engine.watch(request.request_id)))
        while streams:
            engine.put_back([output for output in engine.step_or_refuse() if output.request_id not in own])
            for i, k, stream in streams:
                delta = stream.take()
                if delta is not None:
                    yield i, k, delta
            streams = [one for one in streams if not one[2].is_done]
    finally:
        engine.discard(names)
