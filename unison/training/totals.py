"""What one training step came to, summed over its micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.algorithms.policy_loss import PolicyLoss
from unison.training.batch import MicroBatch


@dataclass(slots=True)
class StepTotals:
    """Sums over trained tokens, and times in seconds; ``metrics`` turns them into logged names."""

    learning_rate: float
    updated: bool = False
    """False where the batch had no trained token, so that no weight moved."""
    loss: float = 0.0
    grad_norm: float = 0.0
    num_micro_batches: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    logp_diff_max: float = 0.0
    logp_diff_sum: float = 0.0
    ratio_max: float = 0.0
    ratio_sum: float = 0.0
    num_clipped: int = 0
    entropy_sum: float = 0.0
    kl_sum: float | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0

    def add(
        self,
        micro: MicroBatch,
        loss: Tensor,
        logprobs: Tensor,
        policy: PolicyLoss,
        kl: Tensor | None,
        entropy: Tensor,
    ) -> None:
        """Take in one micro-batch; the tensors are per trained token [N], all of them selected already."""
        difference = (logprobs.double() - micro.old_logprobs_N.double()).abs()
        self.loss += float(loss)
        self.num_micro_batches += 1
        self.num_tokens += micro.num_tokens
        self.num_trained_tokens += len(micro.targets_N)
        self.logp_diff_max = _largest(self.logp_diff_max, float(difference.max()))
        self.logp_diff_sum += float(difference.sum())
        self.ratio_max = _largest(self.ratio_max, float(policy.ratio.max()))
        self.ratio_sum += float(policy.ratio.double().sum())
        self.num_clipped += int(policy.clipped.sum())
        self.entropy_sum += float(entropy.double().sum())
        if kl is not None:
            self.kl_sum = (self.kl_sum or 0.0) + float(torch.as_tensor(kl).detach().double().sum())

    def metrics(self) -> dict[str, float]:
        if not self.num_trained_tokens:
            # Nothing was measured: a 0 would say that it was, and came out as 0.
            return {"train/learning_rate": self.learning_rate, "train/trained_tokens": 0.0}
        count = self.num_trained_tokens
        seconds = self.forward_s + self.backward_s + self.optimizer_s
        metrics = {
            "train/loss": self.loss,
            "train/grad_norm": self.grad_norm,
            "train/learning_rate": self.learning_rate,
            "train/entropy": self.entropy_sum / count,
            "train/ratio_mean": self.ratio_sum / count,
            "train/ratio_max": self.ratio_max,
            "train/clip_share": self.num_clipped / count,
            "train/tokens": float(self.num_tokens),
            "train/trained_tokens": float(self.num_trained_tokens),
            "train/micro_batches": float(self.num_micro_batches),
            "train/seconds": seconds,
            "train/forward_seconds": self.forward_s,
            "train/backward_seconds": self.backward_s,
            "train/optimizer_seconds": self.optimizer_s,
            "train/tokens_per_s": self.num_tokens / seconds if seconds else 0.0,
            "rollout/logp_diff_max": self.logp_diff_max,
            "rollout/logp_diff_mean": self.logp_diff_sum / count,
        }
        if self.kl_sum is not None:
            metrics["train/kl"] = self.kl_sum / count
        return metrics


def _largest(a: float, b: float) -> float:
    """The larger of two, or NaN where one is: max() would pass over it."""
    return a + b if math.isnan(a) or math.isnan(b) else max(a, b)
