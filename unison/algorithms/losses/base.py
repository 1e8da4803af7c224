"""What a policy loss is given and returns. Dims: N trained tokens of whole sequences, S sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""Log-ratios are capped here before exp: e^20 = 4.85e8 is finite in float32, and so is its gradient."""


class PolicyLoss(NamedTuple):
    """Per token [N]. ``loss`` carries the gradient; ``ratio`` and ``clipped`` are for metrics and carry none."""

    loss: Tensor
    ratio: Tensor
    """pi / pi_old of the token, or of its sequence where that is what the loss weighs, at most e^20; exactly 1 where
    both log-probs are bitwise equal."""
    clipped: Tensor
    """Bool: a bound (clip, dual clip, mask, cap of the log-ratio) stopped the token's gradient, or cut its weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBatch:
    """Trained tokens of whole sequences, and nothing else: no padding, no observation.

    A loss returns one value per token. What it means for a whole sequence stands at each of its tokens, so that the
    aggregation over tokens, which knows the global batch, decides how sequences weigh.
    """

    logprobs_N: Tensor
    """Under the policy being trained; the only column that carries a gradient."""
    old_logprobs_N: Tensor
    """Under the policy that the ratio is taken to."""
    advantages_N: Tensor
    sequence_N: Tensor
    """Int64, ascending: which sequence [0, S) a token belongs to."""
    num_sequences: int
    rollout_logprobs_N: Tensor
    """As sampled. The same as ``old_logprobs_N`` unless the trainer computed those itself."""

    def sequence_sum(self, values_N: Tensor) -> Tensor:
        """Sum over each sequence, [S]."""
        return values_N.new_zeros(self.num_sequences).index_add(0, self.sequence_N, values_N)

    def sequence_mean(self, values_N: Tensor) -> Tensor:
        """Mean over the tokens of each sequence, [S]; 0 for one without a token."""
        counts = torch.bincount(self.sequence_N, minlength=self.num_sequences).clamp(min=1)
        return self.sequence_sum(values_N) / counts

    def at_tokens(self, values_S: Tensor) -> Tensor:
        """The value of its sequence at each token, [N]."""
        return values_S[self.sequence_N]
