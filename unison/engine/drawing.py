"""Hands a step's results to its sequences, and keeps account of those that got none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unison.core.errors import NonFiniteLogitsError, NoTokenAllowedError
from unison.core.records import GenerationOutput
from unison.engine.sampler import NO_TOKEN, NONE_ALLOWED, sample
from unison.engine.scheduler import Chunk
from unison.engine.sequence import Sequence


@dataclass(slots=True)
class Failures:
    """Requests that had to end in this step."""

    non_finite: list[str] = field(default_factory=list)
    none_allowed: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.non_finite or self.none_allowed)

    @property
    def request_ids(self) -> list[str]:
        return self.non_finite + self.none_allowed

    def error(self, version: int, outputs: Items[GenerationOutput]) -> NonFiniteLogitsError:
        """One error for all of them; outputs: what they had come to."""
        barred = (
            f"under weight version {version} the model gives probability 0 to all tokens that the settings of "
            f"{len(self.none_allowed)} requests ({_names(self.none_allowed)}) allow, so no token was drawn; "
            "see allowed_token_ids, forbidden_token_ids, min_new_tokens"
        )
        if not self.non_finite:
            return NoTokenAllowedError(barred, outputs)
        message = (
            f"the logits of {len(self.non_finite)} requests ({_names(self.non_finite)}) hold NaN or infinity under "
            f"weight version {version}, so no token was drawn; look for NaN in the weights"
        )
        return NonFiniteLogitsError(f"{message}; also, {barred}" if self.none_allowed else message, outputs)


def take_prompt_logprobs(chunks: Items[Chunk], found: Mapping[int, list[float]], failures: Failures) -> None:
    """Give sequences the log-probs of their prompt tokens; by index of the chunk."""
    for i, logprobs in found.items():
        sequence = chunks[i].sequence
        if any(map(math.isnan, logprobs)):
            sequence.finish("abort")
            failures.non_finite.append(sequence.request_id)
        else:
            sequence.take_prompt_logprobs(logprobs)


def end_scored(chunks: Items[Chunk], failures: Failures) -> None:
    """End what waited for log-probs or hidden states of its prompt, and what has broken hidden states."""
    for chunk in chunks:
        sequence = chunk.sequence
        if sequence.finish_reason is not None:
            continue
        if sequence.taps is not None and sequence.taps.is_broken:
            sequence.finish("abort")
            failures.non_finite.append(sequence.request_id)
        elif sequence.only_scores_prompt:
            sequence.end_if_scored()


def take_draws(sequences: Items[Sequence], logits: Tensor, version: int, failures: Failures) -> int:
    """Draw a token for each sequence that still wants one; how many were drawn. Row i of logits is sequences[i]'s."""
    drawing = [i for i, s in enumerate(sequences) if not s.only_scores_prompt and s.finish_reason is None]
    if not drawing:
        return 0
    if len(drawing) < len(sequences):
        logits = logits[torch.tensor(drawing)]
    chosen = [sequences[i] for i in drawing]
    draws = sample(logits, [sequence.sampler_row() for sequence in chosen])
    num_drawn = 0
    for i, (sequence, token, logprob) in enumerate(zip(chosen, draws.ids, draws.logprobs, strict=True)):
        if token in (NO_TOKEN, NONE_ALLOWED):
            sequence.finish("abort")
            (failures.non_finite if token == NO_TOKEN else failures.none_allowed).append(sequence.request_id)
        else:
            sequence.append(token, logprob, version, draws.scores.get(i))
            num_drawn += 1
    return num_drawn


def _names(request_ids: Items[str]) -> str:
    return ", ".join(request_ids[:8]) + (", ..." if len(request_ids) > 8 else "")
