"""The engine in one process: requests are queued, steps run them, outputs come back."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from torch import Tensor

from unison.config.names import did_you_mean
from unison.config.schema import EngineConfig
from unison.core.errors import CapacityError, ConfigError, EngineStateError, RequestError
from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta
from unison.core.sampling import SamplingParams
from unison.core.seeds import copy_seed
from unison.engine.admission import check_request, token_ids
from unison.engine.drawing import Failures, end_scored, take_draws, take_prompt_logprobs
from unison.engine.kv_pool import KvPool
from unison.engine.lifecycle import MEMORY_TAGS, Lifecycle, MemoryTag, PauseMode, State
from unison.engine.logit_edits import make_edits
from unison.engine.memory import automatic_kv_tokens
from unison.engine.planner import Planner
from unison.engine.prefix_cache import PrefixCache
from unison.engine.runner import Runner
from unison.engine.scheduler import Chunk, Scheduler
from unison.engine.sequence import Sequence
from unison.engine.stats import EngineStats
from unison.engine.streams import OutputStream, stream_answers
from unison.engine.tap_rows import make_tap_rows
from unison.models.decoder import Decoder
from unison.models.numerics import choose_packing
from unison.models.rollout_decoder import RolloutDecoder
from unison.ops.padding import NumericsPath
from unison.text.detokenize import IncrementalDetokenizer
from unison.weights.arena import Arena
from unison.weights.transaction import Commit, WeightStore, WeightTransaction

if TYPE_CHECKING:
    from unison.text.tokenizer import Tokenizer


class Engine:
    """Samples from one model. ``step`` does one unit of work; ``generate`` runs requests to their end.

    A lock lets one call in at a time, so another thread waits for the running step. Coroutines share an
    engine through one InProcessClient.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        path: NumericsPath,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        end_ids: frozenset[int] = frozenset(),
        version: int = 0,
        staging: Literal["shadow", "in_place"] = "shadow",
        arenas: Items[Arena] = (),
        live_index: int = 0,
    ) -> None:
        """``arenas`` and ``live_index``: where the weights lie, as WeightStore takes them."""
        self.config = config or EngineConfig()
        self.model = model.requires_grad_(False)
        self.path = path
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        pack, self.notes = choose_packing(model.spec, model.dtype) if self.config.prepack_linears else (False, ())
        """Whole sentences for people: what the engine has to do without."""
        self.rollout_model = RolloutDecoder(self.model, pack)
        """The same weights in the form that steps compute with."""
        self.weights = WeightStore(model, version, staging, self.rollout_model, arenas=arenas, live_index=live_index)
        num_tokens = self.config.kv_tokens or automatic_kv_tokens(model.spec, model.dtype, self.config.max_running)
        self.pool = KvPool(
            model.spec, num_tokens, self.config.page_size, model.dtype, poison_freed=self.config.poison_freed_pages
        )
        self.cache = PrefixCache(self.pool, self.config.page_size) if self.config.prefix_cache else None
        self.scheduler = Scheduler(self.config, self.pool, self.cache)
        self.stats = EngineStats()
        self._planner = Planner(self.pool, path, model.dtype)
        self._runner = Runner(self.rollout_model, self.pool, path)
        self._lifecycle = Lifecycle(self.scheduler, self.pool, self.cache, self.weights, self.rollout_model)
        self._sequences: dict[str, Sequence] = {}
        self._ended: list[GenerationOutput] = []
        """Answers that no step has handed out yet."""
        self._num_named = 0
        # One lock for requests, steps and weights: an update waits for the step under way.
        self._lock = self.weights.lock

    @classmethod
    def from_pretrained(
        cls, model: str | Path, *, dtype: str = "auto", numerics: str = "auto", **options: Any
    ) -> Engine:
        """An engine over a model folder or short name; ``options`` are fields of EngineConfig."""
        from unison.engine.build import build_engine

        for name in options:
            if name not in EngineConfig.__struct_fields__:
                known = did_you_mean(name, EngineConfig.__struct_fields__)
                raise ConfigError(f"engine option {name!r} is unknown{known}")
        try:
            config = msgspec.convert(options, EngineConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine option: {error}") from error
        return build_engine(str(model), dtype=dtype, numerics=numerics, config=config)

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together that the model admits."""
        return self.model.spec.max_positions

    @property
    def has_work(self) -> bool:
        """Whether requests are open, or answers not handed out."""
        return bool(self._ended) or self.scheduler.has_work

    @property
    def can_step(self) -> bool:
        """Whether a step could do anything: compute, or hand out what has ended."""
        if self._lifecycle.state == "running":
            return self.has_work
        return bool(self._ended) or any(s.finish_reason is not None for s in list(self._sequences.values()))

    @property
    def state(self) -> State:
        """What steps may do. paused, weights_invalid and released ones compute nothing, but hand out what has ended."""
        return self._lifecycle.state

    @property
    def pause_mode(self) -> PauseMode | None:
        """How the engine was paused last; None while it is not paused, whatever else keeps it from computing."""
        return self._lifecycle.pause_mode

    @property
    def released(self) -> tuple[MemoryTag, ...]:
        """The memory that is given back just now."""
        return self._lifecycle.released

    @property
    def why_incomplete(self) -> str:
        """For people: why the weights cannot be sampled from, and what helps, where that is so."""
        return self._lifecycle.why_incomplete()

    @property
    def is_held(self) -> bool:
        """Whether requests wait for ``resume`` or ``resume_memory``; without either a step computes, or fails."""
        return self._lifecycle.is_held

    @property
    def is_idle(self) -> bool:
        """Whether no request is open and no answer left to hand out."""
        return not self.has_work

    @property
    def holds_keys(self) -> bool:
        """Whether any request holds pages of keys and values."""
        return self._num_holding > 0

    def add_request(self, request: GenerationRequest) -> Sequence:
        """Queue one sample (n = 1). Raises RequestError, QueueFullError or CapacityError before any work starts."""
        with self._lock:
            check_request(
                request,
                vocab_size=self.model.spec.vocab_size,
                end_ids=self._ends(request.sampling),
                context_tokens=self.context_length,
                has_tokenizer=self.tokenizer is not None,
                in_use=request.request_id in self._sequences,
                known_taps=self.model.tap_names,
            )
            sequence = self._sequence(request)
            try:
                self.scheduler.add(sequence)
            except CapacityError as error:
                raise CapacityError(f"request {request.request_id}: {error}") from error
            self._sequences[request.request_id] = sequence
            return sequence

    def watch(self, request_id: str) -> OutputStream:
        """What a request comes to while it runs, for whoever steps the engine; ids that are not running are an error.

        Take from it between steps, never during one. Requests that nobody watches cost nothing.
        """
        with self._lock:
            if request_id not in self._sequences:
                raise RequestError(f"request id {request_id!r} is not running")
            return OutputStream(self._sequences[request_id])

    def abort(self, request_id: str | None = None) -> None:
        """End one request, or all; the next step answers each with what it has. Unknown ids are an error."""
        with self._lock:
            if request_id is not None and request_id not in self._sequences:
                raise RequestError(f"request id {request_id!r} is not running")
            targets = self._sequences.values() if request_id is None else [self._sequences[request_id]]
            for sequence in targets:
                if sequence.finish_reason is None:
                    sequence.finish("abort")

    def discard(self, request_ids: Items[str]) -> list[GenerationOutput]:
        """End requests without a further step: what they came to so far. Ids that are not running are passed over."""
        with self._lock:
            for request_id in request_ids:
                if request_id in self._sequences:
                    self.abort(request_id)
            self._collect()
            gone = set(request_ids)
            outputs = [output for output in self._ended if output.request_id in gone]
            self._ended = [output for output in self._ended if output.request_id not in gone]
            return outputs

    def pause(self, mode: PauseMode) -> None:
        """Compute nothing until ``resume``; requests that come meanwhile wait. Returns between two steps.

        ``mode`` says what becomes of running requests, see PauseMode. Pausing again applies the new mode.
        """
        with self._lock:
            self._collect()
            self._lifecycle.pause(mode)
            if mode == "abort":
                self.abort()
                self._collect()

    def resume(self) -> None:
        """Go on after a pause; of no effect where there is none."""
        with self._lock:
            self._lifecycle.resume()

    def invalidate_weights(self, reason: str) -> None:
        """Refuse to sample until a complete update is committed; all open requests end with what they have."""
        with self._lock:
            self._lifecycle.invalidate(reason)
            self.abort()
            self._collect()

    def release_memory(self, tags: Items[MemoryTag] = MEMORY_TAGS) -> dict[MemoryTag, int]:
        """Give memory back to the system; the bytes freed for each tag (0 where it was released before).

        kv_cache: the KV pool, with all cached prefixes. weights: both copies and what is derived from them; after
        ``resume_memory`` the state is weights_invalid until a complete update is committed. Requests that come
        meanwhile wait. Raises EngineStateError while requests hold keys and values, WeightUpdateError while an
        update of the weights is open; then nothing is released.
        """
        with self._lock:
            self._collect()
            if self.holds_keys:
                raise EngineStateError(
                    f"{self._num_holding} requests hold keys and values ({self.pool.num_owned_pages} pages), so no "
                    "memory can be released; let them end, or pause with mode abort or retract first"
                )
            return self._lifecycle.release(tags)

    def resume_memory(self, tags: Items[MemoryTag] = MEMORY_TAGS) -> dict[MemoryTag, int]:
        """Take released memory again; the bytes taken for each tag (0 where it was not released).

        Raises EngineStateError, with the numbers and before anything is taken, where too little is available.
        """
        with self._lock:
            return self._lifecycle.resume_memory(tags)

    def step(self) -> list[GenerationOutput]:
        """Compute one batch and return the requests that ended. While the engine is held, only the latter.

        An error loses nothing: what has ended is returned by the next step, what runs goes on. Raises
        EngineStateError while the weights are incomplete, NonFiniteLogitsError where requests had to end.
        """
        with self._lock:
            self._collect()
            # What has ended needs no weights, so it is handed out even where nothing can be computed.
            may_compute = not self._lifecycle.is_held and (self.weights.complete or not self._ended)
            if may_compute and self.scheduler.has_work:
                self._compute()
            ended, self._ended = self._ended, []
            return ended

    def step_or_refuse(self) -> list[GenerationOutput]:
        """As ``step``, for those who step until they have their answers: EngineStateError where that had no end."""
        with self._lock:
            if self._lifecycle.is_held and not self.can_step:
                held = (
                    f"{', '.join(self.released)} of the engine is released" if self.released else "the engine is paused"
                )
                raise EngineStateError(f"{held} and {len(self._sequences)} requests wait; resume it first")
            return self.step()

    def put_back(self, outputs: Items[GenerationOutput]) -> None:
        """Leave answers that a step handed to the wrong caller for the next step to hand out."""
        with self._lock:
            self._ended = [*outputs, *self._ended]

    def run(self) -> list[GenerationOutput]:
        """Step until nothing is left; outputs in the order in which they ended.

        Raises EngineStateError where requests wait for the engine or its memory to be resumed.
        """
        outputs: list[GenerationOutput] = []
        try:
            while self.has_work:
                outputs += self.step_or_refuse()
        except BaseException:
            self._ended = outputs + self._ended
            raise
        return outputs

    def generate(
        self, prompts: Items[str] | Items[Items[int]], sampling: SamplingParams | None = None
    ) -> list[list[GenerationOutput]]:
        """Answer each prompt (text or ids) n times: [prompt][copy]. Copy k draws its own noise from (seed, k).

        Without a seed, every prompt gets a fresh one; with one, prompts share it.
        """
        with self._lock:
            if self.has_work:
                raise EngineStateError("generate was called while other requests run; use the async client to share")
            requests = self.requests(prompts, sampling or SamplingParams())
            try:
                for copies in requests:
                    for request in copies:
                        self.add_request(request)
                outputs = {output.request_id: output for output in self.run()}
            except BaseException:
                # Nothing of a call that failed or was interrupted stays behind.
                self.discard([request.request_id for copies in requests for request in copies])
                raise
        return [[outputs[request.request_id] for request in copies] for copies in requests]

    def stream(
        self, prompts: Items[str] | Items[Items[int]], sampling: SamplingParams | None = None
    ) -> Generator[tuple[int, int, OutputDelta], None, None]:
        """As ``generate``, handed out while it is made: (prompt, copy, delta), one delta a token; the last of each
        answer carries its output. Closing the iterator ends what still runs. Errors are raised when it is read.
        """
        return stream_answers(self, prompts, sampling or SamplingParams())

    def requests(
        self, prompts: Items[str] | Items[Items[int]], sampling: SamplingParams
    ) -> list[list[GenerationRequest]]:
        """One request per prompt and copy, with ids and seeds filled in."""
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling must be one SamplingParams for all prompts, not {type(sampling).__name__}")
        if not isinstance(prompts, Items) or isinstance(prompts, (str, bytes, bytearray)):
            raise RequestError(f"prompts must be a list of texts or of token-id lists, not {type(prompts).__name__}")
        return [self._copies(prompt, sampling) for prompt in prompts]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, control tokens in it taken as plain text."""
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer; give token ids instead of text")
        return self.tokenizer.encode(text)

    def begin_update(self, version: int) -> WeightTransaction:
        """Open a weight update; requests go on under the old version until it is committed."""
        with self._lock:
            if "weights" in self.released:
                raise EngineStateError("the memory of the weights is released; resume it before an update")
            return self.weights.begin(version)

    def commit_update(self, transaction: WeightTransaction, expected_checksum: str | None = None) -> Commit:
        """Commit between two steps: no forward pass ever sees two versions."""
        with self._lock:
            return transaction.commit(expected_checksum)

    def check(self) -> None:
        """Raise RuntimeError unless every page is held as often as sequences and the cache say."""
        with self._lock:
            num_cached = self.cache.check() if self.cache is not None else 0
            self.pool.check(num_cached, [sequence.pages for sequence in self._sequences.values()])

    def flush_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their own keys and values."""
        with self._lock:
            if self.cache is not None:
                self.cache.clear()

    def _copies(self, prompt: str | Items[int], sampling: SamplingParams) -> list[GenerationRequest]:
        prompt_ids = tuple(self.encode(prompt)) if isinstance(prompt, str) else token_ids(prompt)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        copies = []
        for k in range(sampling.n):
            self._num_named += 1
            one = replace(sampling, n=1, seed=copy_seed(seed, k))
            copies.append(
                GenerationRequest(request_id=f"generate-{self._num_named}", prompt_ids=prompt_ids, sampling=one)
            )
        return copies

    def _ends(self, sampling: SamplingParams) -> frozenset[int]:
        """The ids that end an answer under these settings."""
        return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.end_ids)

    def _sequence(self, request: GenerationRequest) -> Sequence:
        sampling = request.sampling
        ends = self._ends(sampling)
        return Sequence(
            request,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            max_new_tokens=min(sampling.max_new_tokens, self.context_length - len(request.prompt_ids)),
            end_ids=ends,
            detokenizer=self._detokenizer(sampling),
            edits=make_edits(
                sampling, vocab_size=self.model.spec.vocab_size, prompt_ids=request.prompt_ids, end_ids=ends
            ),
            taps=make_tap_rows(request, size=self.model.spec.hidden_size, dtype=str(self.model.dtype)),
        )

    def _detokenizer(self, sampling: SamplingParams) -> IncrementalDetokenizer | None:
        if self.tokenizer is None:
            return None
        return IncrementalDetokenizer(self.tokenizer, skip_special=sampling.skip_special_tokens)

    def _compute(self) -> None:
        if not self.weights.complete:
            raise EngineStateError(self._lifecycle.why_incomplete())
        chunks = self.scheduler.schedule(self.weights.version)
        self.stats.num_retractions = self.scheduler.num_retractions
        if chunks:
            plan = self._planner.take(chunks)
            if self.config.overlap:
                self._planner.prepare(self.scheduler.running, chunks)
            try:
                failures = self._process(chunks, *self._runner.run(chunks, plan))
            except BaseException:
                for chunk in chunks:
                    chunk.sequence.take_back_last()
                raise
            self.stats.num_prepared_steps = self._planner.num_prepared
            self._collect()
            if failures:
                raise failures.error(self.weights.version, self.discard(failures.request_ids))

    def _process(self, chunks: Items[Chunk], logits: Tensor, prompt_logprobs: dict[int, list[float]]) -> Failures:
        """Take a batch's results into its sequences; those no token could be drawn for."""
        version = self.weights.version
        sampling_chunks = [chunk for chunk in chunks if chunk.samples]
        for chunk in chunks:
            chunk.sequence.record_cached(chunk.count, version)
            if chunk.samples and len(chunk.sequence.token_ids) == chunk.sequence.num_prior:
                # The prompt is done: whoever waits for the same one can take it now.
                self.scheduler.cache_tokens(chunk.sequence, version)
        failures = Failures()
        take_prompt_logprobs(chunks, prompt_logprobs, failures)
        end_scored(chunks, failures)
        num_drawn = take_draws([chunk.sequence for chunk in sampling_chunks], logits, version, failures)
        self.stats.record(chunks, num_sampled=num_drawn, num_partial=len(chunks) - len(sampling_chunks))
        return failures

    @property
    def _num_holding(self) -> int:
        return sum(bool(sequence.pages) for sequence in list(self._sequences.values()))

    def _collect(self) -> None:
        for sequence in self.scheduler.remove_finished(self.weights.version):
            del self._sequences[sequence.request_id]
            self.stats.num_cached_tokens += sequence.num_cache_hits
            self._ended.append(sequence.output())
