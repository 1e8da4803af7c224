"""What a configuration adds up to, and which settings do not fit together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from unison.algorithms.policy_loss import MAX_LOG_RATIO
from unison.config.schema import AlgorithmConfig, EngineConfig, RolloutConfig, TrainConfig, TrainerConfig
from unison.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArithmetic:
    """Counts of one training step and of the run. Token counts include prompts unless they say response."""

    steps: int
    warmup_steps: int
    prompts_per_step: int
    samples_per_prompt: int
    max_prompt_tokens: int
    max_response_tokens: int
    micro_batch_tokens: int

    @classmethod
    def from_config(cls, config: TrainConfig) -> BatchArithmetic:
        return cls(
            steps=config.trainer.steps,
            warmup_steps=config.trainer.warmup_steps,
            prompts_per_step=config.rollout.prompts_per_step,
            samples_per_prompt=config.rollout.samples_per_prompt,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.rollout.max_new_tokens,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
        )

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def max_row_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def max_response_tokens_per_step(self) -> int:
        return self.samples_per_step * self.max_response_tokens

    @property
    def max_tokens_per_step(self) -> int:
        return self.samples_per_step * self.max_row_tokens

    @property
    def micro_batches_estimate(self) -> int:
        """Micro-batches of a step whose responses are all full and whose prompts are a single token."""
        rows_per_micro_batch = max(self.micro_batch_tokens // (self.max_response_tokens + 1), 1)
        return math.ceil(self.samples_per_step / rows_per_micro_batch)

    def describe(self) -> list[str]:
        """Lines for people: how the batch settings multiply out."""
        warmup = f", the first {self.warmup_steps} warming up" if self.warmup_steps else ""
        alone = " (a longer row gets one of its own)" if self.max_row_tokens > self.micro_batch_tokens else ""
        return [
            f"prompts        {self.prompts_per_step:,} a step x {self.steps:,} steps "
            f"= {self.prompts_per_step * self.steps:,}",
            f"samples        {self.prompts_per_step:,} prompts x {self.samples_per_prompt:,} "
            f"= {self.samples_per_step:,} a step, {self.samples_per_step * self.steps:,} in all",
            f"row            at most {self.max_prompt_tokens:,} prompt + {self.max_response_tokens:,} response "
            f"= {self.max_row_tokens:,} tokens",
            f"tokens         at most {self.max_tokens_per_step:,} a step, "
            f"of which {self.max_response_tokens_per_step:,} responses",
            f"micro-batches  of {self.micro_batch_tokens:,} tokens{alone}; "
            f"about {self.micro_batches_estimate:,} a step if every response is full, prompts on top",
            f"optimizer      1 step per rollout = {self.steps:,} in all{warmup}",
        ]


def check_arithmetic(config: TrainConfig) -> None:
    """Raises one ConfigError naming every group of settings that do not fit together, with values and fix."""
    problems = [
        *_not_finite(config),
        *_rollout_problems(config.rollout, config.algorithm),
        *_capacity_problems(config.rollout, config.engine, config.trainer),
        *_schedule_problems(config.trainer),
        *_algorithm_problems(config.algorithm),
    ]
    if problems:
        raise ConfigError("settings that do not fit together:\n" + "\n".join(f"- {problem}" for problem in problems))


def _not_finite(config: TrainConfig) -> Iterator[str]:
    for section in msgspec.structs.fields(config):
        part = getattr(config, section.name)
        for field in msgspec.structs.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{section.name}.{field.name}={value} must be a finite number"


def _rollout_problems(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.name == "grpo" and rollout.samples_per_prompt == 1:
        yield (
            "rollout.samples_per_prompt=1 with algorithm.name='grpo': a group of one has no contrast, so nothing "
            "would be learnt; use at least 2"
        )
    if rollout.allow_filtered_sampling:
        return
    for name, value, neutral in (
        ("temperature", rollout.temperature, None if rollout.temperature > 0 else "a positive temperature"),
        ("top_p", rollout.top_p, None if rollout.top_p == 1 else "1"),
        ("top_k", rollout.top_k, None if rollout.top_k == -1 else "-1"),
    ):
        if neutral is not None:
            yield (
                f"rollout.{name}={value} samples from a distribution that the trainer does not replay; use {neutral}, "
                "or set rollout.allow_filtered_sampling=true"
            )


def _capacity_problems(rollout: RolloutConfig, engine: EngineConfig, trainer: TrainerConfig) -> Iterator[str]:
    shortest_full_row = rollout.max_new_tokens + 1
    if trainer.micro_batch_tokens < shortest_full_row:
        yield (
            f"trainer.micro_batch_tokens={trainer.micro_batch_tokens} is below rollout.max_new_tokens="
            f"{rollout.max_new_tokens} and a prompt of 1 token: a full response would not fit into a micro-batch; "
            f"use at least {shortest_full_row} and room for the prompt, or lower rollout.max_new_tokens"
        )
    if engine.max_batch_tokens < engine.max_running:
        yield (
            f"engine.max_batch_tokens={engine.max_batch_tokens} is below engine.max_running={engine.max_running}: "
            f"each running sequence takes a token of every step; raise the first or lower the second"
        )
    if 0 < engine.kv_tokens < shortest_full_row:
        yield (
            f"engine.kv_tokens={engine.kv_tokens} is below rollout.max_new_tokens={rollout.max_new_tokens} and a "
            "prompt of 1 token: a full response could never be held; raise it, or use 0 to size it from memory"
        )


def _schedule_problems(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.warmup_steps > trainer.steps:
        yield (
            f"trainer.warmup_steps={trainer.warmup_steps} is above trainer.steps={trainer.steps}: the peak would "
            "never be reached; lower the first or raise the second"
        )
    if trainer.min_learning_rate > trainer.learning_rate:
        yield (
            f"trainer.min_learning_rate={trainer.min_learning_rate} is above trainer.learning_rate="
            f"{trainer.learning_rate}; lower the first or raise the second"
        )
    if trainer.schedule == "constant" and trainer.min_learning_rate > 0:
        yield (
            f"trainer.min_learning_rate={trainer.min_learning_rate} has no effect with trainer.schedule='constant'; "
            "use linear or cosine, or leave it out"
        )


def _algorithm_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    cap = math.exp(MAX_LOG_RATIO)
    if algorithm.clip_high > cap - 1:
        yield (
            f"algorithm.clip_high={algorithm.clip_high:g} has no effect: the ratio is capped at e^{MAX_LOG_RATIO:g} = "
            f"{cap:.3g} anyway; use a value like 0.28"
        )
    if algorithm.clip_low == 0 and algorithm.clip_high == 0:
        yield (
            "algorithm.clip_low=0 and algorithm.clip_high=0 leave the ratio no room: a token whose log-prob has moved "
            "at all in the direction of its advantage is not trained; use values like 0.2 and 0.28"
        )
    default_epsilon = AlgorithmConfig().std_epsilon
    if not algorithm.normalize_std and algorithm.std_epsilon != default_epsilon:
        yield (
            f"algorithm.std_epsilon={algorithm.std_epsilon} has no effect with algorithm.normalize_std=false; "
            "leave it out, or set normalize_std=true"
        )
