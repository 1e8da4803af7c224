"""GRPO's loss and gradient written out once more, in float64, over a transformers model, one sample at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


@dataclass
class OracleSample:
    prompt: list[int]
    response: list[int]
    old_logprobs: list[float]
    group: str
    reward: float | None
    truncated: bool = False


@dataclass
class OracleSettings:
    clip_low: float
    clip_high: float
    kl_coef: float
    temperature: float
    normalize_std: bool
    epsilon: float


def oracle_advantages(samples: list[OracleSample], settings: OracleSettings) -> list[float]:
    advantages = []
    for sample in samples:
        peers = [other.reward for other in samples if other.group == sample.group and other.reward is not None]
        if sample.reward is None or len(peers) < 2 or len(set(peers)) == 1:
            advantages.append(0.0)
            continue
        mean = sum(peers) / len(peers)
        std = math.sqrt(sum((peer - mean) ** 2 for peer in peers) / (len(peers) - 1))
        advantages.append((sample.reward - mean) / (std + settings.epsilon if settings.normalize_std else 1.0))
    return advantages


def oracle_loss_and_gradient(
    policy_folder: Path, reference_folder: Path, samples: list[OracleSample], settings: OracleSettings
) -> tuple[float, dict[str, Tensor]]:
    policy = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float64, attn_implementation="eager")
    reference = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float64, attn_implementation="eager")
    advantages = oracle_advantages(samples, settings)
    trained = [not sample.truncated and sample.reward is not None for sample in samples]
    num_tokens = sum(len(s.response) for s, keep in zip(samples, trained, strict=True) if keep)
    loss = torch.zeros((), dtype=torch.float64)
    for sample, advantage, keep in zip(samples, advantages, trained, strict=True):
        if keep:
            loss = loss + _sample_loss(policy, reference, sample, advantage, settings) / num_tokens
    loss.backward()
    gradient = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return loss.item(), gradient


def _sample_loss(
    policy: torch.nn.Module,
    reference: torch.nn.Module,
    sample: OracleSample,
    advantage: float,
    settings: OracleSettings,
) -> Tensor:
    logprobs = _logprobs(policy, sample, settings.temperature)
    with torch.no_grad():
        fixed = _logprobs(reference, sample, settings.temperature)
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(sample.response)):
        ratio = torch.exp(logprobs[t] - sample.old_logprobs[t])
        clipped = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        gap = fixed[t] - logprobs[t]
        total = total - surrogate + settings.kl_coef * (torch.exp(gap) - gap - 1)
    return total


def _logprobs(model: torch.nn.Module, sample: OracleSample, temperature: float) -> Tensor:
    ids = torch.tensor([sample.prompt + sample.response])
    logits = model(ids).logits[0, len(sample.prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(sample.response)), torch.tensor(sample.response)]
