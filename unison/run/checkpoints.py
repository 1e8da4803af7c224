"""When a run saves itself, and what: the link between the loop and the checkpoint store."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from unison.assembly import Parts
from unison.checkpoint.find import find
from unison.checkpoint.retention import Retention
from unison.checkpoint.run_state import PENDING_FILE, RANDOM_FILE, STATE_FILE, RunState, random_states
from unison.checkpoint.save import Saved, Saver
from unison.config.names import did_you_mean
from unison.core.errors import CheckpointError, ConfigError
from unison.core.records import Sample
from unison.core.wire import encode_samples
from unison.observability.run_folder import RunFolder


class RunCheckpoints:
    """Saves a run's state on schedule, in the background, and once more when it ends.

    A save that fails stops the run, or under ``checkpoint.on_error="warn"`` is said and tried again next time.
    """

    def __init__(
        self,
        parts: Parts,
        folder: RunFolder,
        say: Callable[[str], None],
        on_saved: Callable[[Saved], None] = lambda saved: None,
    ) -> None:
        """``on_saved`` hears of each save once it is complete, in the caller's thread."""
        config = parts.config.checkpoint
        self._config = config
        self._num_steps = parts.config.trainer.steps
        self._trainer = parts.trainer
        self._say = say
        self._on_saved = on_saved
        self._told: Saved | None = None
        self._saver = Saver(
            folder.checkpoints,
            Retention(keep_last=config.keep_last, keep_best=config.keep_best, keep_every=config.keep_every),
        )
        self._saved_step: int | None = None
        self._best: float | None = None

    def begin(self, state: RunState, pending: Sequence[Sample]) -> None:
        """Save a state that is nowhere in this folder yet, whatever the schedule says."""
        self._begin(state, pending, None)

    def save_if_due(self, state: RunState, evaluated: Mapping[str, float]) -> None:
        """After a step: begin a save where the schedule, the end of the run or a new best evaluation asks for one."""
        config = self._config
        score = self._score(evaluated)
        is_best = score is not None and config.keep_best > 0 and (self._best is None or score > self._best)
        if is_best:
            self._best = score
        due = config.every > 0 and state.step % config.every == 0
        kept = config.keep_every > 0 and state.step % config.keep_every == 0
        if due or kept or is_best or state.step == self._num_steps:
            self._begin(state, (), score)

    def go_on(self, state: RunState, root: Path) -> None:
        """The run was taken up from a checkpoint of its own: it need not be saved again."""
        if state.unlogged is None and not state.pending_draws:
            self._saved_step = state.step
        self._best = max((one.score for one in find(root) if one.score is not None), default=None)

    def check_metric(self, evaluated: Mapping[str, float]) -> None:
        """Raise ConfigError where the best checkpoint goes by a metric that the evaluation does not have."""
        wanted = self._config.best_metric
        if self._config.keep_best > 0 and wanted is not None and wanted not in evaluated:
            names = sorted(name for name in evaluated if name.startswith("eval/"))
            raise ConfigError(
                f"checkpoint.best_metric={wanted!r} is no metric of the evaluation{did_you_mean(wanted, names)} "
                f"(it has {', '.join(names)})"
            )

    def save(self, state: RunState, evaluated: Mapping[str, float]) -> None:
        """Begin a save, whatever was saved before."""
        self._begin(state, (), self._score(evaluated))

    def save_now(self, state: RunState, pending: Sequence[Sample]) -> Path | None:
        """Save and wait, unless the last save holds all of it; the checkpoint, None where this session made none.

        Whether the state is saved is then told by ``holds``: ``on_error`` may have let it fail.
        """
        if self._saved_step != state.step or pending or state.unlogged is not None:
            self._begin(state, pending, None)
        saved = self._wait()
        return saved.path if saved is not None and self.holds(saved.step) else None

    def holds(self, step: int) -> bool:
        """Whether the state after this step is what was saved last, or is being saved."""
        return self._saved_step == step

    def finish(self, state: RunState) -> None:
        """The end of the run is saved, whatever the schedule says."""
        if self._saved_step != state.step:
            self._begin(state, (), None)
        self._wait()

    def release(self) -> None:
        """Called right before weights change."""
        self._guarded(self._saver.release)
        if not self._saver.busy:
            # Written by now, as it mostly is: whoever wants to know hears of it in the step after.
            self._wait()

    def close(self) -> None:
        """Wait for a save that runs; it failed if it must, the run has ended anyway."""
        try:
            self._saver.wait()
        except CheckpointError as error:
            self._say(f"note: {error}")

    def _score(self, evaluated: Mapping[str, float]) -> float | None:
        accuracies = ["eval/accuracy", *(name for name in evaluated if name.endswith("/accuracy"))]
        name = self._config.best_metric or next((name for name in accuracies if name in evaluated), "")
        value = evaluated.get(name)
        return value if value is not None and math.isfinite(value) else None

    def _begin(self, state: RunState, pending: Sequence[Sample], score: float | None) -> None:
        documents = {STATE_FILE: msgspec.to_builtins(state), RANDOM_FILE: random_states()}
        self._wait()
        blobs = {PENDING_FILE: encode_samples(pending)} if pending else {}
        self._saved_step = state.step
        self._guarded(
            lambda: self._saver.begin(state.step, self._trainer.state_tensors(), documents, blobs, score=score)
        )
        if not self._config.background:
            self._wait()

    def _wait(self) -> Saved | None:
        saved: list[Saved | None] = []
        self._guarded(lambda: saved.append(self._saver.wait()))
        found = saved[0] if saved else None
        if found is not None and found is not self._told:
            self._told = found
            self._on_saved(found)
        return found

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except CheckpointError as error:
            self._saved_step = None
            if self._config.on_error == "stop":
                raise
            self._say(f"note: {error}; the run goes on, and tries again when the next checkpoint is due")
