"""Builds the trainer of a configuration: policy, reference, critic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from unison.algorithms.assemble import Algorithm
from unison.config.schema import TrainConfig
from unison.models.loading import load_model
from unison.models.numerics import NumericsChoice
from unison.models.sources import resolve_model
from unison.models.value_model import load_value_model
from unison.training.critic import Critic
from unison.training.mini_batches import critic_steps, num_mini_batches, optimizer_steps
from unison.training.reference import Reference
from unison.training.trainer import Plan, Trainer


def build_trainer(
    config: TrainConfig, algorithm: Algorithm, folder: Path, choice: NumericsChoice, dump_dir: Path | None
) -> Trainer:
    """The trainer of a run over the model in ``folder``."""
    masters = load_model(folder, torch.float32)
    initial = {name: parameter.data for name, parameter in masters.named_parameters()}
    model = load_model(folder, choice.dtype) if choice.dtype != torch.float32 else masters
    model.checkpoint_layers = config.trainer.gradient_checkpointing
    return Trainer(
        model,
        initial,
        path=choice.path,
        config=config.trainer,
        algorithm=algorithm,
        plan=training_plan(config),
        reference=_reference(config, algorithm, folder, choice, initial),
        critic=_critic(config, folder, choice) if "values" in algorithm.uses else None,
        dump_dir=dump_dir,
    )


def training_plan(config: TrainConfig) -> Plan:
    """How a rollout of this configuration becomes optimizer steps."""
    return Plan(
        epochs=config.trainer.epochs,
        mini_batches=num_mini_batches(config),
        shuffle=config.trainer.shuffle_samples,
        run_seed=config.run.seed,
        critic_only_steps=config.critic.only_steps,
        total_steps=optimizer_steps(config),
    )


def _reference(
    config: TrainConfig, algorithm: Algorithm, folder: Path, choice: NumericsChoice, initial: Mapping[str, Tensor]
) -> Reference | None:
    if algorithm.kl.coef == 0:
        return None
    # A module of its own: weights swapped in and out would have to be proven equal each time.
    return Reference(load_model(folder, choice.dtype), config.reference, initial)


def _critic(config: TrainConfig, folder: Path, choice: NumericsChoice) -> Critic:
    origin = resolve_model(config.critic.path) if config.critic.path is not None else folder
    masters = load_value_model(origin, torch.float32)
    model = load_value_model(origin, choice.dtype) if choice.dtype != torch.float32 else masters
    model.trunk.checkpoint_layers = config.trainer.gradient_checkpointing
    return Critic(
        model,
        {name: parameter.data for name, parameter in masters.named_parameters()},
        path=choice.path,
        config=config.critic,
        trainer=config.trainer,
        total_steps=critic_steps(config),
    )
