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
_EDGES = (1, 2, 7, 8, 9, 31, 33, 65, 95, 97, 127, 129, 255, 375, 385, 513)
"""Prompt lengths on both sides of each padding step, the ones that could go wrong; some answers cross a step."""


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
    """``count`` prompts of at most ``longest_prompt`` tokens, each answered with 4 to 24 tokens.

    A few natural texts, one prompt of each edge length, and random ones; as many as ``count`` admits.
    """
    noise = random.Random(7)
    texts = [tuple(tokenizer.encode(text)) for text in _TEXTS] if tokenizer is not None else []
    lengths = [length for length in _EDGES if length <= longest_prompt]
    while len(texts) + len(lengths) < count:
        lengths.append(noise.choice([length for length in lengths if length < 150] or lengths))
    noise.shuffle(lengths)
    prompts = [text for text in texts if len(text) <= longest_prompt]
    prompts += [tuple(noise.randrange(vocab_size) for _ in range(length)) for length in lengths]
    return Workload(tuple(prompts[:count]), tuple(noise.randint(4, 24) for _ in prompts[:count]))
