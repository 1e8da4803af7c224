"""What a configuration adds up to, and which settings do not fit together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from unison.algorithms.correction_recipes import resolve_correction
from unison.config.algorithm import CriticConfig
from unison.config.schema import EngineConfig, RolloutConfig, TrainConfig, TrainerConfig
from unison.core.errors import ConfigError
from unison.training.mini_batches import (
    critic_steps,
    num_mini_batches,
    optimizer_steps,
    optimizer_steps_per_rollout,
)


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
    epochs: int
    mini_batches: int
    optimizer_steps: int

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
            epochs=config.trainer.epochs,
            mini_batches=num_mini_batches(config),
            optimizer_steps=optimizer_steps(config),
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
            f"optimizer      {_count(self.epochs, 'pass', 'passes')} x "
            f"{_count(self.mini_batches, 'mini-batch', 'mini-batches')} of "
            f"{self.samples_per_step // self.mini_batches:,} samples = "
            f"{_count(self.epochs * self.mini_batches, 'step', 'steps')} per rollout, "
            f"{self.optimizer_steps:,} in all{warmup}",
        ]


def check_arithmetic(config: TrainConfig) -> None:
    """Raises one ConfigError naming every group of settings that do not fit together, with values and fix."""
    problems = [
        *_not_finite(config),
        *_rollout_problems(config.rollout),
        *_capacity_problems(config.rollout, config.engine, config.trainer),
        *_mini_batch_problems(config),
        *_truncation_problems(config),
        *_single_step_problems(config),
        *_schedule_problems("trainer", config.trainer, optimizer_steps(config), config.trainer.steps),
        *_schedule_problems("critic", config.critic, critic_steps(config), config.trainer.steps),
    ]
    if problems:
        raise ConfigError("settings that do not fit together:\n" + "\n".join(f"- {problem}" for problem in problems))


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _not_finite(config: TrainConfig) -> Iterator[str]:
    for section in msgspec.structs.fields(config):
        part = getattr(config, section.name)
        for field in msgspec.structs.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{section.name}.{field.name}={value} must be a finite number"


def _rollout_problems(rollout: RolloutConfig) -> Iterator[str]:
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


def _mini_batch_problems(config: TrainConfig) -> Iterator[str]:
    trainer, samples = config.trainer, config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    how = (
        f"rollout.prompts_per_step={config.rollout.prompts_per_step} x rollout.samples_per_prompt="
        f"{config.rollout.samples_per_prompt} = {samples} samples"
    )
    if trainer.batch_samples > samples:
        yield f"trainer.batch_samples={trainer.batch_samples} is more than {how}; lower it, or draw more"
    elif trainer.batch_samples and samples % trainer.batch_samples:
        yield (
            f"trainer.batch_samples={trainer.batch_samples} does not divide {how}; use "
            f"{_nearest_divisor(samples, trainer.batch_samples)}, or other numbers"
        )
    if trainer.mini_batches and samples % trainer.mini_batches:
        yield (
            f"trainer.mini_batches={trainer.mini_batches} does not divide {how}; use "
            f"{_nearest_divisor(samples, trainer.mini_batches)}, or other numbers"
        )
    if trainer.mini_batches and trainer.batch_samples and trainer.mini_batches * trainer.batch_samples != samples:
        yield (
            f"trainer.mini_batches={trainer.mini_batches} x trainer.batch_samples={trainer.batch_samples} = "
            f"{trainer.mini_batches * trainer.batch_samples} is not {how}; leave one of the two out"
        )
    if trainer.shuffle_samples and num_mini_batches(config) == 1:
        yield (
            "trainer.shuffle_samples=true has no effect with a single mini-batch, which holds all samples; set "
            "trainer.mini_batches or trainer.batch_samples, or leave it out"
        )
    if config.critic.only_steps > 0 and config.critic.only_steps >= trainer.steps > 0:
        yield (
            f"critic.only_steps={config.critic.only_steps} leaves none of trainer.steps={trainer.steps} to the policy; "
            "lower the first or raise the second"
        )


def _truncation_problems(config: TrainConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.ignore_eos and not rollout.stop and not rollout.stop_token_ids and config.algorithm.truncated == "mask":
        yield (
            "rollout.ignore_eos=true without a stop string or id cuts every response off, and "
            "algorithm.truncated='mask' trains on none of these; use truncated='keep', or leave ignore_eos out"
        )


def _single_step_problems(config: TrainConfig) -> Iterator[str]:
    """What acts from the second optimizer step of a rollout on, where there is one."""
    if optimizer_steps_per_rollout(config) > 1:
        return
    fix = "set trainer.epochs or trainer.mini_batches, or leave it out"
    if config.critic.value_clip not in (CriticConfig().value_clip, 0.0):
        yield (
            f"critic.value_clip={config.critic.value_clip:g} has no effect with one optimizer step per rollout, before "
            f"which no value has moved; {fix}"
        )
    if config.reference.update == "refreshed" and config.reference.every == 1:
        yield (
            "reference.every=1 with one optimizer step per rollout makes the reference the policy itself whenever it "
            "is looked at, so that algorithm.kl_coef has no effect; raise reference.every, or take several steps"
        )
    for key in ("clip_low", "clip_high", "dual_clip"):
        value = getattr(config.algorithm, key)
        if value is not None and config.algorithm.loss in (None, "clipped", "gspo", "gmpo") and _ratio_is_one(config):
            yield (
                f"algorithm.{key}={value:g} has no effect with one optimizer step per rollout and a ratio to the "
                f"trainer's own log-probs, which is 1; {fix}"
            )


def _ratio_is_one(config: TrainConfig) -> bool:
    return resolve_correction(config.correction).old == "trainer"


def _nearest_divisor(whole: int, wanted: int) -> int:
    return min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: (abs(n - wanted), n))


def _schedule_problems(
    section: str, settings: TrainerConfig | CriticConfig, total_steps: int, num_steps: int
) -> Iterator[str]:
    if settings.warmup_steps > total_steps:
        yield (
            f"{section}.warmup_steps={settings.warmup_steps} is above the {total_steps} optimizer steps of "
            f"trainer.steps={num_steps}: the peak would never be reached; lower the first or raise the second"
        )
    if settings.min_learning_rate > settings.learning_rate:
        yield (
            f"{section}.min_learning_rate={settings.min_learning_rate} is above {section}.learning_rate="
            f"{settings.learning_rate}; lower the first or raise the second"
        )
    if settings.schedule != "constant" and 0 < settings.warmup_steps == total_steps:
        yield (
            f"{section}.schedule={settings.schedule!r} has no effect: {section}.warmup_steps={settings.warmup_steps} "
            f"are all the optimizer steps of trainer.steps={num_steps}; lower the first or raise the second"
        )
    if settings.schedule == "constant" and settings.min_learning_rate > 0:
        yield (
            f"{section}.min_learning_rate={settings.min_learning_rate} has no effect with "
            f"{section}.schedule='constant'; use linear or cosine, or leave it out"
        )
