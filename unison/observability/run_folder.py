"""The folder of a run, which explains itself: configuration, environment, metrics, rollouts, model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from unison.core.errors import CheckpointError, ConfigError
from unison.core.records import Sample
from unison.observability.environment import describe_environment
from unison.observability.jsonl import JsonLines
from unison.observability.run_files import LOCK, append_line, keep_steps, write_new, write_whole
from unison.observability.warn import Warn, warn_on_stderr

_MARKS: Final = ("config.toml", "metrics.jsonl")
"""A folder that holds one of these is a run's already."""


class RunFolder:
    """Paths of a run and the files written by it. Made with ``create``; ``close`` it at the end."""

    def __init__(self, path: Path, *, warn: Warn = warn_on_stderr) -> None:
        self.path = path
        self._warn = warn
        self._rollouts: JsonLines | None = None

    @classmethod
    def create(
        cls,
        path: str | Path,
        config_toml: str,
        command: Sequence[str],
        numerics: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        *,
        warn: Warn = warn_on_stderr,
    ) -> RunFolder:
        """Make the folder with config.toml, environment.json and README.md.

        ``command`` is the words that started the run; ``numerics``, and ``engine`` (where sampling takes place), are
        kept in environment.json.
        Raises ConfigError for a folder that holds a run already or cannot be written.
        """
        folder = Path(path)
        check_unused(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run = cls(folder, warn=warn)
            # Whole or not at all: half a configuration would keep the run from being started again.
            write_new(run.config, config_toml.encode("utf-8", "backslashreplace"))
            run._describe(command, numerics, engine)
        except FileExistsError:
            # Of two runs that start at once in one folder, the second is refused here.
            raise ConfigError(_used(folder, "config.toml")) from None
        except (OSError, ValueError) as error:
            # A folder that could not be made is no run: it must not stand in the way of the next attempt.
            with contextlib.suppress(OSError, ValueError):
                (folder / "config.toml").unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot write the run folder {folder}: {reason}; choose another with --run.dir DIR"
            ) from None
        return run

    @classmethod
    def reopen(cls, path: Path, *, warn: Warn = warn_on_stderr) -> RunFolder:
        """The folder of a run that is to be continued."""
        return cls(path, warn=warn)

    def complete(
        self,
        command: Sequence[str],
        numerics: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        """Write environment.json and README.md where they are missing: a kill may have come before them."""
        try:
            self._describe(command, numerics, engine)
        except OSError as error:
            self._warn(f"cannot write {error.filename or self.path}: {error.strerror}")

    def _describe(
        self, command: Sequence[str], numerics: Mapping[str, Any] | None, engine: Mapping[str, Any] | None
    ) -> None:
        if not self.environment.exists():
            described = describe_environment(numerics or {})
            self._write_json("environment.json", described | ({"engine": dict(engine)} if engine else {}))
        if not self.readme.exists():
            self._write_text("README.md", _readme(self.path.name, command))

    def discard_unless_begun(self) -> None:
        """Remove the folder's files where no step was ever logged: a run that did not begin keeps no name taken."""
        self.close()
        own = ["environment.json", "README.md", "metrics.jsonl", "rollouts.jsonl", "events.jsonl", "alarms.jsonl"]
        # The configuration goes last but for the lock: what a kill leaves is still a run's folder, which begins anew.
        own += ["trackers.json", ".config.toml.part", "config.toml", LOCK]
        begun = self.metrics.exists() and self.metrics.stat().st_size > 0
        # A batch that was dumped is worth its configuration.
        if begun or {path.name for path in self.path.iterdir()}.difference(own):
            return
        for name in own:
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()  # only where nothing else lies in it

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def readme(self) -> Path:
        return self.path / "README.md"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts.jsonl"

    @property
    def alarms(self) -> Path:
        return self.path / "alarms.jsonl"

    @property
    def plot(self) -> Path:
        return self.path / "plot.png"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def failures(self) -> Path:
        return self.path / "failures"

    def samples(self, step: int) -> Path:
        """Where the whole samples of a step lie."""
        return self.path / "samples" / f"step-{step:06d}.msgpack"

    def write_samples(self, step: int, data: bytes) -> str | None:
        """Keep a step's samples; their SHA-256, or None, with a warning, where they cannot be written."""
        path = self.samples(step)
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, data)
        except OSError as error:
            self._warn(f"cannot write {path}: {error.strerror}; step {step} cannot be replayed")
            return None
        return hashlib.sha256(data).hexdigest()

    def append_ledger(self, line: bytes) -> None:
        """One step's entry. Raises CheckpointError where it cannot be written: a run must not go on unaccounted."""
        try:
            append_line(self.ledger, line)
        except OSError as error:
            raise CheckpointError(
                f"cannot write the ledger {self.ledger}: {error.strerror}; make room, and start the run again"
            ) from error

    def event(self, kind: str, **facts: Any) -> None:
        """Note what happened to the run as a whole: begun, continued, interrupted, finished."""
        moment = datetime.now().astimezone().isoformat(timespec="seconds")
        line = json.dumps(plain({"event": kind, "time": moment, **facts}), ensure_ascii=False)
        try:
            append_line(self.events, line.encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._warn(f"cannot write {self.events}: {error.strerror}")

    def rewind(self, step: int, logged_step: int) -> int:
        """Take back what was written of steps after ``step``, and logged after ``logged_step``; the lines dropped.

        They will be written again: a run continues from its last checkpoint, not from its last line. Raises
        CheckpointError where a file cannot be rewritten.
        """
        self.close()
        self._rollouts = None
        try:
            return self._rewind(step, logged_step)
        except OSError as error:
            raise CheckpointError(
                f"cannot take {error.filename or self.path} back to step {step}: {error.strerror}; make room, and "
                "start the run again"
            ) from error

    def _rewind(self, step: int, logged_step: int) -> int:
        num_dropped = sum(keep_steps(path, step) for path in (self.ledger, self.rollouts))
        num_dropped += sum(keep_steps(path, logged_step) for path in (self.metrics, self.alarms))
        for folder in ("samples", "evaluations"):
            for path in (self.path / folder).glob("step-*"):
                number = path.name.removeprefix("step-").split(".")[0]
                if number.isdigit() and int(number) > step:
                    path.unlink(missing_ok=True)
        self._set_model_aside(step)
        for path in (self.summary, self.plot):
            path.unlink(missing_ok=True)
        self._rewind_configs(step)
        return num_dropped

    def _set_model_aside(self, step: int) -> None:
        """A model exported at an earlier end is not that of the steps to come; one of no end is exported again."""
        old = self.path / ".model.old"
        shutil.rmtree(old, ignore_errors=True)
        if not self.model.exists():
            return
        if self.summary.exists():
            kept = self.path / f"model-until-step-{_summed_step(self.summary, step)}"
            if kept.exists():
                kept.rename(old)
            self.model.rename(kept)
        else:
            self.model.rename(old)
        shutil.rmtree(old, ignore_errors=True)

    def _rewind_configs(self, step: int) -> None:
        """Of configurations that held until a later step, the first is that of the steps up to now."""
        later = sorted((until, path) for until, path in self.old_configs() if until > step)
        if later and step > 0 and not self._config_until(step).exists():
            later.pop(0)[1].replace(self._config_until(step))
        for _, path in later:
            path.unlink()

    def old_configs(self) -> list[tuple[int, Path]]:
        """(last step, file) of each configuration that the run had before its present one."""
        found = []
        for path in self.path.glob("config-until-step-*.toml"):
            number = path.stem.removeprefix("config-until-step-")
            if number.isascii() and number.isdigit():
                found.append((int(number), path))
        return sorted(found)

    def _config_until(self, step: int) -> Path:
        return self.path / f"config-until-step-{step}.toml"

    def write_config(self, config_toml: str) -> None:
        """The configuration of a run of which nothing is kept. Raises CheckpointError where it cannot be written."""
        try:
            self._write_text("config.toml", config_toml)
        except OSError as error:
            raise _unwritten_config(self.path, error) from error

    def replace_config(self, config_toml: str, step: int, old_toml: str | None = None) -> None:
        """From ``step`` on the run has another configuration; the one before is kept beside it.

        That is ``old_toml`` where config.toml has been edited meanwhile.

        One that was replaced at this step before is kept in its stead: no step was made with what came between. Raises
        CheckpointError where a file cannot be written.
        """
        try:
            if not self._config_until(step).exists():
                old = self.config.read_bytes() if old_toml is None else old_toml.encode("utf-8", "backslashreplace")
                write_whole(self._config_until(step), old)
            self._write_text("config.toml", config_toml)
        except OSError as error:
            raise _unwritten_config(self.path, error) from error

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json whole; floats that are not finite become null."""
        self._write_json("summary.json", summary)

    def write_rollouts(
        self,
        step: int,
        samples: Sequence[Sample],
        advantages: Sequence[float | None],
        tokenizer_decode: Callable[[Sequence[int]], str],
    ) -> None:
        """Append the samples of a step to rollouts.jsonl, one readable record each.

        ``advantages`` has one for each sample, None where it has none. Lines that cannot be written
        are counted and warned about, and never stop the run.
        """
        if len(samples) != len(advantages):
            raise ValueError(f"{len(samples)} samples but {len(advantages)} advantages; one for each is needed")
        if self._rollouts is None:
            self._rollouts = JsonLines(self.rollouts, warn=self._warn)
        for sample, advantage in zip(samples, advantages, strict=True):
            self._rollouts.append(rollout_record(step, sample, advantage, tokenizer_decode))

    def close(self) -> None:
        """Close rollouts.jsonl. May be called twice."""
        if self._rollouts is not None:
            self._rollouts.close()

    def _write_json(self, name: str, value: object) -> None:
        self._write_text(name, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def _write_text(self, name: str, text: str) -> None:
        """Replace the file in one move, so that no reader meets half of it."""
        write_whole(self.path / name, text.encode("utf-8", "backslashreplace"))


def _unwritten_config(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot write the configuration into {folder}: {error.strerror}; make room, and start the run again"
    )


def _summed_step(summary: Path, otherwise: int) -> int:
    """The step that a summary is of."""
    try:
        step: Any = json.loads(summary.read_bytes())["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return otherwise
    return step if isinstance(step, int) and step >= 0 else otherwise


def holds_run(path: str | Path) -> bool:
    """Whether a run can be continued there. Raises ConfigError for a file, and for what is no run of ours."""
    folder = Path(path)
    _check_folder(folder)
    if (folder / "config.toml").exists():
        return True
    check_unused(folder)
    return False


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"the run folder {folder} is a file; choose another with --run.dir DIR")


def check_unused(path: str | Path) -> None:
    """Raise ConfigError where the folder holds a run already, or is no folder."""
    folder = Path(path)
    _check_folder(folder)
    for name in _MARKS:
        if (folder / name).exists():
            raise ConfigError(_used(folder, name))


def rollout_record(
    step: int, sample: Sample, advantage: float | None, tokenizer_decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """A sample as plain data. Per-token lists cover the response; log-probs are null for tokens of others."""
    start = sample.prompt_length
    prompt_ids = sample.token_ids[:start]
    record = {
        "step": step,
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "status": str(sample.status),
        "finish_reason": sample.finish_reason,
        "error": sample.error,
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "advantage": advantage,
        "prompt": tokenizer_decode(prompt_ids),
        "response": sample.text,
        "metadata": sample.metadata,
        "prompt_ids": prompt_ids,
        "response_ids": sample.response_ids,
        "response_tokens": [tokenizer_decode([token]) for token in sample.response_ids],
        "logprobs": sample.logprobs[start:],
        "weight_versions": sample.weight_versions[start:],
        "seed": sample.seed,
    }
    built: dict[str, Any] = plain(record)
    return built


def plain(value: Any) -> Any:
    """The value as strict JSON holds it: floats that are not finite are null, strange objects their repr."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return repr(value)


def _used(folder: Path, mark: str) -> str:
    return (
        f"the folder {folder} already holds a run ({mark}); choose another with --run.dir DIR or --run.name NAME, "
        "or move it away"
    )


def _readme(name: str, command: Sequence[str]) -> str:
    started = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return _README.format(name=name, started=started, command=shlex.join(command))


_README: Final = """\
# Run {name}

Started {started} by

```
{command}
```

| file | what it is |
|---|---|
| `config.toml` | the resolved configuration; `unison train config.toml --run.dir OTHER` runs it again |
| `checkpoints/` | states the run can continue from: `unison train` with this folder as its argument |
| `config-until-step-N.toml`, `model-until-step-N/` | what held until the run went on from there otherwise, or further |
| `ledger.jsonl` | one JSON object a step: what became of every prompt drawn, and digests of samples and weights |
| `samples/` | the whole samples of each step, for `unison replay` and `unison samples` |
| `events.jsonl` | when the run was begun, continued, interrupted and finished, and what was passed over |
| `alarms.jsonl` | what looked wrong, and when |
| `trackers.json` | the run's id in each tracker, so that a continued run goes on in the same one |
| `evaluations/` | the evaluations in full, with the scores of every problem |
| `environment.json` | machine, library versions, threads, code version and numerics path of the run |
| `metrics.jsonl` | one JSON object a step: `step` and the metrics by name; all names are explained in docs/metrics.md |
| `rollouts.jsonl` | some samples of each step, one JSON object a sample; see below |
| `summary.json` | the outcome in a few numbers; written at the end |
| `plot.png` | reward, held-out accuracy, lengths, KL, entropy and mismatch over the steps; drawn at the end |
| `model/` | the trained model in Hugging Face layout, loadable by transformers and by Unison; exported at the end |

Files written at the end are missing while the run goes on, after an interruption, or where the configuration turns
them off.

## A record of rollouts.jsonl

| key | meaning |
|---|---|
| `step`, `sample_id`, `group_id` | where the sample belongs; samples of one prompt share a group |
| `status` | completed, truncated (ended by length), aborted, failed, or unscorable (see `error`) |
| `finish_reason` | stop, length or abort |
| `reward`, `reward_parts`, `advantage` | what the sample scored, of what parts, and how it stands in its group |
| `prompt`, `response` | the texts; the response ends before its stop string |
| `prompt_ids`, `response_ids`, `response_tokens` | the token ids, and each response token as text |
| `logprobs` | natural log-prob of each response token as sampled; null where the policy did not write the token |
| `weight_versions` | version of the weights that sampled each response token; -1 where the policy did not |
| `seed` | seed of the sample's noise: the same weights, prompt and seed give the same tokens |
| `metadata` | what the data source said about the prompt |
"""
