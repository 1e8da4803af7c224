"""Where a run begins: with the model it is given, at its own last checkpoint, or at a step of another run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from torch import Tensor

from unison.assembly import Parts
from unison.checkpoint.find import find
from unison.checkpoint.load import Loaded, load, load_newest
from unison.checkpoint.run_state import (
    PENDING_FILE,
    RANDOM_FILE,
    STATE_FILE,
    RunState,
    decode_state,
    restore_random_states,
)
from unison.config.changes import FIXED, check_changes, describe
from unison.config.dump import diff_configs, dump_toml
from unison.config.load import load_config
from unison.config.schema import TrainConfig
from unison.core.errors import CheckpointError, ConfigError, DataError
from unison.core.records import Sample
from unison.core.wire import decode_samples
from unison.observability.run_folder import RunFolder
from unison.rollout.collect import unanswered, unscored
from unison.rollout.ledger import read_ledger
from unison.run.replay import config_of_step, weights_after
from unison.weights.checksum import tensors_digest

CONFIG: Final = "config.toml"


@dataclass(slots=True)
class Start:
    """A state to go on from. ``tensors`` are dropped once the trainer has taken them."""

    state: RunState
    tensors: Mapping[str, Mapping[str, Tensor]]
    random: dict[str, Any] | None
    pending: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    changes: dict[str, str] = field(default_factory=dict)
    """What is configured otherwise from here on, by key."""
    is_fork: bool = False
    old_toml: str = ""
    """The configuration that the state was reached with, as a file."""


def own_start(folder: RunFolder, config: TrainConfig) -> Start | None:
    """The newest intact state of a run in this folder, or None where it had saved none yet.

    Raises CheckpointError where there are checkpoints and none is intact: a damaged run is never begun anew in
    silence. Raises ConfigError where the configuration has changed in a way that cannot be meant.
    """
    loaded, skipped = load_newest(folder.checkpoints)
    notes = [f"passed over {one}" for one in skipped]
    if loaded is None:
        _check_unsaved(folder, config)
        return None
    start = _start_of(loaded)
    old, start.old_toml = _config_of(folder, start.state)
    start.changes = describe(check_changes(old, config, has_pending=bool(start.pending)))
    _check_critic(start, old, config)
    if any(path.startswith("reward.") for path in start.changes):
        for sample in start.pending:
            unscored(sample)
    start.notes = notes
    return start


def changes_unsaved(folder: RunFolder, config: TrainConfig) -> dict[str, str]:
    """What is configured otherwise than in config.toml, where no step of the run was kept. Raises ConfigError."""
    return describe(check_changes(_config_in(folder), config))


def fork_start(config: TrainConfig) -> Start:
    """The state that ``run.fork`` names: RUN_FOLDER, or RUN_FOLDER@STEP for any step that can be had.

    A step without a checkpoint of its own is replayed from the one before it.
    """
    run, step = parse_run_step(config.run.fork or "", "run.fork")
    folder = RunFolder.reopen(run)
    loaded = _fork_checkpoint(folder, step)
    if loaded is not None:
        start = _start_of(loaded)
    elif step is None:
        raise CheckpointError(f"run.fork={config.run.fork!r}: {folder.checkpoints} has no checkpoint to begin from")
    else:
        start = _replayed_start(folder, step)
    old = config_of_step(run, start.state.step)
    for name in ("path", "dtype"):
        if getattr(old.model, name) != getattr(config.model, name):
            raise ConfigError(
                f"run.fork={config.run.fork!r}: its model.{name} is {getattr(old.model, name)!r}, this one's "
                f"{getattr(config.model, name)!r}; the state of one model is no other's"
            )
    _check_critic(start, old, config)
    # The prompts of a rollout half done are drawn already, and answered under the new settings.
    start.pending = unanswered(start.pending)
    start.state.unlogged, start.state.evaluations, start.state.trackers = None, {}, {}
    start.state.seconds, start.state.begun_at = 0.0, start.state.step
    changes = diff_configs(old, config)
    start.changes = describe({key: pair for key, pair in changes.items() if not key.startswith("run.") or key in FIXED})
    start.changes.pop("run.fork", None)
    start.is_fork = True
    return start


def parse_run_step(text: str, what: str) -> tuple[Path, int | None]:
    """``RUN@STEP`` as (folder, step); the step is None where only the folder is given. Raises ConfigError."""
    name, at, number = text.rpartition("@")
    # A folder may have such a name itself; RUN@STEP is what is meant where both can be.
    is_step = at and number.isascii() and number.isdigit()
    if is_step and ((Path(name).expanduser() / CONFIG).is_file() or not (Path(text).expanduser() / CONFIG).is_file()):
        path, step = Path(name).expanduser(), int(number)
    else:
        path, step = Path(text).expanduser(), None
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{what}={text!r}: there is no run in {path}; name a run folder, or RUN_FOLDER@STEP")
    return path, step


def restore(parts: Parts, start: Start, base_digest: str) -> None:
    """Put a saved state into freshly built parts, and prove that trainer and engine hold what was saved.

    Raises CheckpointError where they do not, DataError where the data is not what the state was saved over.
    """
    state = start.state
    if state.base_digest != base_digest:
        raise CheckpointError(
            f"the model at {parts.config.model.path} is not the one the run began from: its weights have the digest "
            f"{base_digest[:16]}, the run's {state.base_digest[:16]}; bring the files of then back"
        )
    start.notes += parts.trainer.load_state(start.tensors, state.optimizer_steps)
    start.tensors = {}
    published = parts.trainer.published()
    digest = tensors_digest(published)
    if digest != state.weights_digest:
        raise CheckpointError(
            f"the restored weights have the digest {digest[:16]}, the saved ones {state.weights_digest[:16]}"
        )
    if state.weights_version > 0:
        parts.policy.publish(published, state.weights_version)
    _restore_cursor(parts, start)
    if start.random is not None:
        restore_random_states(start.random)


def numerics_notes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What about the machine differs from when the state was saved, and what that means."""
    different = [
        f"{name} {saved[name]} -> {now.get(name)}" for name in saved if name in now and saved[name] != now[name]
    ]
    if not different:
        return []
    return [f"the run goes on under {', '.join(different)}: its weights will not be those of a run without a break"]


def _restore_cursor(parts: Parts, start: Start) -> None:
    if start.is_fork and not start.state.cursor:
        start.notes.append(
            f"the data begins anew: the place in it after step {start.state.step} is kept in checkpoints only"
        )
        return
    try:
        parts.cursor.load_state_dict(start.state.cursor)
    except DataError:
        if not start.is_fork:
            raise
        # The error says how to go on with a run; a fork may mean the difference.
        start.notes.append("the data begins anew: it, or its order, is not that of the run forked from")
        start.pending, start.state.pending_draws = [], []


def _start_of(loaded: Loaded) -> Start:
    where = f"{loaded.path.parent.name}/{loaded.path.name}"
    try:
        state = decode_state(loaded.documents.get(STATE_FILE))
        pending = decode_samples(loaded.blobs[PENDING_FILE]) if PENDING_FILE in loaded.blobs else []
    except (CheckpointError, DataError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    return Start(state, loaded.tensors, loaded.documents.get(RANDOM_FILE), pending)


def _check_critic(start: Start, old: TrainConfig, config: TrainConfig) -> None:
    """Raise ConfigError where the configuration names another critic than the one that was saved."""
    if "critic_weights" in start.tensors and old.critic.path != config.critic.path:
        raise ConfigError(
            f"critic.path is {config.critic.path!r}, and the state holds a critic that began as "
            f"{old.critic.path or old.model.path!r}; leave critic.path as it was, or begin from a run without a critic"
        )


def _config_in(folder: RunFolder) -> TrainConfig:
    try:
        return load_config([folder.config]).config
    except ConfigError as error:
        raise ConfigError(f"the run's own configuration {folder.config} cannot be read: {error}") from error


def _config_of(folder: RunFolder, state: RunState) -> tuple[TrainConfig, str]:
    """The configuration that a state was reached with, and its text. Who edits config.toml changes the run by it."""
    written = _config_in(folder)
    try:
        reached = msgspec.convert(state.config, TrainConfig) if state.config else written
    except msgspec.ValidationError:  # of a version with other keys
        reached = written
    same = not diff_configs(written, reached)
    return reached, folder.config.read_text(encoding="utf-8") if same else dump_toml(reached)


def _check_unsaved(folder: RunFolder, config: TrainConfig) -> None:
    """A run that saved nothing yet begins anew, as itself."""
    changes_unsaved(folder, config)
    if folder.summary.exists():
        raise CheckpointError(
            f"the run in {folder.path} is finished, and its checkpoints are gone: it cannot be continued; choose "
            "another folder with --run.dir DIR"
        )


def _fork_checkpoint(folder: RunFolder, step: int | None) -> Loaded | None:
    if step is None:
        return load_newest(folder.checkpoints)[0]
    if any(one.step == step for one in find(folder.checkpoints)):
        return load(folder.checkpoints, step)
    return None


def _replayed_start(folder: RunFolder, step: int) -> Start:
    entries = {entry.step: entry for entry in read_ledger(folder.ledger)}
    if step not in entries:
        raise CheckpointError(f"step {step} is not in the ledger of {folder.path}; it has {_span(list(entries))}")
    tensors, optimizer_steps = weights_after(folder.path, step)
    entry = entries[step]
    state = RunState(
        step=step,
        optimizer_steps=optimizer_steps,
        weights_version=entry.weights_version,
        weights_digest=entry.weights_digest,
        base_digest=entry.base_digest,
        cursor=entry.cursor,
    )
    return Start(state, tensors, None)


def _span(steps: list[int]) -> str:
    return f"steps {min(steps)} to {max(steps)}" if steps else "no step"
