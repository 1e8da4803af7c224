"""The engine against a loop that has no cache, no batch and no chunks: equal to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.support import answer_of, assert_idle, check_pages, make_engine, naive_answer, request
from unison.core.records import GenerationOutput, GenerationRequest, expand_runs
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.models.loading import load_model

END = 258
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_k": 5},
    {"top_p": 0.9, "logprobs": "processed"},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.7, "logprobs": "raw"},
    {"min_p": 0.3, "repetition_penalty": 1.5, "logprobs": "processed"},
    {"temperature": 0.0, "frequency_penalty": 1.0, "presence_penalty": -0.5},
    {"logit_bias": {7: 3.0, END: 6.0}, "min_new_tokens": 4},
    {"allowed_token_ids": (5, 6, 7, 8, END), "forbidden_token_ids": (6,), "top_logprobs": 3},
]
CONFIGS: list[dict[str, Any]] = [
    {"page_size": 64, "prefill_chunk": 1, "max_batch_tokens": 8, "max_running": 8, "kv_tokens": 1024},
    {"page_size": 128, "prefill_chunk": 5, "max_batch_tokens": 17, "max_running": 3, "kv_tokens": 384},
    {"page_size": 64, "prefill_chunk": 512, "max_batch_tokens": 2048, "max_running": 64, "kv_tokens": 4096},
    {"page_size": 192, "prefill_chunk": 50, "max_batch_tokens": 300, "max_running": 6, "kv_tokens": 768},
    {"page_size": 4096, "prefill_chunk": 3, "max_batch_tokens": 9, "max_running": 4, "kv_tokens": 1},
    {"page_size": 64, "prefill_chunk": 33, "max_batch_tokens": 64, "max_running": 5, "kv_tokens": 192},
]
LENGTHS = (1, 2, 8, 31, 50, 63, 64, 65, 127, 128, 129, 140)


def random_requests(noise: random.Random, count: int) -> list[GenerationRequest]:
    """Mixed lengths and settings; some prompts are the same or begin alike, some requests go on from earlier output."""
    requests: list[GenerationRequest] = []
    for i in range(count):
        prompt = [noise.randrange(256) for _ in range(noise.choice(LENGTHS))]
        if requests and noise.random() < 0.3:
            earlier = noise.choice(requests).prompt_ids
            # The same again, or the same up to somewhere inside a page.
            cut = noise.choice((len(earlier), noise.randint(0, len(earlier))))
            prompt = [*earlier[:cut], *prompt[cut:]]
        prior = [noise.randrange(256) for _ in range(noise.choice((0, 0, 0, 1, 5)))]
        settings = noise.choice(SAMPLINGS) | {"seed": noise.choice((3, noise.getrandbits(64)))}
        settings |= {"max_new_tokens": noise.choice((0, 1, 6, 12)), "ignore_eos": noise.random() < 0.5}
        settings["min_new_tokens"] = min(settings.get("min_new_tokens", 0), settings["max_new_tokens"])
        if noise.random() < 0.1 and settings["max_new_tokens"] > 0:
            forced = [*prior, *(noise.choice((END, 3, 4)) for _ in range(3))]
            settings["forced_ids"] = tuple(forced[: settings["max_new_tokens"]])
        requests.append(request(f"r{i}", prompt, prior, **settings))
    return requests


def serve(engine: Engine, requests: list[GenerationRequest], noise: random.Random) -> dict[str, GenerationOutput]:
    """Requests arrive a few at a time, some are aborted; pages are counted at each step."""
    outputs: dict[str, GenerationOutput] = {}
    pending = list(requests)
    while pending or engine.has_work:
        arriving = min(noise.choice((0, 1, 4)), len(pending))
        for one in pending[:arriving]:
            engine.add_request(one)
        open_ids = {one.request_id for one in requests[: len(requests) - len(pending) + arriving]} - set(outputs)
        del pending[:arriving]
        if open_ids and noise.random() < 0.1:
            engine.abort(noise.choice(sorted(open_ids)))
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        check_pages(engine)
    return outputs


def check_output(model: Decoder, wanted: GenerationRequest, output: GenerationOutput) -> None:
    aborted = output.finish_reason == "abort"
    expected = naive_answer(model, wanted, [END], max_tokens=len(output.token_ids) if aborted else None)
    assert answer_of(output) == expected, wanted
    assert expand_runs(output.weight_versions) == [0] * len(output.token_ids)
    num_known = len(wanted.prompt_ids) + len(wanted.output_ids) + len(output.token_ids)
    num_written = len(expand_runs(output.kv_versions))
    if not aborted:
        # Every token but the last has been read, and so written.
        assert num_written == (num_known - 1 if output.token_ids else 0)
        assert output.matched_stop == (END if output.finish_reason == "stop" else None)


@pytest.mark.parametrize("config", CONFIGS, ids=[f"pages of {config['page_size']}" for config in CONFIGS])
@pytest.mark.parametrize("seed", [1, 2])
def test_any_workload_gives_the_tokens_and_logprobs_of_the_naive_loop(
    model: Decoder, config: dict[str, Any], seed: int
) -> None:
    noise = random.Random(seed)
    requests = random_requests(noise, 14)
    engine = make_engine(model, end_ids=[END], **config)
    outputs = serve(engine, requests, noise)
    assert set(outputs) == {one.request_id for one in requests}
    for one in requests:
        check_output(model, one, outputs[one.request_id])
    assert_idle(engine)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_naive_loop_agrees_in_bfloat16_and_in_other_families(
    tiny_model_dir: Callable[..., Path], family: str
) -> None:
    model = load_model(tiny_model_dir(family), torch.bfloat16)
    noise = random.Random(4)
    requests = random_requests(noise, 10)
    engine = make_engine(model, end_ids=[END], **CONFIGS[1])
    outputs = serve(engine, requests, noise)
    for one in requests:
        check_output(model, one, outputs[one.request_id])


def test_greedy_answers_are_those_of_transformers(model: Decoder, tiny_model_dir: Callable[..., Path]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen3"), dtype=torch.float32)
    prompts = [[1, 2, 3], list(range(40, 60))]
    outputs = make_engine(model).generate(prompts, SamplingParams(temperature=0, max_new_tokens=12))
    for prompt, (output,) in zip(prompts, outputs, strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert output.token_ids == expected[0, len(prompt) :].tolist()


def test_chunks_and_decoding_are_counted_apart(model: Decoder) -> None:
    engine = make_engine(model, prefill_chunk=4, max_batch_tokens=8)
    engine.add_request(request("short", prompt=[1], max_new_tokens=5))
    engine.add_request(request("long", prompt=[2] * 9, max_new_tokens=2))
    engine.run()
    stats = engine.stats
    assert stats.num_prefill_tokens == 10, "a one-token prompt and a last chunk of one token are still prompt"
    assert stats.num_decode_tokens == 4 + 1
    assert stats.num_sampled_tokens == 7
    assert (stats.num_steps, stats.num_partial_chunks, stats.max_batch_sequences) == (5, 2, 2)
    assert stats.num_mixed_steps == 2
    assert stats.batch_sizes == {1, 2}
