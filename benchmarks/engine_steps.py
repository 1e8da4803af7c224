"""Brings an engine to a state in which every step decodes the same number of sequences, and times such steps."""

from __future__ import annotations

import math
import random
import time
from typing import Any

from unison import Engine, SamplingParams
from unison.core.records import GenerationRequest


def make_engine(model: str, dtype: str, numerics: str, num_sequences: int, tokens_each: int, **options: Any) -> Engine:
    """An engine whose pool holds ``num_sequences`` of ``tokens_each`` with room to spare for padding and cache."""
    kv_tokens = 2 * num_sequences * (tokens_each + 64)
    running = max(num_sequences, 1)
    return Engine.from_pretrained(
        model, dtype=dtype, numerics=numerics, kv_tokens=kv_tokens, max_running=running, **options
    )


def random_prompt(engine: Engine, num_tokens: int, seed: int) -> tuple[int, ...]:
    noise = random.Random(seed)
    return tuple(noise.randrange(engine.model.spec.vocab_size) for _ in range(num_tokens))


def start_decoding(engine: Engine, batch: int, context: int, max_new_tokens: int, *, one_prompt: bool) -> None:
    """``batch`` sequences with ``context`` tokens each, all prefilled, each to decode ``max_new_tokens`` more.

    With ``one_prompt`` they share it, so that the prefix cache computes it once.
    """
    # The first ones decode while the last ones are still prefilled.
    slack = 8 if one_prompt else 8 + batch * math.ceil(context / engine.config.prefill_chunk)
    for i in range(batch):
        sampling = SamplingParams(max_new_tokens=max_new_tokens + slack, ignore_eos=True, seed=i)
        prompt = random_prompt(engine, context, 0 if one_prompt else i)
        engine.add_request(GenerationRequest(request_id=f"s{i}", prompt_ids=prompt, sampling=sampling))
    while len(engine.scheduler.running) < batch or any(one.num_output == 0 for one in engine.scheduler.running):
        engine.step()
        if not engine.has_work:
            raise SystemExit(f"{batch} sequences of {context} tokens ended before all of them decoded")


def stop_all(engine: Engine) -> None:
    engine.abort()
    engine.run()
    engine.flush_cache()


def time_steps(engine: Engine, num_steps: int) -> list[float]:
    """Seconds of each of ``num_steps`` steps."""
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return times
