"""The requests that the exactness check sends: fixed, mixed in length, natural text and random ids."""

from __future__ import annotations

import random
from dataclasses import dataclass

from unison.core.records import GenerationRequest
from unison.core.sampling import SamplingParams
from unison.core.seeds import derive_seed
from unison.text.tokenizer import Tokenizer

_TEXTS = (
    "The capital of France is",
    "3+5=8\n12+4=16\n7+9=",
    "Once upon a time, in a small house by the sea, there lived an old woman who counted the waves.",
    "def add(a, b):\n    return",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts with their answer lengths; request i of it is the same in every cell."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    def requests(self, temperature: float, count: int) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                request_id=f"r{i}",
                prompt_ids=self.prompts[i],
                sampling=SamplingParams(
                    temperature=temperature,
                    max_new_tokens=self.lengths[i],
                    seed=derive_seed("exactness", i),
                    ignore_eos=True,
                ),
            )
            for i in range(count)
        ]


def make_workload(vocab_size: int, tokenizer: Tokenizer | None, count: int, longest_prompt: int) -> Workload:
    """``count`` prompts of 1 to ``longest_prompt`` tokens, each answered with 4 to 24 tokens."""
    noise = random.Random(7)
    texts = [tuple(tokenizer.encode(text)) for text in _TEXTS] if tokenizer is not None else []
    prompts = [text for text in texts if len(text) <= longest_prompt][:count]
    while len(prompts) < count:
        # Lengths on both sides of each padding step are the ones that could go wrong.
        length = noise.choice((1, 2, 7, 8, 9, 31, 33, 65, 95, 97, 127, 129, noise.randint(3, longest_prompt)))
        prompts.append(tuple(noise.randrange(vocab_size) for _ in range(min(length, longest_prompt))))
    return Workload(tuple(prompts), tuple(noise.randint(4, 24) for _ in prompts))
