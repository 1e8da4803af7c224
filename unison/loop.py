"""The training loop: it reads like the algorithm."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from unison.assembly import Parts, build_parts
from unison.config.dump import dump_toml
from unison.config.schema import TrainConfig
from unison.core.errors import NumericsError, RewardError, UnisonError
from unison.core.records import Sample
from unison.evaluation.files import write_evaluation
from unison.models.saving import export_model
from unison.observability.console import ConsoleSink
from unison.observability.plot import draw_plot
from unison.observability.progress import Progress
from unison.observability.run_folder import RunFolder, check_unused
from unison.observability.sinks import JsonlSink, MultiSink
from unison.rewards.scoring import RewardReport, score
from unison.rollout.collect import PromptTask, collect
from unison.rollout.summary import rollout_metrics
from unison.training.arithmetic import BatchArithmetic
from unison.training.rows import build_rows, reward_columns
from unison.training.totals import StepTotals
from unison.weights.checksum import tensors_digest
from unison.weights.push import push_weights

Metrics = dict[str, float]
_NUM_FAILURES_SHOWN = 3
_NUM_FLAT_STEPS = 3


@dataclass(slots=True)
class RunResult:
    """What a finished run came to; also in the folder's summary.json."""

    folder: Path
    weights_digest: str
    evaluations: dict[int, Metrics] = field(default_factory=dict)


def run_training(
    config: TrainConfig, command: Sequence[str] = (), sources: Mapping[str, str] | None = None
) -> RunResult:
    """Train as configured into the run folder. ``command`` and ``sources`` are written down there."""
    path = Path(config.run.dir or Path("runs") / config.run.name)
    check_unused(path)
    started = time.perf_counter()
    parts = build_parts(config, dump_dir=path / "failures")
    folder = RunFolder.create(path, dump_toml(config, sources), command, numerics=_numerics(parts))
    with Progress(config.log.progress) as progress:
        run = Run(parts, folder, progress)
        run.introduce()
        try:
            asyncio.run(run.train())
        except BaseException:
            run.close()
            folder.discard_unless_begun()
            raise
        run.close()
        return run.finish(time.perf_counter() - started)


class Run:
    """A run under way: its parts, its folder, and where it reports to."""

    def __init__(self, parts: Parts, folder: RunFolder, progress: Progress) -> None:
        self.parts = parts
        self.config = parts.config
        self.folder = folder
        self._progress = progress
        self._sinks = MultiSink(
            [JsonlSink(folder.metrics), ConsoleSink(self.config.trainer.steps, write=progress.print)]
        )
        self._evaluations: dict[int, Metrics] = {}
        self._num_flat_steps = 0

    async def train(self) -> None:
        """Baseline, then steps: collect, score, estimate, update, publish; evaluate when it is due."""
        if self.parts.evaluation and self.config.eval.before:
            self._sinks.log(0, await self.evaluate(0))
        for step in range(1, self.config.trainer.steps + 1):
            started = time.perf_counter()
            samples, metrics = await self.rollout(step)
            advantages = self.advantages(samples)
            totals = self.update(samples, advantages)
            metrics |= totals.metrics() | self.publish(step, totals)
            self.note_missing_contrast(step, metrics)
            metrics |= self.accounts(metrics, totals, time.perf_counter() - started)
            self.write_rollouts(step, samples, advantages)
            if self._evaluation_due(step):
                metrics |= await self.evaluate(step)
            self._sinks.log(step, metrics)

    async def rollout(self, step: int) -> tuple[list[Sample], Metrics]:
        """Draw the step's samples and score them."""
        started = time.perf_counter()
        samples = await self._collect("rollout", self.parts.draw())
        seconds = time.perf_counter() - started
        self.score(samples, step)
        scored = time.perf_counter() - started - seconds
        metrics = rollout_metrics(samples)
        metrics["rollout/seconds"] = seconds
        metrics["rollout/tokens_per_s"] = metrics["rollout/tokens"] / max(seconds, 1e-9)
        metrics["reward/seconds"] = scored
        return samples, metrics

    def score(self, samples: Sequence[Sample], step: int) -> RewardReport:
        """Reward every finished sample in place; failures are shown, and stop a run that never scored one."""
        report = score(samples, self.parts.reward)
        for failure in report.failures[:_NUM_FAILURES_SHOWN]:
            self._progress.print(f"note: step {step}: unscorable: {failure.sample_id}: {failure.reason}")
        if len(report.failures) > _NUM_FAILURES_SHOWN:
            self._progress.print(f"note: step {step}: {len(report.failures)} samples were unscorable in all")
        if step <= 1 and report.failures and not report.num_scored:
            raise RewardError(
                f"the reward {self.config.reward.function!r} could score none of the first {len(samples)} samples; "
                f"the first one: {report.failures[0].reason}"
            )
        return report

    def advantages(self, samples: Sequence[Sample]) -> Tensor:
        rewards, group_ids, valid = reward_columns(samples)
        algorithm = self.config.algorithm
        return self.parts.estimator(
            rewards, group_ids, valid, normalize_std=algorithm.normalize_std, epsilon=algorithm.std_epsilon
        )

    def update(self, samples: Sequence[Sample], advantages: Tensor) -> StepTotals:
        """One optimizer step; under exact numerics the trainer must find the rollout's very log-probs."""
        rows = build_rows(samples, advantages, self.config.algorithm.truncated)
        trainer = self.parts.trainer
        is_first = trainer.num_steps == 0
        totals = trainer.step(rows, on_progress=lambda done, total: self._progress.update("training", done, total))
        if self.parts.numerics.path.name == "exact":
            _check_exact(totals, is_first)
        return totals

    def note_missing_contrast(self, step: int, metrics: Metrics) -> None:
        """Say so when steps in a row had nothing to learn from."""
        self._num_flat_steps = self._num_flat_steps + 1 if metrics["rollout/no_contrast_share"] == 1 else 0
        if self._num_flat_steps == _NUM_FLAT_STEPS:
            self._progress.print(
                f"note: step {step}: in the last {_NUM_FLAT_STEPS} steps all samples of each prompt scored alike, so "
                "nothing was learnt; make the task easier or harder, or look at the reward in rollouts.jsonl"
            )

    def publish(self, step: int, totals: StepTotals) -> Metrics:
        """Give the engine the new weights; nothing moves where no token was trained."""
        started = time.perf_counter()
        if totals.updated:
            push_weights(self.parts.engine.weights, self.parts.trainer.published(), step)
        else:
            self._progress.print(f"note: step {step}: no token was left to train on; the weights stay as they are")
        return {
            "weights/version": float(self.parts.engine.weights.version),
            "weights/seconds": time.perf_counter() - started,
        }

    async def evaluate(self, step: int) -> Metrics:
        """Accuracy on the held-out sets under the engine's present weights; the whole result goes to evaluations/."""
        result = await self.parts.evaluation.run(
            self.parts.client,
            self.parts.engine.weights.version,
            on_progress=lambda done, total: self._progress.update("evaluation", done, total),
        )
        self._progress.idle()
        for note in result.notes():
            self._progress.print(f"note: step {step}: {note}")
        if step == 0:
            result.require_scores()
        try:
            write_evaluation(self.folder.path, step, result)
        except OSError as error:
            self._progress.print(f"note: step {step}: the evaluation's answers were not written: {error}")
        metrics = result.metrics()
        self._evaluations[step] = metrics
        return metrics

    def accounts(self, metrics: Metrics, totals: StepTotals, seconds: float) -> Metrics:
        """Where the step's time and memory went."""
        busy = metrics["rollout/seconds"] + totals.forward_s + totals.backward_s
        return {
            "step/seconds": seconds,
            "step/other_share": max(0.0, 1 - busy / seconds),
            "memory/peak_bytes": float(peak_memory_bytes()),
            "data/epoch": float(self.parts.cursor.epoch),
            "data/skipped": float(self.parts.num_skipped),
        }

    def write_rollouts(self, step: int, samples: Sequence[Sample], advantages: Tensor) -> None:
        count = self.config.log.rollouts_per_step
        values = advantages[:count].tolist()
        self.folder.write_rollouts(step, samples[:count], values, self._decode)

    def introduce(self) -> None:
        """What runs, where, and what the batch settings come to."""
        parts, config = self.parts, self.config
        for note in parts.notes:
            self._progress.print(f"note: {note}")
        spec = parts.engine.model.spec
        self._progress.print(
            f"model {config.model.path} ({spec.family}, {spec.num_parameters() / 1e6:.1f} M parameters), "
            f"{parts.numerics.dtype_name}, numerics {parts.numerics.path.name}, seed {config.run.seed}"
        )
        arithmetic = replace(BatchArithmetic.from_config(config), max_prompt_tokens=parts.longest_prompt)
        for line in arithmetic.describe():
            self._progress.print(f"  {line}")
        self._progress.print(f"run folder {self.folder.path}")

    def finish(self, seconds: float) -> RunResult:
        """Export, plot, summary, and the last words."""
        digest = tensors_digest(self.parts.trainer.published())
        result = RunResult(self.folder.path, digest, self._evaluations)
        problem: UnisonError | None = None
        if self.config.log.export:
            try:
                export_model(self.parts.trainer.model, self.parts.model_folder, self.folder.model)
            except UnisonError as error:
                problem = error
        self._write_summary(result, seconds)
        if self.config.log.plot:
            self._draw_plot()
        for line in _last_words(self.folder, self.config, result, seconds):
            self._progress.print(line)
        if problem is not None:
            # The trained model is what the run was for: without it the run has failed, but all else is written.
            raise problem
        return result

    def _write_summary(self, result: RunResult, seconds: float) -> None:
        try:
            self.folder.write_summary(self._summary(result, seconds))
        except OSError as error:
            self._progress.print(f"note: no summary: {error}")

    def _draw_plot(self) -> None:
        try:
            draw_plot(self.folder.metrics, self.folder.plot, self.config.run.name)
        except (UnisonError, OSError) as error:
            # The run is done and saved: a missing picture must not make it look failed.
            self._progress.print(f"note: no plot: {error}")

    def close(self) -> None:
        self.parts.evaluation.close()
        self._sinks.close()
        self.folder.close()

    async def _collect(self, phase: str, tasks: Sequence[PromptTask]) -> list[Sample]:
        num_done, total = 0, len(tasks) * self.parts.sampling.n

        def count(_: Sample) -> None:
            nonlocal num_done
            num_done += 1
            self._progress.update(phase, num_done, total)

        return await collect(
            self.parts.client, tasks, self.parts.sampling, run_seed=self.config.run.seed, on_sample=count
        )

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.eval.every
        return bool(self.parts.evaluation) and (step == self.config.trainer.steps or (every > 0 and step % every == 0))

    def _decode(self, ids: Sequence[int]) -> str:
        return self.parts.tokenizer.decode(ids, skip_special=False)

    def _summary(self, result: RunResult, seconds: float) -> dict[str, Any]:
        return {
            "name": self.config.run.name,
            "steps": self.parts.trainer.num_steps,
            "seconds": seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "weights_digest": result.weights_digest,
            "evaluations": {str(step): metrics for step, metrics in result.evaluations.items()},
        }


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _check_exact(totals: StepTotals, is_first: bool) -> None:
    if not totals.logp_diff_max == 0:
        raise NumericsError(
            f"exact numerics was broken: log-probs of rollout and training differ by up to {totals.logp_diff_max:.3g}; "
            "run `unison check exactness` on this model, and use model.numerics=fast to go on without the promise"
        )
    if is_first and totals.kl_sum:
        raise NumericsError(
            f"exact numerics was broken: the KL to the reference is {totals.kl_sum:.3g} before the first update, not 0"
        )


def _numerics(parts: Parts) -> dict[str, Any]:
    import torch

    from unison.engine.sampler import SAMPLER_NAME

    return {
        "path": parts.numerics.path.name,
        "dtype": parts.numerics.dtype_name,
        "threads": torch.get_num_threads(),
        "sampler": SAMPLER_NAME,
    }


def _last_words(folder: RunFolder, config: TrainConfig, result: RunResult, seconds: float) -> list[str]:
    lines = [f"finished {config.trainer.steps} steps in {seconds / 60:.1f} min, weights {result.weights_digest[:16]}"]
    steps = sorted(result.evaluations)
    if len(steps) > 1:
        before, after = result.evaluations[steps[0]], result.evaluations[steps[-1]]
        for name, word in (("eval/accuracy", "sampled"), ("eval/accuracy_greedy", "greedy")):
            if name in before and name in after:
                lines.append(
                    f"held-out accuracy, {word:<7}  before {_interval(before, name)}  after {_interval(after, name)}  "
                    f"change {100 * (after[name] - before[name]):+.1f} points"
                )
    lines += [f"  {path}" for path in (folder.plot, folder.metrics, folder.rollouts, folder.model) if path.exists()]
    return lines


def _interval(metrics: Metrics, name: str) -> str:
    return f"{metrics[name]:.3f} [{metrics[name + '_ci_low']:.3f}, {metrics[name + '_ci_high']:.3f}]"
