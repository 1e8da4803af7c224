"""One sequence on its way through the engine: the mutable side of a request."""

from __future__ import annotations

from unison.core.records import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    VersionRun,
    extend_runs,
)
from unison.engine.kv_pool import Extent
from unison.text.detokenize import IncrementalDetokenizer
from unison.text.stop import StopMatcher


class Sequence:
    """Tokens, cache position and output so far of one request.

    ``num_cached`` tokens have their keys and values in ``extent``; the rest of ``token_ids`` waits
    to be computed. A sequence samples when all its tokens are computed.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        seed: int,
        max_new_tokens: int,
        end_ids: frozenset[int],
        detokenizer: IncrementalDetokenizer | None,
    ) -> None:
        self.request = request
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.end_ids = end_ids
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_prior = len(request.prompt_ids) + len(request.output_ids)
        """Tokens that were there when the request came; those after them are sampled here."""
        self.num_cached = 0
        self.was_pushed_back = False
        self.num_passed_over = 0
        """Times a sequence that came later was admitted before this one."""
        self.num_cache_hits = 0
        """Tokens whose keys and values came from the prefix cache."""
        self.extent: Extent | None = None
        self.logprobs: list[float] = []
        self.weight_versions: list[VersionRun] = []
        self.kv_versions: list[VersionRun] = []
        self.finish_reason: FinishReason | None = None
        self.matched_stop: int | str | None = None
        self._text: list[str] = []
        self._detokenizer = detokenizer
        self._stops = StopMatcher(request.sampling.stop)
        if max_new_tokens == 0:
            self.finish("length")
        for token in request.output_ids:
            self._take(token)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_uncached(self) -> int:
        return len(self.token_ids) - self.num_cached

    @property
    def num_output(self) -> int:
        """Output tokens, those of an earlier, resumed request included."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def max_tokens(self) -> int:
        """Most tokens whose keys and values are ever needed; the last sampled one is never read."""
        return max(1, len(self.request.prompt_ids) + self.max_new_tokens - 1)

    def take_from_cache(self, count: int, version: int) -> None:
        """The first ``count`` tokens were copied from the prefix cache."""
        self.num_cache_hits = count
        self.record_cached(count, version)

    def push_back(self) -> None:
        """The sequence lost its place in memory; its keys and values will be computed or found again."""
        self.was_pushed_back = True
        self.extent = None
        self.num_cached = 0
        self.kv_versions = []

    def record_cached(self, count: int, version: int) -> None:
        self.num_cached += count
        extend_runs(self.kv_versions, version, count)

    def append(self, token: int, logprob: float, version: int) -> None:
        """Take one sampled token and decide whether it was the last."""
        self.logprobs.append(logprob)
        extend_runs(self.weight_versions, version, 1)
        self._take(token)

    def finish(self, reason: FinishReason, matched: int | str | None = None) -> None:
        self.finish_reason = reason
        self.matched_stop = matched

    def output(self) -> GenerationOutput:
        if self.finish_reason is None:
            raise ValueError(f"request {self.request_id} is not finished")
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.request.prompt_ids,
            token_ids=self.token_ids[self.num_prior :],
            logprobs=self.logprobs,
            text=self._final_text(),
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
            seed=self.seed,
            weight_versions=self.weight_versions,
            kv_versions=self.kv_versions,
            sampling=self.request.sampling,
            num_cached_tokens=self.num_cache_hits,
        )

    def _take(self, token: int) -> None:
        """Add an output token. Resumed ones pass here too, so an answer that had ended ends again."""
        self.token_ids.append(token)
        if self.finish_reason is not None:
            return
        if token in self.end_ids:  # its text is no part of the answer
            self.finish("stop", token)
            return
        matched = self._read(token)
        if matched is not None:
            self.finish("stop", matched)
        elif self.num_output >= self.max_new_tokens:
            self.finish("length")

    def _read(self, token: int) -> str | None:
        """Feed one token to the detokenizer; the stop string it completed, if any."""
        if self._detokenizer is None:
            return None
        text, matched = self._stops.push(self._detokenizer.push(token))
        self._text.append(text)
        return matched

    def _final_text(self) -> str:
        if self._detokenizer is None:
            return ""
        if not isinstance(self.matched_stop, str):
            text, matched = self._stops.push(self._detokenizer.flush())
            self._text.append(text)
            if matched is None:
                self._text.append(self._stops.flush())
        text = "".join(self._text)
        self._text = [text]
        return text
