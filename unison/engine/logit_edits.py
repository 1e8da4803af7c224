"""What a request changes about its logits before a token is drawn: penalties, bias, masks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from unison.core.sampling import SamplingParams


class LogitEdits:
    """The changes of one request, and what it has to remember of its tokens for them.

    In this order: repetition penalty, frequency and presence penalty, bias, masks. All of it is
    elementwise in float32, so a row comes to the same bits whatever runs beside it.
    """

    def __init__(
        self, sampling: SamplingParams, *, vocab_size: int, prompt_ids: Iterable[int], end_ids: frozenset[int]
    ) -> None:
        self._sampling = sampling
        self._num_output = 0
        self._seen_V = _mask(prompt_ids, vocab_size) if sampling.repetition_penalty != 1.0 else None
        counts = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        self._counts_V = torch.zeros(vocab_size) if counts else None
        self._bias = _bias(sampling)
        self._barred_V = _barred(sampling, vocab_size)
        self._end_ids = torch.tensor(sorted(end_ids), dtype=torch.int64) if sampling.min_new_tokens > 0 else None

    def observe(self, token: int) -> None:
        """Take note of an output token."""
        self._num_output += 1
        if self._seen_V is not None:
            self._seen_V[token] = True
        if self._counts_V is not None:
            self._counts_V[token] += 1.0

    def apply(self, logits_V: Tensor) -> Tensor:
        """The changed copy of a row of logits, float32; what must not be drawn is at -inf."""
        settings = self._sampling
        row = logits_V.to(torch.float32, copy=True)
        if self._seen_V is not None:
            penalised = torch.where(row > 0, row / settings.repetition_penalty, row * settings.repetition_penalty)
            row = torch.where(self._seen_V, penalised, row)
        if self._counts_V is not None:
            row -= self._counts_V * settings.frequency_penalty
            row -= (self._counts_V > 0) * settings.presence_penalty
        if self._bias is not None:
            ids, values = self._bias
            row[ids] += values
        if self._barred_V is not None:
            row.masked_fill_(self._barred_V, -math.inf)
        if self._end_ids is not None and self._num_output < settings.min_new_tokens:
            row[self._end_ids] = -math.inf
        return row


def make_edits(
    sampling: SamplingParams, *, vocab_size: int, prompt_ids: Iterable[int], end_ids: Iterable[int]
) -> LogitEdits | None:
    """None for a request that leaves its logits as they are. end_ids: whatever ends the answer."""
    if not sampling.edits_logits:
        return None
    ends = frozenset(token for token in end_ids if token < vocab_size)
    return LogitEdits(sampling, vocab_size=vocab_size, prompt_ids=prompt_ids, end_ids=ends)


def _mask(ids: Iterable[int], vocab_size: int) -> Tensor:
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[torch.tensor(list(ids), dtype=torch.int64)] = True
    return mask


def _bias(sampling: SamplingParams) -> tuple[Tensor, Tensor] | None:
    if not sampling.logit_bias:
        return None
    ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
    return ids, torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)


def _barred(sampling: SamplingParams, vocab_size: int) -> Tensor | None:
    if sampling.allowed_token_ids is None and not sampling.forbidden_token_ids:
        return None
    barred = _mask(sampling.forbidden_token_ids, vocab_size)
    if sampling.allowed_token_ids is not None:
        barred |= ~_mask(sampling.allowed_token_ids, vocab_size)
    return barred
