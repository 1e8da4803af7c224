"""Training steps once more, from the samples a run kept: no engine, no reward, and the same loss to the bit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import Tensor

from unison.assembly import TrainerParts, build_trainer_parts
from unison.checkpoint.find import find
from unison.checkpoint.load import Loaded, load
from unison.checkpoint.run_state import STATE_FILE, decode_state
from unison.config.load import load_config
from unison.config.schema import TrainConfig
from unison.core.errors import CheckpointError, ConfigError, DataError
from unison.core.records import Sample
from unison.core.wire import decode_samples
from unison.observability.run_folder import RunFolder
from unison.rollout.ledger import LedgerEntry, read_ledger
from unison.training.prepare import prepare_columns
from unison.training.totals import StepTotals
from unison.weights.checksum import tensors_digest

_OF_TRAINING: Final = ("trainer", "algorithm", "correction", "reference", "critic", "rollout")
"""Sections that decide what a step makes of its samples."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step as it came out again, beside what the ledger says of it."""

    entry: LedgerEntry
    totals: StepTotals
    weights_digest: str

    @property
    def differences(self) -> list[str]:
        """What is not the same to the bit; empty where all is."""
        pairs = (
            ("loss", self.totals.loss, self.entry.loss),
            ("grad_norm", self.totals.grad_norm, self.entry.grad_norm),
            ("weights", self.weights_digest[:16], self.entry.weights_digest[:16]),
        )
        return [f"{name} {now} in place of {then}" for name, now, then in pairs if not _same(now, then)]


class Replay:
    """A run's training from a step on, without what brought its samples about.

    Begins at the newest intact checkpoint before ``first_step`` that was kept, or at the model the run began from.
    Raises typed errors where the run lacks what is needed: configuration, ledger, samples, checkpoint.
    """

    def __init__(self, run: Path, first_step: int) -> None:
        if not (run / "config.toml").is_file():
            raise ConfigError(f"{run} is no run folder: it has no config.toml")
        self.run = run
        self.folder = RunFolder.reopen(run)
        self._entries = {entry.step: entry for entry in read_ledger(self.folder.ledger)}
        self._check_step(first_step)
        self._config = config_of_step(run, first_step)
        self.begun_at, loaded = _begin(self.folder, first_step, self._config)
        # The settings of a step are those it was trained with, also where the run was continued with others.
        self._config = config_of_step(run, self.begun_at + 1)
        self.parts: TrainerParts = build_trainer_parts(self._config)
        if loaded is not None:
            state = decode_state(loaded.documents.get(STATE_FILE))
            self.parts.trainer.load_state(loaded.tensors, state.optimizer_steps)
        self.step = self.begun_at

    def until(self, last_step: int) -> Iterator[ReplayedStep]:
        """Replay one step after the other, up to and with ``last_step``."""
        self._check_step(last_step)
        while self.step < last_step:
            yield self._next()

    def _next(self) -> ReplayedStep:
        step = self.step + 1
        entry = self._entries[step]
        self._configure(config_of_step(self.run, step))
        samples = read_samples(self.folder, entry)
        trainer = self.parts.trainer
        _, columns = prepare_columns(samples, trainer.algorithm.truncated, set(entry.filtered))
        totals = trainer.step(columns, step)
        self.step = step
        return ReplayedStep(entry, totals, tensors_digest(self.parts.trainer.published()))

    def _configure(self, config: TrainConfig) -> None:
        if all(getattr(config, name) == getattr(self._config, name) for name in _OF_TRAINING):
            return
        old = self.parts.trainer
        tensors = {group: dict(members) for group, members in old.state_tensors().items()}
        self.parts = build_trainer_parts(config)
        self.parts.trainer.load_state(tensors, old.num_steps)
        self._config = config

    def _check_step(self, step: int) -> None:
        if step not in self._entries:
            have = f"it has steps {min(self._entries)} to {max(self._entries)}" if self._entries else "it is empty"
            raise DataError(f"step {step} is not in the ledger of {self.run}; {have}")


def config_of_step(run: Path, step: int) -> TrainConfig:
    """The configuration that step ``step`` of a run was made with. Raises ConfigError where the folder has none."""
    old = [path for until, path in RunFolder.reopen(run).old_configs() if until >= step]
    path = old[0] if old else run / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.toml")
    return load_config([path]).config


def read_samples(folder: RunFolder, entry: LedgerEntry) -> list[Sample]:
    """The samples of a step, checked against the ledger. Raises DataError where they are missing or changed."""
    path = folder.samples(entry.step)
    try:
        data = path.read_bytes()
    except OSError as error:
        hint = "" if entry.samples_sha256 else " (the run did not keep them: log.samples=false, or a full disk)"
        raise DataError(f"cannot read the samples of step {entry.step} at {path}: {error.strerror}{hint}") from error
    if hashlib.sha256(data).hexdigest() != entry.samples_sha256:
        raise DataError(f"{path} is not what step {entry.step} was trained on: its SHA-256 differs from the ledger's")
    return decode_samples(data)


def _begin(folder: RunFolder, first_step: int, config: TrainConfig) -> tuple[int, Loaded | None]:
    """(step done, checkpoint) to start from: the newest intact one before ``first_step``, or the beginning."""
    steps = sorted({one.step for one in find(folder.checkpoints) if one.step is not None}, reverse=True)
    problems = []
    for step in (step for step in steps if step < first_step):
        try:
            return step, load(folder.checkpoints, step)
        except CheckpointError as error:
            problems.append(str(error))
    if config.run.fork is not None:
        raise CheckpointError(
            f"step {first_step} of {folder.path} lies before its first checkpoint, and the run is a fork of "
            f"{config.run.fork}; replay that one" + "".join(f"\n  {problem}" for problem in problems)
        )
    return 0, None


def _same(left: float | str, right: float | str) -> bool:
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return left == right


def weights_after(run: Path, step: int) -> tuple[dict[str, dict[str, Tensor]], int]:
    """(state tensors, optimizer steps) of a run after any step: of a checkpoint, or replayed from the one before it.

    Raises CheckpointError where the replay does not come out as the ledger says.
    """
    replay = Replay(run, step)
    for replayed in replay.until(step):
        if replayed.differences:
            raise CheckpointError(
                f"replaying step {replayed.entry.step} of {run} gave {replayed.differences[0]}; "
                "fork from a step with a checkpoint, or under the threads and libraries of that run"
            )
    return replay.parts.trainer.state_tensors(), replay.parts.trainer.num_steps
