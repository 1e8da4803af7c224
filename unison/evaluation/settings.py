"""What each evaluation set is asked, worked out from [eval], [eval.sets.NAME] and [rollout]."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from unison.config.schema import DataConfig, EvalSetConfig, RewardConfig, TrainConfig
from unison.core.errors import ConfigError
from unison.core.sampling import SamplingParams
from unison.data.sections import in_section

MAIN = "main"
"""The set of data.eval; its metrics carry no set's name."""
FILE_SOURCES = ("jsonl", "parquet", "datasets")
"""Sources that read what eval.sets.NAME.path names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSettings:
    """One set: its data and reward, and how each problem is asked and judged."""

    name: str
    data: DataConfig
    """As the run's, with this set's source and path in place of data.eval."""
    reward: RewardConfig
    problems: int | None
    """The first so many; None takes all."""
    samples: int
    temperature: float
    greedy: bool
    max_new_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    pass_k: tuple[int, ...]
    pass_threshold: float
    confidence: float

    def sampling(self, greedy: bool = False) -> SamplingParams:
        """Plain sampling, whatever filters training uses; greedily a single answer."""
        return SamplingParams(
            temperature=0.0 if greedy else self.temperature,
            n=1 if greedy else self.samples,
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs="scaled",
        )

    def noise_key(self, problem: str) -> str:
        """The name that a problem's noise is seeded by, beside the run's seed. No two sets share one."""
        return f"eval/{problem}" if self.name == MAIN else f"eval@{self.name}/{problem}"

    @property
    def where(self) -> str:
        """The configuration's words for this set."""
        return "data.eval" if self.name == MAIN else f"eval.sets.{self.name}"


def set_settings(config: TrainConfig) -> list[SetSettings]:
    """The sets in order: that of data.eval where eval.problems > 0, then the named ones.

    Raises ConfigError for a set called main, and for a k of eval.pass_k over a set's samples.
    """
    if MAIN in config.eval.sets:
        raise ConfigError(f"eval.sets.{MAIN}: this name belongs to the set of data.eval; choose another name")
    found = [] if config.eval.problems == 0 else [_settings(config, MAIN, config.data, _main_set(config))]
    for name, chosen in config.eval.sets.items():
        if chosen.path is None and chosen.source in FILE_SOURCES:
            raise ConfigError(
                f"eval.sets.{name}.source is {chosen.source}, but eval.sets.{name}.path names nothing to read; "
                f"give --eval.sets.{name}.path PATH"
            )
        found.append(_settings(config, name, in_section(_data_of(config.data, chosen), f"eval.sets.{name}"), chosen))
    for settings in found:
        _check_pass_k(settings)
    return found


def _main_set(config: TrainConfig) -> EvalSetConfig:
    return EvalSetConfig(problems=config.eval.problems)


def _settings(config: TrainConfig, name: str, data: DataConfig, chosen: EvalSetConfig) -> SetSettings:
    general, rollout = config.eval, config.rollout
    return SetSettings(
        name=name,
        data=data,
        reward=_reward_of(config.reward, chosen, name),
        problems=chosen.problems,
        samples=general.samples if chosen.samples is None else chosen.samples,
        temperature=general.temperature if chosen.temperature is None else chosen.temperature,
        greedy=general.greedy if chosen.greedy is None else chosen.greedy,
        max_new_tokens=rollout.max_new_tokens if chosen.max_new_tokens is None else chosen.max_new_tokens,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
        pass_k=tuple(general.pass_k),
        pass_threshold=general.pass_threshold,
        confidence=general.confidence,
    )


def _reward_of(run: RewardConfig, chosen: EvalSetConfig, name: str) -> RewardConfig:
    if chosen.reward is None:
        if chosen.reward_options:
            raise ConfigError(
                f"eval.sets.{name}.reward_options has no effect without eval.sets.{name}.reward; give that as well"
            )
        return run
    return msgspec.structs.replace(run, function=chosen.reward, options=chosen.reward_options, parts={})


def _data_of(run: DataConfig, chosen: EvalSetConfig) -> DataConfig:
    """How prompts are rendered is the run's, what is read is the set's."""
    return msgspec.structs.replace(
        run,
        source=chosen.source,
        train=None,
        eval=chosen.path,
        layout=chosen.layout,
        prompt_key=chosen.prompt_key,
        label_key=chosen.label_key,
        metadata_key=chosen.metadata_key,
        options=chosen.options,
        filter=None,
        mix={},
        on_bad_row=run.on_bad_row if chosen.source in FILE_SOURCES else "fail",
    )


def _check_pass_k(settings: SetSettings) -> None:
    for k in settings.pass_k:
        if k < 1:
            raise ConfigError(f"eval.pass_k holds {k}; k is a number of samples, 1 or more")
        if k > settings.samples:
            key = "eval.samples" if settings.name == MAIN else f"eval.sets.{settings.name}.samples"
            raise ConfigError(
                f"eval.pass_k holds {k}, but the set {settings.name!r} draws {settings.samples} samples of a problem; "
                f"give --{key} {k} or more, or leave {k} out of eval.pass_k"
            )
    if len(set(settings.pass_k)) != len(settings.pass_k):
        raise ConfigError(f"eval.pass_k={list(settings.pass_k)} holds a k twice; remove one of them")
