"""What a training step adds up to, and its metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unison.algorithms.losses.base import PolicyLoss
from unison.training.batch import MicroBatch


@dataclass(slots=True)
class StepTotals:
    """Sums over trained tokens of all optimizer steps, and times in seconds; ``metrics`` makes logged names of them."""

    learning_rate: float
    """Of the first optimizer step."""
    updated: bool = False
    """Whether a weight of the policy moved: not where the batch had no trained token, or the critic alone learnt."""
    critic_updated: bool = False
    loss_sum: float = 0.0
    grad_norm_sum: float = 0.0
    grad_norm_max: float = 0.0
    num_optimizer_steps: int = 0
    num_micro_batches: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_compared_tokens: int = 0
    logp_diff_max: float = 0.0
    """Of rollout and trainer, where the trainer still had the weights that the step began with."""
    logp_diff_sum: float = 0.0
    ratio_max: float = 0.0
    ratio_sum: float = 0.0
    num_clipped: int = 0
    entropy_sum: float = 0.0
    kl_sum: float | None = None
    first_reference_diff: float = 0.0
    """Largest difference of rollout and reference by token, where the reference was looked at."""
    pass_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    critic_s: float = 0.0
    others: dict[str, float] = field(default_factory=dict)
    """Metrics of estimators, corrections and critic, as they are logged."""

    def add(
        self,
        micro: MicroBatch,
        loss: Tensor,
        policy: PolicyLoss,
        kl: Tensor | None,
        entropy: Tensor,
    ) -> None:
        """Take in one micro-batch; the tensors are per trained token [N], all of them selected already."""
        self.loss_sum += float(loss)
        self.num_micro_batches += 1
        self.num_tokens += micro.num_tokens
        self.num_trained_tokens += len(micro.targets_N)
        self.ratio_max = _largest(self.ratio_max, float(policy.ratio.max()))
        self.ratio_sum += float(policy.ratio.double().sum())
        self.num_clipped += int(policy.clipped.sum())
        self.entropy_sum += float(entropy.double().sum())
        if kl is not None:
            self.kl_sum = (self.kl_sum or 0.0) + float(torch.as_tensor(kl).detach().double().sum())

    def compare(self, rollout: Tensor, trainer: Tensor) -> None:
        """Take in log-probs of the same tokens under the same weights, from both sides."""
        if not rollout.numel():
            return
        difference = (trainer.double() - rollout.double()).abs()
        self.logp_diff_max = _largest(self.logp_diff_max, float(difference.max()))
        self.logp_diff_sum += float(difference.sum())
        self.num_compared_tokens += rollout.numel()

    @property
    def loss(self) -> float:
        """Mean over the optimizer steps."""
        return self.loss_sum / max(self.num_optimizer_steps, 1)

    @property
    def grad_norm(self) -> float:
        """Mean over the optimizer steps, before clipping."""
        return self.grad_norm_sum / max(self.num_optimizer_steps, 1)

    @property
    def _compared(self) -> dict[str, float]:
        if not self.num_compared_tokens:
            return {}
        return {
            "rollout/logp_diff_max": self.logp_diff_max,
            "rollout/logp_diff_mean": self.logp_diff_sum / self.num_compared_tokens,
        }

    def metrics(self) -> dict[str, float]:
        if not self.num_trained_tokens:
            # Nothing was measured: a 0 would say that it was, and came out as 0.
            return {
                "train/learning_rate": self.learning_rate,
                "train/trained_tokens": 0.0,
                **self._compared,
                **self.others,
            }
        count = self.num_trained_tokens
        seconds = self.pass_s + self.forward_s + self.backward_s + self.optimizer_s + self.critic_s
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
            "train/optimizer_steps": float(self.num_optimizer_steps),
            "train/seconds": seconds,
            "train/forward_seconds": self.forward_s,
            "train/backward_seconds": self.backward_s,
            "train/optimizer_seconds": self.optimizer_s,
            "train/tokens_per_s": self.num_tokens / seconds if seconds else 0.0,
            **self._compared,
        }
        if self.pass_s:
            metrics["train/pass_seconds"] = self.pass_s
        if self.critic_s:
            metrics["critic/seconds"] = self.critic_s
        if self.num_optimizer_steps > 1:
            metrics["train/grad_norm_max"] = self.grad_norm_max
        if self.kl_sum is not None:
            metrics["train/kl"] = self.kl_sum / count
        return metrics | self.others


def _largest(a: float, b: float) -> float:
    """The larger of two, or NaN where one is: max() would pass over it."""
    return a + b if math.isnan(a) or math.isnan(b) else max(a, b)
