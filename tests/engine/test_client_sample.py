from __future__ import annotations

import asyncio

import pytest

from unison import Engine, SamplingParams
from unison.core.errors import ConfigError, RequestError
from unison.core.records import GenerationOutput
from unison.engine.client import InProcessClient

PROMPTS = ("1+1=", "2+2=", "3+3=")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("tiny-random", dtype="float32")


def test_prompts_sampled_together_are_answered_as_each_alone(engine: Engine) -> None:
    sampling = SamplingParams(n=2, seed=3, max_new_tokens=6)

    async def all_at_once() -> list[list[GenerationOutput]]:
        client = InProcessClient(engine)
        return await asyncio.gather(*(client.sample(prompt, sampling) for prompt in PROMPTS))

    together = asyncio.run(all_at_once())
    for prompt, copies in zip(PROMPTS, together, strict=True):
        (alone,) = engine.generate([prompt], sampling)
        assert [(o.token_ids, o.logprobs, o.seed) for o in copies] == [(o.token_ids, o.logprobs, o.seed) for o in alone]


def test_a_prompt_may_be_token_ids_and_settings_be_left_out(engine: Engine) -> None:
    (answer,) = asyncio.run(InProcessClient(engine).sample(list(b"ab")))
    assert answer.prompt_ids == (97, 98) and answer.sampling.temperature == 1.0


def test_a_prompt_that_cannot_be_served_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        asyncio.run(InProcessClient(engine).sample(""))


def test_an_unknown_engine_option_is_answered_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match="'kv_tokns' is unknown; did you mean kv_tokens"):
        Engine.from_pretrained("tiny-random", kv_tokns=64)
