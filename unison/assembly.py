"""Builds the parts of a training run from its configuration, cheapest checks first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from unison.algorithms.advantages import AdvantageEstimator, get_advantage
from unison.config.schema import RolloutConfig, TrainConfig
from unison.core.errors import ConfigError, ModelError
from unison.core.protocols import Grader
from unison.core.sampling import SamplingParams
from unison.data.cursor import Cursor
from unison.data.prompts import EncodedPrompt, encode_all
from unison.data.source import load_source
from unison.data.training import TrainingPrompts, open_training, summary
from unison.engine.client import InProcessClient
from unison.engine.end_tokens import end_token_ids
from unison.engine.engine import Engine
from unison.models.loading import load_model, read_config
from unison.models.numerics import NumericsChoice, choose_numerics
from unison.models.registry import read_spec
from unison.models.sources import resolve_model
from unison.models.spec import DecoderSpec
from unison.observability.environment import available_cores
from unison.rewards.base import load_reward
from unison.rollout.collect import PromptTask
from unison.text.tokenizer import Tokenizer
from unison.training.arithmetic import check_arithmetic
from unison.training.trainer import Trainer


@dataclass(slots=True)
class Parts:
    """Everything a run is made of, apart from its folder and its loggers."""

    config: TrainConfig
    model_folder: Path
    numerics: NumericsChoice
    tokenizer: Tokenizer
    engine: Engine
    client: InProcessClient
    trainer: Trainer
    prompts: TrainingPrompts
    eval_tasks: list[PromptTask]
    reward: Grader
    estimator: AdvantageEstimator
    sampling: SamplingParams
    notes: list[str]
    """Automatic choices and what was skipped, for people."""

    def draw(self) -> list[PromptTask]:
        """The next prompts of the run, each keyed by row and epoch: a prompt drawn again gets new noise."""
        return [prompt_task(p) for p in self.prompts.draw(self.config.rollout.prompts_per_step)]

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
    """All parts of a run. Raises a typed error, before weights are loaded, for what cannot work."""
    check_arithmetic(config)
    estimator = get_advantage(config.algorithm.name)
    reward = load_reward(config.reward)
    set_threads(config.run.threads)
    folder = resolve_model(config.model.path)
    spec = read_spec(read_config(folder))
    tokenizer = _tokenizer(folder)
    prompts = open_training(config.data, tokenizer, config.run.seed, held_out=config.eval.problems > 0)
    notes = list(prompts.notes)
    eval_tasks = _eval_tasks(config, tokenizer, notes)
    _check_context(config, spec, prompts.longest, eval_tasks)
    choice = choose_numerics(spec, config.model.dtype, config.model.numerics)
    engine = _engine(config, folder, choice, tokenizer)
    notes += [*choice.notes, *engine.notes]
    return Parts(
        config=config,
        model_folder=folder,
        numerics=choice,
        tokenizer=tokenizer,
        engine=engine,
        client=InProcessClient(engine),
        trainer=_trainer(config, folder, choice, dump_dir),
        prompts=prompts,
        eval_tasks=eval_tasks,
        reward=reward,
        estimator=estimator,
        sampling=training_sampling(config.rollout),
        notes=notes,
    )


def _check_context(config: TrainConfig, spec: DecoderSpec, longest_prompt: int, eval_tasks: list[PromptTask]) -> None:
    """Raise ConfigError for what the engine would refuse in the middle of the run."""
    longest = max([longest_prompt, *(len(task.token_ids) for task in eval_tasks)])
    if longest >= spec.max_positions:
        raise ConfigError(
            f"a prompt has {longest} tokens, which leaves no room in the model's context of {spec.max_positions}; "
            f'set data.max_prompt_tokens={spec.max_positions - 1} and data.on_long_prompt="skip", or shorten it'
        )
    page = config.engine.page_size
    most = -(-min(longest + config.rollout.max_new_tokens, spec.max_positions) // page) * page
    if 0 < config.engine.kv_tokens < most:
        raise ConfigError(
            f"engine.kv_tokens={config.engine.kv_tokens} cannot hold the longest prompt of {longest} tokens and "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}; use at least {most}, or 0 to size it from memory"
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


def _eval_tasks(config: TrainConfig, tokenizer: Tokenizer, notes: list[str]) -> list[PromptTask]:
    if config.eval.problems == 0:
        if config.data.eval is not None:
            notes.append("data.eval is set but eval.problems=0: nothing is evaluated.")
        return []
    source = load_source(config.data, "eval", config.run.seed)
    bad_rows = list(getattr(source, "skipped", ()))
    prompts = encode_all(source, tokenizer, config.data)
    tasks = [prompt_task(prompt) for prompt in islice(prompts, config.eval.problems)]
    for reason, lines in (("held out, broken", bad_rows), ("held out, for their length", prompts.skipped)):
        notes += summary(reason, lines) if lines else []
    if len(tasks) < config.eval.problems:
        notes.append(f"eval.problems={config.eval.problems}, but the held-out set has {len(tasks)}; all are used.")
    return tasks


def _engine(config: TrainConfig, folder: Path, choice: NumericsChoice, tokenizer: Tokenizer) -> Engine:
    return Engine(
        load_model(folder, choice.dtype),
        path=choice.path,
        config=config.engine,
        tokenizer=tokenizer,
        end_ids=end_token_ids(folder, tokenizer.eos_token_id),
    )


def _trainer(config: TrainConfig, folder: Path, choice: NumericsChoice, dump_dir: Path) -> Trainer:
    # The reference is a module of its own: weights swapped in and out would have to be proven equal each time.
    reference = load_model(folder, choice.dtype) if config.algorithm.kl_coef > 0 else None
    masters = load_model(folder, torch.float32)
    model = load_model(folder, choice.dtype) if choice.dtype != torch.float32 else masters
    return Trainer(
        model,
        {name: parameter.data for name, parameter in masters.named_parameters()},
        path=choice.path,
        config=config.trainer,
        algorithm=config.algorithm,
        reference=reference,
        dump_dir=dump_dir,
    )
