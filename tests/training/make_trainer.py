"""Trainers and columns for tests of training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unison.algorithms.assemble import Algorithm, assemble
from unison.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, ReferenceConfig
from unison.config.schema import ModelConfig, RolloutConfig, TrainConfig, TrainerConfig
from unison.core.records import Sample
from unison.models.loading import load_model
from unison.models.value_model import load_value_model
from unison.ops.padding import EXACT
from unison.training.build import training_plan
from unison.training.columns import TokenColumns
from unison.training.critic import Critic
from unison.training.mini_batches import critic_steps
from unison.training.reference import Reference
from unison.training.rows import build_rows
from unison.training.trainer import Trainer


def make_algorithm(**settings: Any) -> Algorithm:
    return assemble(TrainConfig(model=ModelConfig(path="x"), algorithm=AlgorithmConfig(**settings)))


def columns_of(samples: Sequence[Sample], truncated: Any = "mask") -> TokenColumns:
    return TokenColumns.of(build_rows(samples, truncated))


def make_trainer(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    reference: Path | None = None,
    dump_dir: Path | None = None,
    algorithm: dict[str, Any] | None = None,
    correction: dict[str, Any] | None = None,
    critic: dict[str, Any] | None = None,
    reference_settings: dict[str, Any] | None = None,
    samples: tuple[int, int] = (16, 8),
    **trainer_settings: Any,
) -> Trainer:
    """A trainer over the model in ``folder``; keywords are keys of ``[trainer]``."""
    config = TrainConfig(
        model=ModelConfig(path=str(folder)),
        algorithm=AlgorithmConfig(**algorithm or {}),
        correction=CorrectionConfig(**correction or {}),
        critic=CriticConfig(**critic or {}),
        reference=ReferenceConfig(**reference_settings or {}),
        trainer=TrainerConfig(**trainer_settings),
        rollout=RolloutConfig(prompts_per_step=samples[0], samples_per_prompt=samples[1]),
    )
    chosen = assemble(config)
    masters = load_model(folder, torch.float32)
    model = masters if dtype == torch.float32 else load_model(folder, dtype)
    model.checkpoint_layers = config.trainer.gradient_checkpointing
    initial = {name: parameter.data for name, parameter in masters.named_parameters()}
    return Trainer(
        model,
        initial,
        path=EXACT,
        config=config.trainer,
        algorithm=chosen,
        plan=training_plan(config),
        reference=_reference(reference or folder, dtype, config) if chosen.kl.coef else None,
        critic=_critic(folder, dtype, config) if "values" in chosen.uses else None,
        dump_dir=dump_dir,
    )


def _reference(folder: Path, dtype: torch.dtype, config: TrainConfig) -> Reference:
    initial = {name: parameter.data for name, parameter in load_model(folder, torch.float32).named_parameters()}
    return Reference(load_model(folder, dtype), config.reference, initial)


def _critic(folder: Path, dtype: torch.dtype, config: TrainConfig) -> Critic:
    masters = load_value_model(folder, torch.float32)
    model = masters if dtype == torch.float32 else load_value_model(folder, dtype)
    return Critic(
        model,
        {name: parameter.data for name, parameter in masters.named_parameters()},
        path=EXACT,
        config=config.critic,
        trainer=config.trainer,
        total_steps=critic_steps(config),
    )
