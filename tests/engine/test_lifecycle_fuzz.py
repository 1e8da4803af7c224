"""Any order of requests, aborts, pauses, updates and released memory: no page, request or token goes astray."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.engine.support import answer_of, check_pages, make_engine, request
from unison.core.errors import EngineStateError, WeightUpdateError
from unison.core.records import GenerationOutput, GenerationRequest, expand_runs
from unison.core.sampling import SamplingParams
from unison.engine.lifecycle import MEMORY_TAGS, MemoryTag, PauseMode
from unison.engine.streams import OutputStream
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.weights.push import push_weights
from unison.weights.transaction import WeightTransaction

NUM_POLICIES = 3
"""Distinct sets of weights: version v holds set v % NUM_POLICIES."""
Answer = tuple[list[int], list[float]]


@dataclass
class Policies:
    """The weights of each version, and what an engine answers that nothing ever disturbs."""

    models: list[Decoder]
    answers: dict[tuple[int, tuple[int, ...], SamplingParams], Answer] = field(default_factory=dict)

    def weights(self, version: int) -> dict[str, Tensor]:
        return published_tensors(self.models[version % NUM_POLICIES])

    def undisturbed(self, version: int, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> Answer:
        key = (version % NUM_POLICIES, prompt_ids, sampling)
        if key not in self.answers:
            engine = make_engine(self.models[version % NUM_POLICIES], prefix_cache=False)
            self.answers[key] = answer_of(engine.generate([prompt_ids], sampling)[0][0])
        return self.answers[key]


@pytest.fixture(scope="module")
def policies(tiny_model_dir: Callable[..., Path]) -> Policies:
    first = load_model(tiny_model_dir("qwen3", num_hidden_layers=1), torch.float32)
    models = [copy.deepcopy(first) for _ in range(NUM_POLICIES)]
    for i, model in enumerate(models):
        for parameter in model.parameters():
            parameter.data *= 1 + 0.25 * i
    return Policies(models)


@dataclass
class Chain:
    """One answer, over all the requests that resumed it."""

    first: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)


class World:
    """An engine, and beside it the books that say what it must be doing."""

    def __init__(self, policies: Policies, staging: Literal["shadow", "in_place"], seed: int) -> None:
        self.noise = noise = random.Random(f"{staging} {seed}")
        self.policies = policies
        self.engine = make_engine(
            copy.deepcopy(policies.models[0]),
            staging=staging,
            kv_tokens=noise.choice((128, 192, 256)),
            max_running=noise.choice((2, 4, 8)),
            prefill_chunk=noise.choice((7, 32, 512)),
            new_token_ratio=noise.choice((0.01, 0.01, 1.0)),
            prefix_cache=noise.random() < 0.7,
            overlap=noise.random() < 0.3,
            policy=noise.choice(("fcfs", "longest_prefix", "priority")),
        )
        self.staging = staging
        self.version = 0
        self.complete = True
        self.paused = False
        self.released: set[MemoryTag] = set()
        self.update: WeightTransaction | None = None
        self.missing: list[str] = []
        self.chains: dict[str, Chain] = {}
        """By the request that is open."""
        self.streams: dict[str, OutputStream] = {}
        self.answered: set[str] = set()
        self.num_added = 0
        self.num_compared = 0

    def run(self, num_actions: int) -> None:
        actions: dict[Callable[[], None], int] = {
            self.step: 50, self.add: 12, self.abort: 3, self.abort_all: 1, self.pause: 6, self.resume: 8, self.flush: 3,
            self.push: 2, self.begin: 4, self.stage: 6, self.end_update: 3, self.release: 5, self.resume_memory: 7,
            self.invalidate: 1,
        }  # fmt: skip
        for action in self.noise.choices(list(actions), list(actions.values()), k=num_actions):
            action()
            self.check()
        self.finish()

    def check(self) -> None:
        engine = self.engine
        check_pages(engine)
        blocked = "paused" if self.paused else "running"
        state = "released" if self.released else blocked if self.complete else "weights_invalid"
        assert engine.state == state
        assert (engine.pause_mode is not None) == self.paused
        assert set(engine.released) == self.released
        assert engine.weights.version == self.version
        assert engine.has_work == bool(self.chains)
        if engine.holds_keys:
            assert "kv_cache" not in self.released and "weights" not in self.released

    def finish(self) -> None:
        """Whatever was going on, everybody is answered once nothing stands in the way."""
        engine = self.engine
        engine.resume_memory()
        self.released.clear()
        if self.update is not None or not self.complete:
            self.end_update(commit=True)
        if not self.complete:
            self.push()
        engine.resume()
        self.paused = False
        self.check()
        for _ in range(3000):
            if not engine.has_work:
                break
            self.step()
        assert not self.chains, f"{len(self.chains)} requests are never answered"
        assert self.answered == {f"r{i}" for i in range(self.num_added)}
        engine.flush_cache()
        engine.check()
        assert engine.pool.num_free_pages == engine.pool.num_pages

    def add(self) -> None:
        noise = self.noise
        for _ in range(noise.randrange(1, 4)):
            prompt = [7] * noise.choice((0, 54)) + [noise.randrange(3) + 1] * noise.choice((1, 7, 30))
            sampling = {"max_new_tokens": noise.choice((0, 1, 5, 12)), "seed": noise.randrange(2)}
            self._add(Chain(replace(request("x", prompt, **sampling), priority=noise.randrange(3))))

    def _add(self, chain: Chain) -> None:
        name = f"r{self.num_added}"
        self.num_added += 1
        self.engine.add_request(replace(chain.first, request_id=name, output_ids=tuple(chain.token_ids)))
        self.chains[name] = chain
        self.streams[name] = self.engine.watch(name)

    def step(self) -> None:
        engine = self.engine
        can_step, num_steps = engine.can_step, engine.stats.num_steps
        held = self.paused or bool(self.released)
        if not can_step and not held and self.chains:
            with pytest.raises(EngineStateError, match="weights are incomplete"):
                engine.step()
            assert not self.complete
            return
        outputs = engine.step()
        computed = engine.stats.num_steps > num_steps
        assert not computed or (self.complete and not held), "nothing is computed in this state"
        assert (computed or bool(outputs)) == can_step, "a step that can do something does, and no other"
        for stream in self.streams.values():
            delta = stream.take()
            if delta is not None:
                assert set(expand_runs(delta.weight_versions)) <= {self.version}, (
                    "sampled under a version that is not live"
                )
                assert computed or not delta.token_ids
        for output in outputs:
            self._take(output)

    def _take(self, output: GenerationOutput) -> None:
        assert output.request_id not in self.answered
        self.answered.add(output.request_id)
        assert self.streams.pop(output.request_id).is_done
        chain = self.chains.pop(output.request_id)
        versions = expand_runs(output.weight_versions)
        assert len(output.token_ids) == len(output.logprobs) == len(versions)
        assert versions == sorted(versions)
        chain.token_ids += output.token_ids
        chain.logprobs += output.logprobs
        chain.versions |= {*versions, *expand_runs(output.kv_versions)}
        self._compare(chain, ended=output.finish_reason != "abort")
        if output.finish_reason == "abort" and self.noise.random() < 0.5:
            self._add(chain)

    def _compare(self, chain: Chain, ended: bool) -> None:
        if len(chain.versions) > 1:
            return
        version = next(iter(chain.versions), 0)
        ids, logprobs = self.policies.undisturbed(version, chain.first.prompt_ids, chain.first.sampling)
        assert chain.token_ids == ids[: len(chain.token_ids)]
        assert chain.logprobs == logprobs[: len(chain.logprobs)]
        assert not ended or len(chain.token_ids) == len(ids)
        self.num_compared += len(chain.token_ids)

    def abort(self) -> None:
        if self.chains:
            name = self.noise.choice(sorted(self.chains))
            if name in self.engine._sequences:
                self.engine.abort(name)

    def abort_all(self) -> None:
        self.engine.abort()

    def pause(self) -> None:
        modes: tuple[PauseMode, ...] = ("abort", "retract", "retract", "in_place", "in_place")
        mode = self.noise.choice(modes)
        self.engine.pause(mode)
        self.paused = True
        assert self.engine.pause_mode == mode
        assert mode == "in_place" or not self.engine.holds_keys

    def resume(self) -> None:
        self.engine.resume()
        self.paused = False

    def flush(self) -> None:
        self.engine.flush_cache()

    def invalidate(self) -> None:
        self.engine.invalidate_weights("it was asked for")
        self.complete = False
        assert not self.engine.holds_keys

    def push(self) -> None:
        """A whole update at once."""
        if self.update is None and "weights" not in self.released:
            push_weights(self.engine.weights, self.policies.weights(self.version + 1), self.version + 1)
            self.version, self.complete = self.version + 1, True

    def begin(self) -> None:
        version = self.version + self.noise.randrange(1, 3)
        if "weights" in self.released:
            with pytest.raises(EngineStateError, match="resume it before an update"):
                self.engine.begin_update(version)
        elif self.update is None:
            self.update = self.engine.begin_update(version)
            self.missing = sorted(self.policies.weights(version))
            self.noise.shuffle(self.missing)

    def stage(self, most: int = 8) -> None:
        if self.update is None:
            return
        weights = self.policies.weights(self.update.version)
        for _ in range(min(most, len(self.missing))):
            name = self.missing.pop()
            self.update.stage(name, weights[name])
            self.complete = self.complete and self.staging == "shadow"

    def end_update(self, commit: bool | None = None) -> None:
        if self.update is None:
            return
        if commit:
            self.stage(most=1000)
        if self.missing and self.noise.random() < 0.3:
            with pytest.raises(WeightUpdateError):
                self.engine.commit_update(self.update)
        if self.missing:
            self.update.abort()
        else:
            assert self.engine.commit_update(self.update).version == self.update.version
            self.version, self.complete = self.update.version, True
        self.update = None

    def release(self) -> None:
        tags = self.noise.choice((["weights"], ["kv_cache"], list(MEMORY_TAGS)))
        engine = self.engine
        if engine.holds_keys and any(s.finish_reason is None and s.pages for s in engine._sequences.values()):
            with pytest.raises(EngineStateError, match="hold keys and values"):
                engine.release_memory(tags)  # type: ignore[arg-type]
            return
        new = set(tags) - self.released
        if "weights" in new and self.update is not None:
            with pytest.raises(WeightUpdateError, match="is open"):
                engine.release_memory(tags)  # type: ignore[arg-type]
            return
        freed = engine.release_memory(tags)  # type: ignore[arg-type]
        assert {tag for tag, count in freed.items() if count} == new
        self.released |= new
        self.complete = self.complete and "weights" not in new

    def resume_memory(self) -> None:
        tags = self.noise.choice((["weights"], ["kv_cache"], list(MEMORY_TAGS)))
        taken = self.engine.resume_memory(tags)  # type: ignore[arg-type]
        assert {tag for tag, count in taken.items() if count} == set(tags) & self.released
        self.released -= set(tags)


def test_short_sequences_of_anything(policies: Policies) -> None:
    num_compared = num_retracted = 0
    for seed in range(40):
        for staging in ("shadow", "in_place"):
            world = World(policies, staging, seed)  # type: ignore[arg-type]
            world.run(num_actions=30)
            num_compared += world.num_compared
            num_retracted += world.engine.scheduler.num_retractions
    assert num_compared > 1000 and num_retracted > 5, (num_compared, num_retracted)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_thousands_of_sequences_of_anything(policies: Policies, block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        for staging in ("shadow", "in_place"):
            World(policies, staging, seed).run(num_actions=random.Random(seed).choice((20, 60, 150)))  # type: ignore[arg-type]
