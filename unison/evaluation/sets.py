"""The held-out sets of a run, and their evaluation under one weight version."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from unison.config.schema import RewardConfig, TrainConfig
from unison.core.errors import ConfigError, DataError, EvaluationError
from unison.core.protocols import EngineClient
from unison.core.records import Sample
from unison.data.prompts import EncodedPrompt, encode_all
from unison.data.source import load_source
from unison.evaluation.result import NUM_ANSWERS, EvaluationResult, SetResult
from unison.evaluation.scores import Scores, problem_scores, summarise
from unison.evaluation.settings import SetSettings, set_settings
from unison.rewards.base import load_reward
from unison.rewards.scoring import RewardReport, score
from unison.rollout.collect import PromptTask, collect
from unison.text.tokenizer import Tokenizer

Scorer = Callable[[Sequence[Sample]], Awaitable[object] | object]
"""Rewards finished samples in place; what it returns is awaited where it can be, and not looked at. It may have a
``close``, which ends what runs for it."""
OnProgress = Callable[[int, int], None]
"""Hears (samples done, of how many) over all sets."""


class RewardScorer:
    """Scores with the reward of a set."""

    def __init__(self, settings: SetSettings) -> None:
        self._reward = load_reward(settings.reward, label_column=settings.data.label_key)

    def __call__(self, samples: Sequence[Sample]) -> RewardReport:
        return score(samples, self._reward)

    def close(self) -> None:
        _close(self._reward)


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Prompts of one set, ready to be asked, and what scores the answers. Tasks are keyed by set and problem."""

    settings: SetSettings
    problems: tuple[str, ...]
    tasks: tuple[PromptTask, ...]
    scorer: Scorer
    prompts: tuple[str, ...]
    """The first prompts as text."""

    @property
    def num_samples(self) -> int:
        return len(self.tasks) * (self.settings.samples + self.settings.greedy)


@dataclass(frozen=True, slots=True)
class EvaluationSets:
    """All sets of a run. Empty where none is configured."""

    sets: tuple[EvaluationSet, ...]
    run_seed: int
    notes: tuple[str, ...] = ()
    """What was left out or is too short, for people."""
    _close: Callable[[], None] = lambda: None

    @classmethod
    def build(
        cls,
        config: TrainConfig,
        tokenizer: Tokenizer,
        *,
        run_scorer: Scorer | None = None,
        make_scorer: Callable[[SetSettings], Scorer] = RewardScorer,
    ) -> EvaluationSets:
        """Load and encode all sets. ``close`` it at the end.

        ``run_scorer`` is the caller's own and serves the sets that have the run's reward; without it, and for each
        different reward, ``make_scorer`` is called once. Raises ConfigError, DataError or RewardError, naming the
        set where it is about its data, for what cannot work.
        """
        notes: list[str] = []
        scorers = _Scorers(config.reward, run_scorer, make_scorer)
        if config.eval.problems == 0 and config.data.eval is not None:
            notes.append("data.eval is set but eval.problems=0: it is not evaluated.")
        try:
            sets = [_load(one, tokenizer, scorers.of(one), config.run.seed, notes) for one in set_settings(config)]
        except BaseException:
            scorers.close()
            raise
        return cls(tuple(sets), config.run.seed, tuple(notes), scorers.close)

    def close(self) -> None:
        """End what runs for the scorers that were made here."""
        self._close()

    def __bool__(self) -> bool:
        return bool(self.sets)

    def longest_prompt(self) -> int:
        """In tokens, over all sets; 0 where there is none."""
        return max((len(task.token_ids) for one in self.sets for task in one.tasks), default=0)

    def longest_sequence(self) -> int:
        """Most tokens of prompt and answer together."""
        return max(
            (len(task.token_ids) + one.settings.max_new_tokens for one in self.sets for task in one.tasks), default=0
        )

    async def run(
        self, client: EngineClient, weight_version: int, *, on_progress: OnProgress | None = None
    ) -> EvaluationResult:
        """Answer and score every set under the weights that ``client`` serves as ``weight_version``.

        The noise of an answer comes from (run seed, set, problem, copy) alone, so that two evaluations differ by
        the weights alone. Raises EvaluationError where a token was sampled by, or read from keys and values of,
        another version, and DataError where there is no set.
        """
        if not self.sets:
            raise DataError("there is no held-out set to evaluate; set eval.problems, or add [eval.sets.NAME]")
        started = time.perf_counter()
        count = _counter(sum(one.num_samples for one in self.sets), on_progress)
        results = []
        for one in self.sets:
            results.append(await _evaluate(one, client, weight_version, self.run_seed, count))
        return EvaluationResult(
            weight_version=weight_version,
            run_seed=self.run_seed,
            sets=tuple(results),
            seconds=time.perf_counter() - started,
        )


class _Scorers:
    """One scorer for each different reward."""

    def __init__(
        self, run_reward: RewardConfig, run_scorer: Scorer | None, make: Callable[[SetSettings], Scorer]
    ) -> None:
        self._given = [] if run_scorer is None else [(run_reward, run_scorer)]
        self._made: list[tuple[RewardConfig, Scorer]] = []
        self._make = make

    def of(self, settings: SetSettings) -> Scorer:
        for reward, scorer in (*self._given, *self._made):
            if reward == settings.reward:
                return scorer
        scorer = self._make(settings)
        self._made.append((settings.reward, scorer))
        return scorer

    def close(self) -> None:
        for _, scorer in self._made:
            _close(scorer)


def _close(owner: object) -> None:
    close = getattr(owner, "close", None)
    if close is not None:
        close()


def _counter(total: int, on_progress: OnProgress | None) -> Callable[[Sample], None]:
    num_done = 0

    def count(_: Sample) -> None:
        nonlocal num_done
        num_done += 1
        if on_progress is not None:
            on_progress(num_done, total)

    return count


async def _evaluate(
    one: EvaluationSet, client: EngineClient, version: int, run_seed: int, count: Callable[[Sample], None]
) -> SetResult:
    started = time.perf_counter()
    settings = one.settings
    reasons: list[str] = []

    async def scores(greedy: bool) -> Scores:
        samples = await collect(client, one.tasks, settings.sampling(greedy), run_seed=run_seed, on_sample=count)
        _check_version(samples, version, settings)
        outcome = one.scorer(samples)
        if inspect.isawaitable(outcome):
            await outcome
        reasons.extend(f"{s.sample_id}: {s.error or s.status}" for s in samples if not s.scorable())
        pass_k = () if greedy else settings.pass_k
        rows = problem_scores(one.problems, samples)
        return summarise(rows, settings.confidence, pass_k, settings.pass_threshold)

    sampled = await scores(greedy=False)
    greedy = await scores(greedy=True) if settings.greedy else None
    return SetResult(
        settings=settings,
        sampled=sampled,
        greedy=greedy,
        prompts=one.prompts,
        labels=tuple(_label(task) for task in one.tasks[: len(one.prompts)]),
        reasons=tuple(reasons),
        seconds=time.perf_counter() - started,
    )


def _label(task: PromptTask) -> str | None:
    label = task.metadata.get("label")
    return None if label is None else str(label)


def _check_version(samples: Sequence[Sample], version: int, settings: SetSettings) -> None:
    for sample in samples:
        used = {sample.weight_versions[i] for i in sample.sampled_positions()}
        used |= {run.version for run in sample.kv_versions}
        if used - {version}:
            raise EvaluationError(
                f"the evaluation of {settings.where} under weights version {version} is void: {sample.sample_id} was "
                f"answered under version {', '.join(map(str, sorted(used)))}; hold weight updates back until it ends"
            )


def _load(
    settings: SetSettings, tokenizer: Tokenizer, scorer: Scorer, run_seed: int, notes: list[str]
) -> EvaluationSet:
    try:
        source = load_source(settings.data, "eval", run_seed)
        encoded = encode_all(source, tokenizer, settings.data)
        # No more than are asked: a generated source may have millions.
        prompts = list(islice(encoded, settings.problems))
    except (ConfigError, DataError) as error:
        raise type(error)(f"{settings.where}: {error}") from error
    left_out = [*getattr(source, "skipped", ()), *encoded.skipped]
    notes += [f"{settings.where}: skipped: {line}" for line in left_out]
    if not prompts:
        raise DataError(f"{settings.where}: none of its {len(source)} prompts can be used; {(left_out or ['-'])[0]}")
    if settings.problems is not None and len(prompts) < settings.problems:
        notes.append(
            f"{settings.where}: {settings.problems} problems are asked for, but it has {len(prompts)}; all are used."
        )
    problems = tuple(prompt.row.row_id for prompt in prompts)
    return EvaluationSet(
        settings=settings,
        problems=problems,
        tasks=tuple(_task(settings, prompt) for prompt in prompts),
        scorer=scorer,
        prompts=tuple(tokenizer.decode(prompt.token_ids, skip_special=False) for prompt in prompts[:NUM_ANSWERS]),
    )


def _task(settings: SetSettings, prompt: EncodedPrompt) -> PromptTask:
    row = prompt.row
    key = settings.noise_key(f"{row.row_id}@{prompt.epoch}")
    return PromptTask(key, tuple(prompt.token_ids), row.sample_metadata())
