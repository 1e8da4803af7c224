"""The whole way from logits to a token, written down once more in float64 and one row at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from unison.core.sampling import SamplingParams

Floats = NDArray[np.float64]


def edited_logits(
    logits: Floats, settings: SamplingParams, prompt: Sequence[int], output: Sequence[int], ends: Collection[int]
) -> Floats:
    row = logits.copy()
    for token in {*prompt, *output}:
        penalty = settings.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in output:
        row[token] -= settings.frequency_penalty
    for token in set(output):
        row[token] -= settings.presence_penalty
    for token, bias in settings.logit_bias.items():
        row[token] += bias
    for token in range(len(row)):
        allowed = settings.allowed_token_ids is None or token in settings.allowed_token_ids
        early = len(output) < settings.min_new_tokens and token in ends
        if not allowed or token in settings.forbidden_token_ids or early:
            row[token] = -np.inf
    return row


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()  # type: ignore[no-any-return]


def probabilities(edited: Floats, settings: SamplingParams) -> Floats:
    """The distribution drawn from; lower ids first where equals are cut."""
    if settings.temperature == 0:
        return np.eye(len(edited))[int(edited.argmax())]  # type: ignore[no-any-return]
    whole = softmax(edited / settings.temperature)
    order = [int(i) for i in np.argsort(-whole, kind="stable")]
    if settings.top_k > 0:
        order = order[: settings.top_k]
    if settings.top_p < 1:
        held, kept = 0.0, []
        for token in order:
            kept.append(token)
            held += whole[token] / whole[order].sum()
            if held >= settings.top_p:
                break
        order = kept
    order = [token for token in order if whole[token] >= settings.min_p * whole.max()]
    cut = np.zeros_like(whole)
    cut[order] = whole[order]
    return cut / cut.sum()  # type: ignore[no-any-return]
