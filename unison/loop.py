"""The training loop: it reads like the algorithm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from unison.assembly import Parts, build_parts
from unison.checkpoint.run_state import RunState
from unison.checkpoint.save import Saved
from unison.config.dump import dump_toml
from unison.config.schema import TrainConfig
from unison.core.errors import NonFiniteError, NumericsError, RewardError, RunInterrupted, UnisonError
from unison.core.faults import fault_point
from unison.core.records import Sample, SampleStatus
from unison.core.wire import encode_samples
from unison.evaluation.files import write_evaluation
from unison.observability.alarms import AlarmLog, Alarms
from unison.observability.console import ConsoleSink
from unison.observability.hooks import HookedRun
from unison.observability.progress import Progress
from unison.observability.run_files import run_lock
from unison.observability.run_folder import RunFolder, holds_run
from unison.observability.sinks import JsonlSink, MultiSink
from unison.observability.trackers.open import open_trackers
from unison.processes.interruption import Interruption
from unison.rewards.scoring import RewardReport, is_scored, merge_reports, score
from unison.rewards.summary import reward_metrics
from unison.rollout.collect import PromptTask, collect, tasks_of
from unison.rollout.filters import discarded_groups
from unison.rollout.greedy import without_greedy
from unison.rollout.interruptible import stoppable
from unison.rollout.summary import rollout_metrics
from unison.run.batch import Batch, Digests, batch_accounts, check_exact, ledger_entry, step_accounts
from unison.run.checkpoints import RunCheckpoints
from unison.run.restore import Start, changes_unsaved, fork_start, own_start, restore
from unison.run.talk import introduction, start_lines
from unison.run.wrap_up import (
    RunResult,
    already_finished,
    finish,
    interrupted_words,
    is_finished,
    numerics_of,
)
from unison.training.prepare import prepare_columns
from unison.training.totals import StepTotals

Metrics = dict[str, float]
_NUM_FAILURES_SHOWN = 3


def run_training(
    config: TrainConfig, command: Sequence[str] = (), sources: Mapping[str, str] | None = None
) -> RunResult:
    """Train as configured into the run folder, or go on with the run that lies there.

    ``command`` and ``sources`` are written down there. Raises RunInterrupted, with the state saved, where a signal
    asked the run to stop.
    """
    path = Path(config.run.dir or Path("runs") / config.run.name)
    holds_run(path)  # before anything is written there
    with run_lock(path):
        is_continued = holds_run(path)
        folder = RunFolder.reopen(path)
        try:
            start = own_start(folder, config) if is_continued else fork_start(config) if config.run.fork else None
            if start is None and is_continued and config.run.fork:
                start = fork_start(config)
            if is_continued and start is not None and is_finished(folder, start.state, config):
                return already_finished(folder, start.state)
            parts = build_parts(config, dump_dir=folder.failures)
            with closing(parts.policy):
                config_toml = dump_toml(config, sources)
                if is_continued:
                    folder.complete(command, numerics_of(parts), parts.policy.placement())
                else:
                    folder = RunFolder.create(path, config_toml, command, numerics_of(parts), parts.policy.placement())
                return _run(parts, folder, start, is_continued, config_toml)
        except BaseException:
            if not is_continued:
                folder.discard_unless_begun()
            raise


def _run(parts: Parts, folder: RunFolder, start: Start | None, is_continued: bool, config_toml: str) -> RunResult:
    with Progress(parts.config.log.progress) as progress, Interruption() as interruption:
        run = Run(parts, folder, progress, interruption)
        try:
            for line in introduction(parts, folder.path):
                progress.print(line)
            run.begin(start, is_continued, config_toml)
            asyncio.run(run.train())
            run.checkpoints.finish(run.state)
        except RunInterrupted as interrupted:
            saved = run.save_on_the_way_out()
            run.close()
            folder.event("interrupted", step=run.step, signal=interrupted.signal_name)
            for line in interrupted_words(folder, run.step, saved, is_saved=run.checkpoints.holds(run.step)):
                progress.print(line)
            raise
        except UnisonError as error:
            run.give_up(error)
            raise
        finally:
            run.close()
        return finish(parts, folder, run.evaluations, run.seconds, progress)


class Run:
    """A run under way: its parts, its folder, what it has done, and where it reports to."""

    def __init__(self, parts: Parts, folder: RunFolder, progress: Progress, interruption: Interruption) -> None:
        self.parts = parts
        self.config = parts.config
        self.folder = folder
        self.step = 0
        """Steps done."""
        self._begun_at = 0
        self.evaluations: dict[str, Metrics] = {}
        self.checkpoints = RunCheckpoints(parts, folder, progress.print, self._saved)
        self._progress = progress
        self._interruption = interruption
        self._base_digest = parts.policy.checksum()
        self._weights_digest = self._base_digest
        self._pending: list[Sample] = []
        self._pending_draws: list[int] = []
        self._step_cursor: dict[str, Any] = {}
        self._unlogged: Metrics | None = None
        self._alarms = Alarms(self.config.alarm)
        self._alarm_log: AlarmLog | None = None
        self._seconds_before = 0.0
        self._started = time.perf_counter()
        self._is_clean = True
        """False while weights change: what is saved then would be neither the old state nor the new one."""
        self._sinks = MultiSink([])

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._started

    def begin(self, start: Start | None, is_continued: bool, config_toml: str) -> None:
        """Take over the state the run starts from, and bring the folder back to it."""
        if start is not None:
            restore(self.parts, start, self._base_digest)
            self._take(start.state, start.pending)
            if is_continued and not start.is_fork:
                self.checkpoints.go_on(start.state, self.folder.checkpoints)
        resume_step = self._logged_step(start) if is_continued else None
        changes = start.changes if start is not None else {}
        if not is_continued:
            self.folder.event("begun", step=self.step, fork=self.config.run.fork, numerics=numerics_of(self.parts))
        else:
            if start is None:
                changes = changes_unsaved(self.folder, self.config)
            num_dropped = self.folder.rewind(self.step, self._logged_step(start))
            self.folder.event(
                "continued",
                step=self.step,
                num_pending=len(self._pending),
                num_lines_dropped=num_dropped,
                changes=list(changes.values()),
                passed_over=start.notes if start else [],
                numerics=numerics_of(self.parts),
            )
            if start is None or start.is_fork:
                self.folder.write_config(config_toml)
            elif changes:
                self.folder.replace_config(config_toml, self.step, start.old_toml)
        # Only now: a file that is open does not follow when it is rewound.
        self._alarm_log = AlarmLog(self.folder.alarms)
        self._sinks = MultiSink(
            [
                JsonlSink(self.folder.metrics),
                ConsoleSink(self.config.trainer.steps, write=self._progress.print),
                *open_trackers(self.config, self.folder.path, resume_step, warn=self._warn),
            ]
        )
        self.parts.hooks.tell("on_start", HookedRun(self.config.run.name, self.folder.path, self.config, self.step))
        for line in start_lines(self.parts, start, is_continued, changes):
            self._progress.print(line)
        if start is not None and start.is_fork:
            # Its own from here on: the run it comes from may go on, and delete or damage what it began from.
            self.checkpoints.begin(self.state, self._pending)

    async def train(self) -> None:
        """Baseline, then steps: collect, score, estimate, update, publish; evaluate and save when it is due."""
        await self._evaluate_first()
        while self.step < self.config.trainer.steps:
            self._interruption.check()
            step, started = self.step + 1, time.perf_counter()
            batch, metrics = await self.rollout(step)
            totals = self.update(step, batch)
            metrics |= totals.metrics() | self.publish(step, totals)
            metrics |= step_accounts(self.parts, metrics, totals, time.perf_counter() - started)
            self.record(step, batch, totals)
            await self.conclude(step, metrics)
            self._tell_events()
        await self._evaluate_last()

    async def rollout(self, step: int) -> tuple[Batch, Metrics]:
        """Draw the step's samples and score them; groups the filter discards are replaced as often as configured."""
        rollout = self.config.rollout
        if not self._pending:
            self._pending_draws = []
        seconds, scored_s = 0.0, 0.0
        filtered: dict[str, str] = {}
        reports: list[RewardReport] = []
        tasks = tasks_of(self._pending) or self._draw(rollout.prompts_per_step)
        while True:
            started = time.perf_counter()
            await self._collect(tasks)
            collected = time.perf_counter()
            reports.append(self.score([sample for sample in self._pending if not is_scored(sample)], step))
            filtered = discarded_groups(self._pending, self.parts.group_filter)
            seconds, scored_s = seconds + collected - started, scored_s + time.perf_counter() - collected
            if not filtered or len(self._pending_draws) > rollout.refill:
                break
            missing = rollout.prompts_per_step - (len(tasks_of(self._pending)) - len(filtered))
            if missing <= 0:
                break
            tasks = tasks_of(self._pending) + self._draw(missing)
        self.parts.hooks.tell("on_samples", step, list(self._pending))
        samples = without_greedy(self._pending)
        metrics = rollout_metrics(samples)
        metrics |= reward_metrics(samples, merge_reports(reports), self.parts.reward)
        metrics["rollout/seconds"] = seconds
        metrics["rollout/tokens_per_s"] = metrics["rollout/tokens"] / max(seconds, 1e-9)
        metrics["rollout/filtered_groups"] = float(len(filtered))
        metrics["reward/seconds"] = scored_s
        return Batch(self._pending, filtered), metrics

    def score(self, samples: Sequence[Sample], step: int) -> RewardReport:
        """Reward every finished sample in place; failures are shown, and stop a run that never scored one."""
        report = score(samples, self.parts.reward)
        fault_point("loop.scored")
        self._interruption.check()
        for failure in report.failures[:_NUM_FAILURES_SHOWN]:
            self._progress.print(f"note: step {step}: unscorable: {failure.sample_id}: {failure.reason}")
        if len(report.failures) > _NUM_FAILURES_SHOWN:
            self._progress.print(f"note: step {step}: {len(report.failures)} samples were unscorable in all")
        if step <= 1 and report.failures and not report.num_scored:
            raise RewardError(
                f"the reward {' + '.join(map(repr, self.parts.reward.weights))} could score none of the first "
                f"{len(samples)} samples; "
                f"the first one: {report.failures[0].reason}"
            )
        return report

    def update(self, step: int, batch: Batch) -> StepTotals:
        """The optimizer steps; under exact numerics the trainer must find the rollout's very log-probs."""
        trainer = self.parts.trainer
        self.parts.policy.before_training()
        batch.kept, batch.columns = prepare_columns(batch.samples, trainer.algorithm.truncated, batch.filtered)
        is_first = trainer.num_steps == 0
        totals = trainer.step(batch.columns, step, on_progress=self._trained, before_update=self._before_update)
        fault_point("loop.updated")
        if self.parts.numerics.path.name == "exact":
            check_exact(totals, is_first)
        return totals

    def publish(self, step: int, totals: StepTotals) -> Metrics:
        """Give the engine the new weights; nothing moves where no token was trained."""
        started = time.perf_counter()
        if totals.updated:
            self._weights_digest = self.parts.policy.publish(self.parts.trainer.published(), step)
        elif not totals.critic_updated:
            self._progress.print(f"note: step {step}: no token was left to train on; the weights stay as they are")
        self.parts.policy.after_training()
        return {
            "weights/version": float(self.parts.policy.version),
            "weights/seconds": time.perf_counter() - started,
        }

    def record(self, step: int, batch: Batch, totals: StepTotals) -> None:
        """Write down what became of the step's prompts; from here on the step is done."""
        sha256 = self.folder.write_samples(step, encode_samples(batch.samples)) if self.config.log.samples else None
        fault_point("loop.samples_written")
        digests = Digests(self._base_digest, self._weights_digest, sha256)
        groups = batch_accounts(batch, totals)
        self.parts.learn({key: account.reward_mean for key, account in groups.items()})
        entry = ledger_entry(self.parts, step, batch, groups, totals, draws=self._pending_draws, digests=digests)
        self.folder.append_ledger(msgspec.json.encode(entry))
        count = self.config.log.rollouts_per_step
        values = batch.columns.mean_advantages()[:count] if batch.columns is not None else []
        self.folder.write_rollouts(step, batch.kept[:count], values, self._decode)
        self.step, self._pending, self._pending_draws = step, [], []
        self._is_clean = True
        fault_point("loop.recorded")

    async def conclude(self, step: int, metrics: Metrics) -> None:
        """Evaluate if it is due, log, save if it is due."""
        self._unlogged = metrics
        evaluated: Metrics = {}
        if self._evaluation_due(step):
            evaluated = await self.evaluate(step)
        metrics |= evaluated | self.watch(step, metrics | evaluated)
        self._sinks.log(step, metrics)
        self._unlogged = None
        self.parts.hooks.tell("on_step", step, dict(metrics))
        self.checkpoints.save_if_due(self.state, evaluated)
        fault_point("loop.concluded")

    def watch(self, step: int, metrics: Metrics) -> Metrics:
        """Say what looks wrong."""
        for alarm in self._alarms.observe(step, metrics):
            if self._alarm_log is not None:
                self._alarm_log.write(alarm)
            self._progress.print(f"alarm: {alarm.text}")
        return {"alarms/active": float(len(self._alarms.active))} if self.config.alarm.enabled else {}

    async def evaluate(self, step: int) -> Metrics:
        """Accuracy on the held-out sets under the engine's present weights; the whole result goes to evaluations/."""
        evaluation, version = self.parts.evaluation, self.parts.policy.version
        with stoppable(self.parts.client, self._interruption, self._tell_events) as client:
            try:
                result = await evaluation.run(
                    client, version, on_progress=lambda done, total: self._progress.update("evaluation", done, total)
                )
            except UnisonError:
                # Answers that were cut short are no evaluation, whatever the complaint about them.
                self._interruption.check()
                raise
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
        self.checkpoints.check_metric(metrics)
        self.evaluations[str(step)] = metrics
        self.parts.hooks.tell("on_evaluation", step, dict(metrics))
        return metrics

    @property
    def state(self) -> RunState:
        """The run as it stands between two steps."""
        return RunState(
            step=self.step,
            begun_at=self._begun_at,
            optimizer_steps=self.parts.trainer.num_steps,
            weights_version=self.parts.policy.version,
            weights_digest=self._weights_digest,
            base_digest=self._base_digest,
            cursor=self.parts.cursor.state_dict(),
            step_cursor=self._step_cursor if self._pending_draws else {},
            pending_draws=list(self._pending_draws),
            unlogged=self._unlogged,
            evaluations=self.evaluations,
            seconds=self.seconds,
            numerics=numerics_of(self.parts),
            config=msgspec.to_builtins(self.config),
            alarms=self._alarms.state_dict(),
        )

    def save_on_the_way_out(self) -> Path | None:
        """Save what the run has come to, samples of the step under way included; where it lies."""
        if not self._is_clean:
            return None
        if self._step_cursor and len(tasks_of(self._pending)) != sum(self._pending_draws):
            # An error came before the prompts had their samples: the step is to be drawn once more.
            self._pending, self._pending_draws = [], []
            self.parts.cursor.load_state_dict(self._step_cursor)
        return self.checkpoints.save_now(self.state, self._pending)

    def give_up(self, error: UnisonError) -> None:
        """A run that fails saves what it has done first, unless that is what failed."""
        self.folder.event("failed", step=self.step, error=f"{type(error).__name__}: {error}")
        if self.step == 0 or not self._is_clean or isinstance(error, NonFiniteError | NumericsError):
            return
        try:
            saved = self.save_on_the_way_out()
        except UnisonError as second:
            self._progress.print(f"note: no checkpoint was saved: {second}")
            return
        if saved is not None:
            self._progress.print(
                f"step {self.step} is saved in {saved}; `unison train {self.folder.path}` goes on from it"
            )

    def close(self) -> None:
        self._tell_events()
        self.checkpoints.close()
        self.parts.reward.close()
        self.parts.evaluation.close()
        self._sinks.close()
        if self._alarm_log is not None:
            self._alarm_log.close()
        self.folder.close()

    def _take(self, state: RunState, pending: list[Sample]) -> None:
        self.step, self._begun_at = state.step, state.begun_at
        self.evaluations = dict(state.evaluations)
        self._pending, self._pending_draws = pending, list(state.pending_draws)
        self._step_cursor = state.step_cursor
        self._unlogged = state.unlogged
        self._weights_digest = state.weights_digest
        self._seconds_before = state.seconds
        if state.alarms:
            self._alarms.load_state_dict(state.alarms)

    def _logged_step(self, start: Start | None) -> int:
        """The last step whose metrics are complete: the present one's evaluation may be still to be made."""
        if start is None:
            return -1
        return self.step - 1 if self._unlogged is not None or self._baseline_is_open else self.step

    @property
    def _baseline_is_open(self) -> bool:
        """Whether the evaluation before the run's own first step is still to be made."""
        wanted = bool(self.parts.evaluation) and self.config.eval.before
        return wanted and not self.evaluations and self.step == self._begun_at

    async def _evaluate_first(self) -> None:
        """The baseline; of a continued run the evaluation that was left open."""
        unlogged = self._unlogged
        if unlogged is not None:
            await self.conclude(self.step, unlogged)
        elif self._baseline_is_open:
            self._sinks.log(self.step, await self.evaluate(self.step))

    def _saved(self, saved: Saved) -> None:
        self.folder.event(
            "saved", step=saved.step, checkpoint=saved.path.name, seconds=saved.seconds, notes=saved.notes
        )
        self.parts.hooks.tell("on_checkpoint", saved.step, saved.path)

    async def _evaluate_last(self) -> None:
        """A run that was cut short by its configuration has not been evaluated at its end yet."""
        if self.parts.evaluation and self.step > 0 and str(self.step) not in self.evaluations:
            metrics = await self.evaluate(self.step)
            self._sinks.log(self.step, metrics)
            self.checkpoints.save(self.state, metrics)

    def _tell_events(self) -> None:
        for event in self.parts.policy.events():
            self.folder.event("engine", step=self.step, text=event)
            self._progress.print(f"note: {event}")

    def _warn(self, message: str) -> None:
        self._progress.print(f"warning: {message}")

    def _draw(self, count: int) -> list[PromptTask]:
        if not self._pending_draws:
            self._step_cursor = self.parts.cursor.state_dict()
        self._pending_draws.append(count)
        return self.parts.draw(count)

    async def _collect(self, tasks: Sequence[PromptTask]) -> None:
        """Bring pending samples to their end, and draw those of new tasks; what an interruption leaves is pending."""
        with_greedy = "greedy" in self.parts.trainer.algorithm.uses
        num_done, total = 0, len(tasks) * (self.parts.sampling.n + with_greedy)

        def count(sample: Sample) -> None:
            nonlocal num_done
            num_done += sample.status is not SampleStatus.PENDING
            fault_point("loop.sample")
            self._progress.update("rollout", num_done, total)

        with stoppable(self.parts.client, self._interruption, self._tell_events) as client:
            self._pending = await collect(
                client,
                tasks,
                self.parts.sampling,
                run_seed=self.config.run.seed,
                on_sample=count,
                earlier=self._pending,
                function=self.parts.rollout_function,
                with_greedy=with_greedy,
            )
        self._interruption.check()

    def _trained(self, done: int, total: int) -> None:
        fault_point("loop.micro_batch")
        if self._is_clean:
            # Between the optimizer steps of a rollout there is no state to save: the rest of them is taken first.
            self._interruption.check()
        self._progress.update("training", done, total)

    def _before_update(self) -> None:
        self.checkpoints.release()
        self._is_clean = False

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.eval.every
        return bool(self.parts.evaluation) and (step == self.config.trainer.steps or (every > 0 and step % every == 0))

    def _decode(self, ids: Sequence[int]) -> str:
        return self.parts.tokenizer.decode(ids, skip_special=False)
