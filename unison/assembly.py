"""Builds the parts of a training run from its configuration, cheapest checks first."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from unison.algorithms.assemble import assemble
from unison.clients.disk_transport import sweep
from unison.clients.open import open_fleet, run_folder
from unison.config.schema import RolloutConfig, TrainConfig
from unison.core.errors import ConfigError, ModelError
from unison.core.protocols import EngineClient
from unison.core.sampling import SamplingParams
from unison.data.cursor import Cursor
from unison.data.mixture import part_config
from unison.data.prompts import EncodedPrompt
from unison.data.source import load_source
from unison.data.training import TrainingPrompts, open_training
from unison.engine.end_tokens import end_token_ids
from unison.engine.engine import Engine
from unison.evaluation.sets import EvaluationSets
from unison.models.loading import load_model, read_config
from unison.models.numerics import NumericsChoice, choose_numerics
from unison.models.registry import read_spec
from unison.models.saving import COPIED_FILES
from unison.models.sources import resolve_model
from unison.models.spec import DecoderSpec
from unison.observability.environment import available_cores
from unison.observability.hooks import Hooks
from unison.observability.trackers.open import check_trackers
from unison.rewards.base import load_reward
from unison.rewards.combined import WeightedReward
from unison.rewards.scoring import score
from unison.rollout.collect import PromptTask, RolloutFunction
from unison.rollout.filters import GroupFilter, load_filter
from unison.rollout.functions import load_rollout
from unison.rollout.policy_engine import InProcessPolicy, PolicyEngine, ServedPolicy
from unison.text.tokenizer import Tokenizer
from unison.training.arithmetic import check_arithmetic
from unison.training.build import build_trainer
from unison.training.trainer import Trainer


@dataclass(slots=True)
class TrainerParts:
    """What training alone is made of, without engine, data and reward: enough to replay steps."""

    config: TrainConfig
    model_folder: Path
    numerics: NumericsChoice
    trainer: Trainer


@dataclass(slots=True)
class Parts:
    """Everything a run is made of, apart from its folder and its loggers."""

    config: TrainConfig
    model_folder: Path
    text_digest: str
    """Of the files that make ids of texts and end a turn, as they were when they were read."""
    numerics: NumericsChoice
    tokenizer: Tokenizer
    policy: PolicyEngine
    trainer: Trainer
    prompts: TrainingPrompts
    evaluation: EvaluationSets
    reward: WeightedReward
    group_filter: GroupFilter | None
    rollout_function: RolloutFunction | None
    hooks: Hooks
    sampling: SamplingParams
    notes: list[str]
    """Automatic choices and what was skipped, for people."""

    def draw(self, count: int) -> list[PromptTask]:
        """The next prompts of the run, each keyed by row and epoch: a prompt drawn again gets new noise."""
        return [prompt_task(prompt) for prompt in self.prompts.draw(count)]

    def learn(self, reward_means: Mapping[str, float | None]) -> None:
        """Tell the data how its prompts were answered: mean reward by task key, None where there is none."""
        learn(self.cursor, reward_means)

    @property
    def client(self) -> EngineClient:
        """What samples from the policy."""
        return self.policy.client

    @property
    def num_skipped(self) -> int:
        return self.prompts.num_skipped

    @property
    def cursor(self) -> Cursor:
        return self.prompts.cursor

    @property
    def longest_prompt(self) -> int:
        """In tokens, over the training prompts that were looked at."""
        return self.prompts.longest


def build_parts(config: TrainConfig, dump_dir: Path) -> Parts:
    """All parts of a run. Raises a typed error, before weights are loaded, for what cannot work.

    Whoever builds them closes ``policy``.
    """
    check_arithmetic(config)
    check_trackers(config.log)
    algorithm = assemble(config)
    group_filter = load_filter(config.rollout.filter)
    rollout_function = load_rollout(config.rollout.function, config.rollout.timeout_s)
    hooks = Hooks(config.run.hooks)
    reward = load_reward(config.reward, label_column=config.data.label_key)
    set_threads(config.run.threads)
    folder = resolve_model(config.model.path)
    spec = read_spec(read_config(folder))
    tokenizer = _tokenizer(folder)
    prompts = open_training(config.data, tokenizer, config.run.seed, held_out=config.eval.problems > 0)
    evaluation = EvaluationSets.build(config, tokenizer, run_scorer=lambda samples: score(samples, reward))
    notes = [*prompts.notes, *evaluation.notes]
    _check_context(config, spec, prompts.longest, evaluation)
    choice = choose_numerics(spec, config.model.dtype, config.model.numerics)
    trainer = build_trainer(config, algorithm, folder, choice, dump_dir)
    # Last: servers are processes, which whoever holds them has to close.
    policy = _policy(config, folder, choice, tokenizer, trainer)
    notes += [*choice.notes, *policy.notes]
    return Parts(
        config=config,
        model_folder=folder,
        text_digest=_text_digest(folder),
        numerics=choice,
        tokenizer=tokenizer,
        policy=policy,
        trainer=trainer,
        prompts=prompts,
        evaluation=evaluation,
        reward=reward,
        group_filter=group_filter,
        rollout_function=rollout_function,
        hooks=hooks,
        sampling=training_sampling(config.rollout),
        notes=notes,
    )


def check_plan(config: TrainConfig) -> None:
    """Raise what ``build_parts`` would raise before it looks at the model: names, options, rewards, data files."""
    check_arithmetic(config)
    check_trackers(config.log)
    assemble(config)
    load_filter(config.rollout.filter)
    load_rollout(config.rollout.function, config.rollout.timeout_s)
    Hooks(config.run.hooks)
    load_reward(config.reward, label_column=config.data.label_key).close()
    parts = [part_config(config.data, name, part) for name, part in config.data.mix.items()] or [config.data]
    for part in parts if config.trainer.steps else ():
        load_source(part, "train", config.run.seed)


def _text_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in COPIED_FILES:
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def build_prompts(config: TrainConfig) -> TrainingPrompts:
    """The training prompts of a run by themselves, as ``build_parts`` would open them."""
    tokenizer = _tokenizer(resolve_model(config.model.path))
    return open_training(config.data, tokenizer, config.run.seed, held_out=config.eval.problems > 0)


def learn(cursor: Cursor, reward_means: Mapping[str, float | None]) -> None:
    """Hand mean rewards by task key to the order of the data, which may go by them."""
    for key, mean in reward_means.items():
        if mean is not None:
            cursor.record(key.rpartition("@")[0], mean)


def build_trainer_parts(config: TrainConfig) -> TrainerParts:
    """The trainer of a run by itself, as ``build_parts`` would build it."""
    set_threads(config.run.threads)
    folder = resolve_model(config.model.path)
    choice = choose_numerics(read_spec(read_config(folder)), config.model.dtype, config.model.numerics)
    return TrainerParts(config, folder, choice, build_trainer(config, assemble(config), folder, choice, None))


def _check_context(config: TrainConfig, spec: DecoderSpec, longest_prompt: int, evaluation: EvaluationSets) -> None:
    """Raise ConfigError for what the engine would refuse in the middle of the run."""
    longest = max(longest_prompt, evaluation.longest_prompt())
    if longest >= spec.max_positions:
        raise ConfigError(
            f"a prompt has {longest} tokens, which leaves no room in the model's context of {spec.max_positions}; "
            f'set data.max_prompt_tokens={spec.max_positions - 1} and data.on_long_prompt="skip", or shorten it'
        )
    page = config.engine.page_size
    whole = max(longest_prompt + config.rollout.max_new_tokens, evaluation.longest_sequence())
    most = -(-min(whole, spec.max_positions) // page) * page
    if 0 < config.engine.kv_tokens < most:
        raise ConfigError(
            f"engine.kv_tokens={config.engine.kv_tokens} cannot hold the longest prompt and answer, {whole} tokens "
            f"with rollout.max_new_tokens={config.rollout.max_new_tokens}; use at least {most}, or 0 to size it "
            "from memory"
        )
    foreign = [token for token in config.rollout.stop_token_ids if not 0 <= token < spec.vocab_size]
    if foreign:
        raise ConfigError(
            f"rollout.stop_token_ids holds {foreign[0]}, outside the vocabulary [0, {spec.vocab_size - 1}]"
        )


def set_threads(count: int) -> None:
    """Threads of torch: as given, or one per core this process may use."""
    torch.set_num_threads(count or available_cores())


def training_sampling(rollout: RolloutConfig) -> SamplingParams:
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        n=rollout.samples_per_prompt,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
        logprobs="scaled",
    )


def prompt_task(prompt: EncodedPrompt) -> PromptTask:
    row = prompt.row
    return PromptTask(f"{row.row_id}@{prompt.epoch}", tuple(prompt.token_ids), row.sample_metadata())


def _tokenizer(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json; training needs the model's tokenizer beside its weights")
    return Tokenizer.from_folder(folder)


def _policy(
    config: TrainConfig, folder: Path, choice: NumericsChoice, tokenizer: Tokenizer, trainer: Trainer
) -> PolicyEngine:
    sweep(run_folder(config))
    if config.rollout.engine == "in_process":
        return InProcessPolicy(_engine(config, folder, choice, tokenizer))
    end_ids = end_token_ids(folder, tokenizer.eos_token_id)
    policy = ServedPolicy(
        lambda published: open_fleet(config, folder, choice, trainer.model.spec, end_ids, published),
        trainer.published(),
    )
    # The cores may have been divided.
    set_threads(config.run.threads)
    return policy


def _engine(config: TrainConfig, folder: Path, choice: NumericsChoice, tokenizer: Tokenizer) -> Engine:
    return Engine(
        load_model(folder, choice.dtype),
        path=choice.path,
        config=config.engine,
        tokenizer=tokenizer,
        end_ids=end_token_ids(folder, tokenizer.eos_token_id),
    )
