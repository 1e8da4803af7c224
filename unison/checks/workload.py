"""The requests that the exactness check sends: fixed, mixed in length, natural text and random ids."""

from __future__ import annotations

import random
from collections.abc import Iterator
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
# Lengths on both sides of each padding step are the ones that could go wrong; some answers cross a step.
_SHORT = (1, 2, 7, 8, 9, 31, 33, 65, 95, 97, 127, 129)
_LONG = (513, 385, 375, 255)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts with their answer lengths; request i of it is the same in every cell."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    def items(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """(prompt, answer length) of each request."""
        return zip(self.prompts, self.lengths, strict=True)

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

    The long ones first, so that the first few hold some: then natural texts, then short ones of mixed lengths. Some
    prompts stand twice in a row.
    """
    noise = random.Random(7)
    long = [length for length in _LONG if length <= longest_prompt]
    short = [length for length in _SHORT if length <= longest_prompt]
    texts = [tuple(tokenizer.encode(text)) for text in _TEXTS] if tokenizer is not None else []
    texts = [text for text in texts if len(text) <= longest_prompt]
    while len(long) + len(texts) + len(short) < count:
        short.append(noise.choice(short))
    noise.shuffle(short)
    prompts = [
        *(_random_ids(noise, vocab_size, length) for length in long),
        *texts,
        *(_random_ids(noise, vocab_size, length) for length in short),
    ]
    for i in range(3, count, 16):
        # Two samples of one prompt: the second may share what the first computed.
        prompts.insert(i, prompts[i - 1])
    return Workload(tuple(prompts[:count]), tuple(noise.randint(4, 24) for _ in prompts[:count]))


def _random_ids(noise: random.Random, vocab_size: int, length: int) -> tuple[int, ...]:
    return tuple(noise.randrange(vocab_size) for _ in range(length))
