"""The engine in one process: requests are queued, steps run them, outputs come back."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from torch import Tensor

from unison.config.schema import EngineConfig
from unison.core.errors import CapacityError, ConfigError, EngineStateError, RequestError
from unison.core.records import GenerationOutput, GenerationRequest
from unison.core.sampling import SamplingParams
from unison.core.seeds import copy_seed
from unison.engine.kv_pool import KvPool
from unison.engine.memory import automatic_kv_tokens
from unison.engine.runner import Runner
from unison.engine.sampler import SamplerRow, sample
from unison.engine.scheduler import Chunk, Scheduler
from unison.engine.sequence import Sequence
from unison.engine.stats import EngineStats
from unison.models.decoder import Decoder
from unison.ops.padding import NumericsPath
from unison.text.detokenize import IncrementalDetokenizer
from unison.weights.transaction import Commit, WeightStore, WeightTransaction

if TYPE_CHECKING:
    from unison.text.tokenizer import Tokenizer


class Engine:
    """Samples from one model. ``step`` does one unit of work; ``generate`` runs requests to their end.

    Not thread-safe: one thread at a time calls it (the async client sees to that).
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
    ) -> None:
        self.config = config or EngineConfig()
        self.model = model.requires_grad_(False)
        self.path = path
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.weights = WeightStore(model, version, staging)
        num_tokens = self.config.kv_tokens or automatic_kv_tokens(model.spec, model.dtype, self.config.max_running)
        self.pool = KvPool(
            model.spec, num_tokens, self.config.page_size, model.dtype, poison_freed=self.config.poison_freed_pages
        )
        self.scheduler = Scheduler(self.config, self.pool, path)
        self.stats = EngineStats()
        self._runner = Runner(model, self.pool, path)
        self._sequences: dict[str, Sequence] = {}
        self._num_named = 0

    @classmethod
    def from_pretrained(
        cls, model: str | Path, *, dtype: str = "auto", numerics: str = "auto", **options: Any
    ) -> Engine:
        """An engine over a model folder or short name; ``options`` are fields of EngineConfig."""
        from unison.engine.build import build_engine

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
        return self.scheduler.has_work

    def add_request(self, request: GenerationRequest) -> None:
        """Queue one sample (n = 1). Raises RequestError or CapacityError before any work starts."""
        if request.sampling.n != 1:
            raise RequestError(f"request {request.request_id}: n={request.sampling.n}; queue one request per copy")
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use; give each request an id of its own")
        sequence = self._sequence(request)
        try:
            self.scheduler.add(sequence)
        except CapacityError as error:
            raise CapacityError(f"request {request.request_id}: {error}") from error
        self._sequences[request.request_id] = sequence

    def abort(self, request_id: str | None = None) -> None:
        """End one request, or all; the next step answers each with what it has. Unknown ids are an error."""
        if request_id is not None and request_id not in self._sequences:
            raise RequestError(f"request id {request_id!r} is not running")
        targets = self._sequences.values() if request_id is None else [self._sequences[request_id]]
        for sequence in targets:
            if sequence.finish_reason is None:
                sequence.finish("abort")

    def step(self) -> list[GenerationOutput]:
        """Compute one batch and return the requests that ended with it."""
        finished = self._collect()
        if not self.weights.complete:
            raise EngineStateError(
                "the weights are incomplete: an in_place update began and was not committed; commit a complete update"
            )
        chunks = self.scheduler.schedule()
        if chunks:
            logits = self._runner.run(chunks)
            self._process(chunks, logits)
            finished += self._collect()
        return finished

    def run(self) -> list[GenerationOutput]:
        """Step until nothing is left; outputs in the order in which they ended."""
        outputs: list[GenerationOutput] = []
        while self.has_work:
            outputs += self.step()
        return outputs

    def generate(
        self, prompts: Items[str] | Items[Items[int]], sampling: SamplingParams | None = None
    ) -> list[list[GenerationOutput]]:
        """Answer each prompt (text or ids) n times: [prompt][copy]. Copy k draws its own noise from (seed, k).

        Without a seed, every prompt gets a fresh one; with one, prompts share it.
        """
        if self.has_work:
            raise EngineStateError("generate was called while other requests run; use the async client to share")
        requests = self.requests(prompts, sampling or SamplingParams())
        try:
            for copies in requests:
                for request in copies:
                    self.add_request(request)
        except RequestError:
            self.abort()
            self.step()
            raise
        outputs = {output.request_id: output for output in self.run()}
        return [[outputs[request.request_id] for request in copies] for copies in requests]

    def requests(
        self, prompts: Items[str] | Items[Items[int]], sampling: SamplingParams
    ) -> list[list[GenerationRequest]]:
        """One request per prompt and copy, with ids and seeds filled in."""
        if isinstance(prompts, str):
            raise RequestError("prompts must be a list of texts or of token-id lists, not one text")
        return [self._copies(prompt, sampling) for prompt in prompts]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, control tokens in it taken as plain text."""
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer; give token ids instead of text")
        return self.tokenizer.encode(text)

    def begin_update(self, version: int) -> WeightTransaction:
        """Open a weight update; requests go on under the old version until it is committed."""
        return self.weights.begin(version)

    def commit_update(self, transaction: WeightTransaction, expected_checksum: str | None = None) -> Commit:
        """Commit between two steps: no forward pass ever sees two versions."""
        return transaction.commit(expected_checksum)

    def _copies(self, prompt: str | Items[int], sampling: SamplingParams) -> list[GenerationRequest]:
        prompt_ids = tuple(self.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        copies = []
        for k in range(sampling.n):
            self._num_named += 1
            one = replace(sampling, n=1, seed=copy_seed(seed, k))
            copies.append(GenerationRequest(request_id=f"generate-{self._num_named}", prompt_ids=prompt_ids, sampling=one))
        return copies

    def _sequence(self, request: GenerationRequest) -> Sequence:
        sampling = request.sampling
        num_prompt, num_prior = len(request.prompt_ids), len(request.output_ids)
        self._check_ids(request)
        room = self.context_length - num_prompt
        if room < 1 and sampling.max_new_tokens > 0:
            raise RequestError(
                f"request {request.request_id}: a prompt of {num_prompt} tokens leaves no room in the context "
                f"of {self.context_length}; shorten it to at most {self.context_length - 1}"
            )
        if sampling.stop and self.tokenizer is None:
            raise RequestError(f"request {request.request_id}: stop strings need a tokenizer; use stop_token_ids")
        sequence = Sequence(
            request,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            max_new_tokens=min(sampling.max_new_tokens, max(room, 0)),
            end_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.end_ids),
            detokenizer=IncrementalDetokenizer(self.tokenizer) if self.tokenizer is not None else None,
        )
        if num_prior >= sequence.max_new_tokens:
            sequence.finish("length")
        return sequence

    def _check_ids(self, request: GenerationRequest) -> None:
        if not request.prompt_ids:
            raise RequestError(f"request {request.request_id}: the prompt is empty; give at least one token")
        vocab = self.model.spec.vocab_size
        for token in (*request.prompt_ids, *request.output_ids, *request.sampling.stop_token_ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise RequestError(f"request {request.request_id}: token id {token!r} is outside [0, {vocab - 1}]")

    def _process(self, chunks: Items[Chunk], logits: Tensor) -> None:
        sampling_chunks = [chunk for chunk in chunks if chunk.samples]
        for chunk in chunks:
            chunk.sequence.record_cached(chunk.count, self.weights.version)
        rows = [
            SamplerRow(c.sequence.request.sampling, c.sequence.seed, len(c.sequence.token_ids)) for c in sampling_chunks
        ]
        if rows:
            ids, logprobs = sample(logits, rows)
            for chunk, token, logprob in zip(sampling_chunks, ids, logprobs, strict=True):
                chunk.sequence.append(token, logprob, self.weights.version)
        self.stats.record(chunks, num_sampled=len(rows))

    def _collect(self) -> list[GenerationOutput]:
        outputs = []
        for sequence in self.scheduler.remove_finished():
            del self._sequences[sequence.request_id]
            outputs.append(sequence.output())
        return outputs
