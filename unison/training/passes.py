"""Forward passes over the samples of a rollout without a gradient: log-probs of a model, values of a critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unison.models.decoder import Decoder
from unison.models.value_model import ValueModel
from unison.ops.padding import NumericsPath
from unison.ops.vocab import token_logprobs
from unison.training.batch import MicroBatch, micro_batches
from unison.training.columns import TokenColumns, empty_column


def chosen_logprobs(
    model: Decoder, micro: MicroBatch, path: NumericsPath, chunk_tokens: int, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """(log-probs [N], entropies [N]) of a micro-batch's targets; entropies are 0 where not asked for."""
    hidden = model(micro.tokens_T, micro.positions_1T, micro.plan)
    return token_logprobs(
        hidden.index_select(0, micro.predictors_N),
        model.head_weight(),
        micro.targets_N,
        micro.temperatures_N,
        path=path,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
    )


@torch.no_grad()
def logprob_column(
    model: Decoder,
    columns: TokenColumns,
    chosen_T: Tensor,
    *,
    path: NumericsPath,
    budget_tokens: int,
    chunk_tokens: int,
    on_micro_batch: Callable[[], None] = lambda: None,
) -> Tensor:
    """Log-probs of chosen response tokens, float32 [T]; NaN elsewhere."""
    column = empty_column(columns)
    members = range(len(columns.rows))
    for micro in micro_batches(columns, members, chosen_T, budget_tokens, path=path):
        column[micro.places_N], _ = chosen_logprobs(model, micro, path, chunk_tokens, with_entropy=False)
        on_micro_batch()
    return column


@torch.no_grad()
def value_columns(
    critic: ValueModel,
    columns: TokenColumns,
    members: Sequence[int],
    chosen_T: Tensor,
    *,
    path: NumericsPath,
    budget_tokens: int,
    on_micro_batch: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """(values of the states that chosen tokens were written in [T], of the state after each row's last one [N]).

    Float64; NaN elsewhere.
    """
    values = empty_column(columns, torch.float64)
    finals = torch.full((len(columns.rows),), torch.nan, dtype=torch.float64)
    for micro in micro_batches(columns, members, chosen_T, budget_tokens, path=path, whole=True):
        found = critic(micro.tokens_T, micro.positions_1T, micro.plan).double()
        values[micro.places_N] = found[micro.predictors_N]
        finals[torch.tensor(micro.members)] = found[micro.ends_S]
        on_micro_batch()
    return values, finals
