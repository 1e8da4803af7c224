"""Which samples of a rollout each optimizer step learns from."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np

from unison.config.schema import TrainConfig
from unison.core.seeds import derive_seed


def num_mini_batches(config: TrainConfig) -> int:
    """Optimizer steps of one pass over a rollout."""
    trainer = config.trainer
    if trainer.mini_batches:
        return trainer.mini_batches
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    return max(samples // trainer.batch_samples, 1) if trainer.batch_samples else 1


def optimizer_steps_per_rollout(config: TrainConfig) -> int:
    return config.trainer.epochs * num_mini_batches(config)


def optimizer_steps(config: TrainConfig) -> int:
    """Of the policy, in the whole run."""
    steps = max(config.trainer.steps - config.critic.only_steps, 0)
    return steps * optimizer_steps_per_rollout(config)


def critic_steps(config: TrainConfig) -> int:
    """Optimizer steps of the critic, in the whole run."""
    return config.trainer.steps * optimizer_steps_per_rollout(config)


def cut_mini_batches(
    rows: Sequence[int], count: int, *, units: Sequence[Hashable] | None = None, seed: int | None
) -> list[list[int]]:
    """Rows cut into ``count`` runs of equally many units (give or take one), in order, or shuffled by ``seed``.

    Rows of one unit stay together; each row is its own by default. Fewer units than ``count``: as many of one unit
    each. A pure function of its arguments.
    """
    together: dict[Hashable, list[int]] = {}
    for row, unit in zip(rows, units if units is not None else rows, strict=True):
        together.setdefault(unit, []).append(row)
    order = list(together.values())
    if seed is not None:
        order = [order[i] for i in np.random.Generator(np.random.Philox(seed)).permutation(len(order))]
    bounds = [len(order) * i // count for i in range(count + 1)]
    return [[row for unit in order[a:b] for row in unit] for a, b in pairwise(bounds) if b > a]


def shuffle_seed(run_seed: int, step: int, epoch: int) -> int:
    """Of the order of pass ``epoch`` over the rollout of training step ``step``."""
    return derive_seed(run_seed, f"mini-batches/{step}", epoch)
