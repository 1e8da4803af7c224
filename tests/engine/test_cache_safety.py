"""Random workloads against a dense oracle: what each logit was computed from is replayed without cache or company."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.support import assert_idle, make_engine, request, sample
from unison.core.records import GenerationOutput, GenerationRequest
from unison.engine.engine import Engine
from unison.engine.kv_pool import KvPool
from unison.engine.planner import Planner, Span
from unison.engine.sampler import SamplerRow
from unison.engine.scheduler import Chunk
from unison.engine.sequence import Sequence as EngineSequence
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.ops.padding import EXACT
from unison.ops.vocab import vocabulary_logits
from unison.weights.push import push_weights

CONFIGS: list[dict[str, Any]] = [
    {"kv_tokens": 64 * 5, "max_running": 6, "prefill_chunk": 33, "max_batch_tokens": 64, "new_token_ratio": 0.001},
    {"kv_tokens": 64 * 40, "max_running": 16, "prefill_chunk": 512, "policy": "longest_prefix", "new_token_ratio": 0.7},
    {
        "kv_tokens": 128 * 6,
        "page_size": 128,
        "max_running": 5,
        "prefill_chunk": 70,
        "overlap": True,
        "new_token_ratio": 0.7,
    },
    {"kv_tokens": 64 * 4, "max_running": 4, "prefill_chunk": 9, "prefix_cache": False, "new_token_ratio": 0.001},
]


@dataclass
class Log:
    """What happened to the keys and values of one request: (version, positions written so far), or a loss."""

    events: list[tuple[int, int] | None] = field(default_factory=list)
    """(version, end): positions up to ``end`` were written by the version; None: all were lost."""
    sampled: list[int] = field(default_factory=list)
    """Index into events: what had happened when each token was drawn."""


class Recorder:
    """Notes, from outside, what the engine does to each sequence."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logs: dict[str, Log] = {}
        self._engine = engine
        take, push, run = EngineSequence.take_from_cache, EngineSequence.push_back, engine._runner.run

        def take_from_cache(sequence: EngineSequence, count: int, version: int) -> None:
            self._of(sequence).events.append((version, count))
            take(sequence, count, version)

        def push_back(sequence: EngineSequence) -> None:
            self._of(sequence).events.append(None)
            push(sequence)

        def compute(chunks: Sequence[Chunk], *others: Any) -> Any:
            for chunk in chunks:
                log = self._of(chunk.sequence)
                log.events.append((engine.weights.version, chunk.start + chunk.count))
                if chunk.samples:
                    log.sampled.append(len(log.events))
            return run(chunks, *others)

        monkeypatch.setattr(EngineSequence, "take_from_cache", take_from_cache)
        monkeypatch.setattr(EngineSequence, "push_back", push_back)
        monkeypatch.setattr(engine._runner, "run", compute)

    def _of(self, sequence: EngineSequence) -> Log:
        return self.logs.setdefault(sequence.request_id, Log())


class Oracle:
    """One sequence at a time in a pool of its own, token by token where a chunk is one."""

    def __init__(self, models: Sequence[Decoder]) -> None:
        self._models = models
        spec, dtype = models[0].spec, models[0].dtype
        self._pool = KvPool(spec, 512, 512, dtype)
        self._planner = Planner(self._pool, EXACT, dtype)

    @torch.inference_mode()
    def answer(self, wanted: GenerationRequest, log: Log, count: int) -> tuple[list[int], list[float]]:
        assert wanted.sampling.seed is not None
        ids = list(wanted.prompt_ids)
        written, tokens, logprobs = 0, [], []
        logits = torch.empty(0)
        for i, event in enumerate(log.events):
            if event is None:
                written = 0
                continue
            version, end = event
            if end > written:
                logits = self._write(ids, written, end, version)
                written = end
            for _ in range(log.sampled.count(i + 1)):
                if len(tokens) == count:
                    return tokens, logprobs
                row = SamplerRow(wanted.sampling, wanted.sampling.seed, len(ids))
                (token,), (logprob,) = sample(logits, [row])
                ids.append(token)
                tokens.append(token)
                logprobs.append(logprob)
        return tokens, logprobs

    def _write(self, ids: Sequence[int], start: int, end: int, version: int) -> Tensor:
        """Compute positions [start, end) by one version over what is written; logits of the last."""
        model = self._models[version]
        (pages,) = (self._pool.allocate(1),) if start == 0 and self._pool.num_free_pages else ([0],)
        assert pages is not None
        plan = self._planner.plan([Span(tuple(pages), start, end - start)])
        padding = [0] * (plan.num_rows - (end - start))
        positions = torch.tensor([[*range(start, end), *padding]])
        hidden = model(torch.tensor([*ids[start:end], *padding]), positions, plan, self._pool.layers)
        return vocabulary_logits(hidden[end - start - 1 : end - start], model.head_weight(), EXACT)


def random_requests(noise: random.Random, count: int) -> list[GenerationRequest]:
    """Groups of one prompt, prompts that begin alike, and prompts of their own; around the bounds of pages."""
    stem = [noise.randrange(256) for _ in range(140)]
    requests: list[GenerationRequest] = []
    while len(requests) < count:
        prompt = [noise.randrange(256) for _ in range(noise.choice((1, 5, 63, 64, 65, 128, 130)))]
        if noise.random() < 0.5:
            prompt = stem[: noise.choice((20, 63, 64, 100, 128, 139))] + prompt[:7]
        for _ in range(noise.choice((1, 1, 4))):
            settings = {"max_new_tokens": noise.choice((1, 6, 40)), "seed": noise.getrandbits(64), "ignore_eos": True}
            requests.append(request(f"r{len(requests)}", prompt, **settings))
    return requests[:count]


def serve(
    engine: Engine, requests: list[GenerationRequest], versions: list[dict[str, Tensor]], noise: random.Random
) -> dict[str, GenerationOutput]:
    outputs: dict[str, GenerationOutput] = {}
    pending, version, num_steps = list(requests), 0, 0
    while pending or engine.has_work:
        arriving = min(noise.choice((0, 2, 5)), len(pending))
        for one in pending[:arriving]:
            engine.add_request(one)
        open_ids = {one.request_id for one in requests[: len(requests) - len(pending) + arriving]} - set(outputs)
        del pending[:arriving]
        if open_ids and noise.random() < 0.06:
            engine.abort(noise.choice(sorted(open_ids)))
        num_steps += 1
        if version + 1 < len(versions) and num_steps % 17 == 0:
            version += 1
            push_weights(engine.weights, versions[version], version)
        for output in engine.step():
            assert output.request_id not in outputs, "answered twice"
            outputs[output.request_id] = output
        engine.check()
        assert num_steps < 5000
    return outputs


def versions_of(folder: Path, dtype: torch.dtype) -> tuple[list[Decoder], list[dict[str, Tensor]]]:
    """Three models with different weights, and the weights by name."""
    models, tensors = [], []
    for i in range(3):
        model = load_model(folder, dtype)
        with torch.no_grad():
            for tensor in published_tensors(model).values():
                tensor.mul_(1 + 0.1 * i)
        models.append(model)
        tensors.append({name: tensor.clone() for name, tensor in published_tensors(model).items()})
    return models, tensors


@pytest.mark.parametrize("config", CONFIGS, ids=["tiny pool", "large pool", "planned ahead", "no cache"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_logit_is_that_of_the_dense_replay(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], dtype: torch.dtype
) -> None:
    folder = tiny_model_dir("qwen3")
    models, tensors = versions_of(folder, dtype)
    oracle = Oracle(models)
    seen: Counter[str] = Counter()
    for seed in range(3):
        noise = random.Random(seed)
        engine = make_engine(load_model(folder, dtype), **config)
        with monkeypatch.context() as patch:
            recorder = Recorder(engine, patch)
            requests = random_requests(noise, 26)
            outputs = serve(engine, requests, tensors, noise)
        assert set(outputs) == {one.request_id for one in requests}
        for one in requests:
            output, log = outputs[one.request_id], recorder.logs.get(one.request_id, Log())
            assert (output.token_ids, output.logprobs) == oracle.answer(one, log, len(output.token_ids)), (one, log)
            if output.finish_reason != "abort":
                assert len(output.token_ids) == one.sampling.max_new_tokens
            seen["aborted"] += output.finish_reason == "abort"
            seen["across versions"] += len(output.weight_versions) > 1
        assert_idle(engine)
        seen["cached"] += engine.stats.num_cached_tokens
        seen["retracted"] += engine.stats.num_retractions
        seen["prepared"] += engine.stats.num_prepared_steps
    assert seen["aborted"] and seen["across versions"]
    assert bool(seen["cached"]) == config.get("prefix_cache", True)
    assert seen["retracted"] or config["new_token_ratio"] == 0.7
    assert bool(seen["prepared"]) == config.get("overlap", False)
