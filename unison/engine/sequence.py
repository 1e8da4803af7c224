"""One sequence on its way through the engine: the mutable side of a request."""

from __future__ import annotations

from unison.core.records import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    TokenLogprob,
    VersionRun,
    extend_runs,
    older_runs,
)
from unison.engine.logit_edits import LogitEdits
from unison.engine.sampler import SamplerRow
from unison.engine.tap_rows import TapRows
from unison.engine.token_scores import RowScores
from unison.text.detokenize import IncrementalDetokenizer
from unison.text.stop import StopMatcher


class Sequence:
    """Tokens, cache position and output so far of one request.

    ``num_cached`` tokens have their keys and values in ``pages``; the rest of ``token_ids`` waits
    to be computed. A sequence samples when all its tokens are computed, unless it is there for the
    log-probs of its prompt only.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        seed: int,
        max_new_tokens: int,
        end_ids: frozenset[int],
        detokenizer: IncrementalDetokenizer | None,
        edits: LogitEdits | None = None,
        taps: TapRows | None = None,
    ) -> None:
        self.request = request
        self.taps = taps
        """Hidden states kept so far, where the request asks for any."""
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.end_ids = end_ids
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_prior = len(request.prompt_ids) + len(request.output_ids)
        """Tokens that were there when the request came; those after them are sampled here."""
        self.num_cached = 0
        self.num_retractions = 0
        self._num_sampled_before = 0
        """Tokens sampled before the sequence was placed in memory this time."""
        self._read_versions: list[VersionRun] = []
        """Versions of lost keys and values that some sampled token had read."""
        self.arrival = 0
        """The sequence's place in the order of arrival."""
        self.num_passed_over = 0
        """Times a sequence that came later was admitted before this one."""
        self.num_cache_hits = 0
        """Tokens whose keys and values came from the prefix cache."""
        self.pages: list[int] = []
        """Pages of the KV pool, in order; empty while the sequence waits."""
        self.logprobs: list[float] = []
        self.weight_versions: list[VersionRun] = []
        self.kv_versions: list[VersionRun] = []
        self.finish_reason: FinishReason | None = None
        self.matched_stop: int | str | None = None
        # Nothing predicts the first token of a prompt.
        self._first_scored = max(1, request.sampling.prompt_logprobs_from or 0)
        asked = request.sampling.prompt_logprobs_from is not None
        self.num_prompt_logprobs = len(request.prompt_ids) - self._first_scored if asked else 0
        """Log-probs of prompt tokens that the request asks for."""
        self.prompt_logprobs: list[float] = []
        self.only_scores_prompt = False
        """Whether the answer is complete and only what was asked of the prompt is still to come."""
        self.top_logprobs: list[list[TokenLogprob]] = []
        self.token_id_logprobs: list[list[float]] = []
        self._edits = edits
        self._least_output = max(request.sampling.min_new_tokens, len(request.sampling.forced_ids))
        """Output tokens before which nothing but the limit ends the answer."""
        self.text_pieces: list[str] = []
        """The text that is certain, about a piece a token; a single one when the answer has ended."""
        self._held_text = ""
        self.answer: GenerationOutput | None = None
        """The answer, once it has been made up."""
        self._detokenizer = detokenizer
        self._stops = StopMatcher(request.sampling.stop)
        if max_new_tokens == 0:
            self.finish("length")
        for token in request.output_ids:
            self._take(token)
        self.num_prior_pieces = len(self.text_pieces)
        """Pieces of text that the resumed tokens had made certain."""
        if self.finish_reason is not None and (self.num_prompt_logprobs > 0 or self._taps_the_prompt):
            self._score_prompt_first()

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
        if self.only_scores_prompt:
            return len(self.token_ids)
        return max(1, len(self.request.prompt_ids) + self.max_new_tokens - 1)

    def rows_to_score(self, start: int, count: int) -> range:
        """Those of the tokens [start, start + count) whose successor is a prompt token with its log-prob missing."""
        missing = self._first_scored + len(self.prompt_logprobs)
        num_left = self.num_prompt_logprobs - len(self.prompt_logprobs)
        return range(max(start, missing - 1), min(start + count, missing - 1 + num_left))

    def take_prompt_logprobs(self, logprobs: list[float]) -> None:
        self.prompt_logprobs += logprobs

    def end_if_scored(self) -> None:
        """End the answer that waited only for what was asked of its prompt, if all of that has come."""
        has_rows = not self._taps_the_prompt or self.num_tapped == len(self.token_ids)
        if self.only_scores_prompt and has_rows and len(self.prompt_logprobs) == self.num_prompt_logprobs:
            self.finish(*self._ending)

    @property
    def num_tapped(self) -> int:
        """The first position whose hidden states are asked for and not kept yet."""
        return 0 if self.taps is None else self.taps.next_position

    @property
    def _taps_the_prompt(self) -> bool:
        return self.request.sampling.taps_from is not None

    def usable_hits(self, count: int) -> int:
        """How many of ``count`` tokens that the prefix cache holds the sequence can take from it."""
        # Log-probs and taps need hidden states, which the cache does not hold: from there on all is computed.
        if len(self.prompt_logprobs) < self.num_prompt_logprobs:
            count = min(count, self._first_scored + len(self.prompt_logprobs) - 1)
        return count if self.taps is None else min(count, self.num_tapped)

    def take_from_cache(self, count: int, version: int) -> None:
        """The keys and values of the first ``count`` tokens came from the prefix cache."""
        self.num_cache_hits = count
        self.record_cached(count, version)

    def push_back(self) -> None:
        """The sequence lost its place in memory; its keys and values will be computed or found again."""
        self.num_retractions += 1
        # Drawn over keys of one version, tokens are that version's alone; over several, that has to be told.
        if len(self.kv_versions) > 1 and len(self.logprobs) > self._num_sampled_before:
            self._read_versions = older_runs(self._read_versions, self.kv_versions)
        self._num_sampled_before = len(self.logprobs)
        self.pages = []
        self.num_cached = 0
        self.kv_versions = []

    def record_cached(self, count: int, version: int) -> None:
        self.num_cached += count
        extend_runs(self.kv_versions, version, count)

    def take_back_last(self) -> None:
        """Nothing came of the step that computed the last token: it is computed again."""
        if self.pages and self.num_uncached == 0:
            self.num_cached -= 1
            last = self.kv_versions.pop()
            extend_runs(self.kv_versions, last.version, last.count - 1)

    def sampler_row(self) -> SamplerRow:
        """What the sampler needs to draw the next token."""
        forced = self.request.sampling.forced_ids
        return SamplerRow(
            self.request.sampling,
            self.seed,
            len(self.token_ids),
            self._edits,
            forced[self.num_output] if self.num_output < len(forced) else None,
        )

    def append(self, token: int, logprob: float, version: int, scores: RowScores | None = None) -> None:
        """Take one sampled token and decide whether it was the last."""
        self.logprobs.append(logprob)
        if scores is not None:
            self.top_logprobs.append(scores.top)
            self.token_id_logprobs.append(scores.chosen)
        extend_runs(self.weight_versions, version, 1)
        self._take(token)

    def finish(self, reason: FinishReason, matched: int | str | None = None) -> None:
        self.finish_reason = reason
        self.matched_stop = matched

    def output(self) -> GenerationOutput:
        if self.finish_reason is None:
            raise ValueError(f"request {self.request_id} is not finished")
        self.answer = GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.request.prompt_ids,
            token_ids=self.token_ids[self.num_prior :],
            logprobs=self.logprobs,
            text=self._final_text(),
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
            seed=self.seed,
            weight_versions=self.weight_versions,
            kv_versions=older_runs(self._read_versions, self.kv_versions),
            sampling=self.request.sampling,
            num_cached_tokens=self.num_cache_hits,
            top_logprobs=self.top_logprobs if self.request.sampling.top_logprobs else [],
            token_id_logprobs=self.token_id_logprobs if self.request.sampling.logprob_token_ids else [],
            prompt_logprobs=self.prompt_logprobs,
            hidden_states=self.taps.states() if self.taps is not None else {},
            held_text=self._held_text,
            resumed_ids=self.request.output_ids,
            priority=self.request.priority,
            num_retractions=self.num_retractions,
        )
        return self.answer

    def _score_prompt_first(self) -> None:
        """Put off the end of an answer that is complete from the start until what was asked of the prompt is there."""
        assert self.finish_reason is not None
        self._ending = (self.finish_reason, self.matched_stop)
        self.finish_reason = self.matched_stop = None
        self.only_scores_prompt = True
        if self.taps is not None and not self._taps_the_prompt:
            self.taps.is_closed = True  # only rows that draw were asked for, and nothing is drawn any more
        num_read = len(self.token_ids) - 1 if self._taps_the_prompt else 0
        del self.token_ids[max(len(self.request.prompt_ids), num_read) :]

    @property
    def _may_end(self) -> bool:
        return self.num_output >= self._least_output

    def _take(self, token: int) -> None:
        """Add an output token. Resumed ones pass here too, so an answer that had ended ends again."""
        self.token_ids.append(token)
        if self._edits is not None:
            self._edits.observe(token)
        if self.finish_reason is not None:
            return
        if token in self.end_ids and self._may_end:
            self.finish("stop", token)
            if self.request.sampling.no_stop_trim and self._detokenizer is not None:
                self._take_text(self._detokenizer.push(token), may_match=False)
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
        return self._take_text(self._detokenizer.push(token), may_match=self._may_end)

    def _take_text(self, decoded: str, *, may_match: bool) -> str | None:
        """Add a piece of text, as far as it is no part of a stop string; the one it completed, if any."""
        text, matched = self._stops.push(decoded, may_match=may_match)
        if matched is not None and self.request.sampling.no_stop_trim:
            text += matched
        self.text_pieces.append(text)
        return matched

    def _final_text(self) -> str:
        if self._detokenizer is None:
            return ""
        if self.finish_reason == "abort":
            # What a resumed answer may yet make of these is not known, so they are no part of the text.
            text, _ = self._stops.push(self._detokenizer.flush(), may_match=False)
            self._held_text = text + self._stops.flush()
        elif not isinstance(self.matched_stop, str):
            self._take_text(self._detokenizer.flush(), may_match=self._may_end)
            self.text_pieces.append(self._stops.flush())
        self.text_pieces = ["".join(self.text_pieces)]
        return self.text_pieces[0]
