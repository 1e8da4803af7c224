"""The end of a run: exported model, plot, summary, and the last words."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unison.assembly import Parts
from unison.checkpoint.run_state import RunState
from unison.config.schema import TrainConfig
from unison.core.errors import UnisonError
from unison.models.saving import export_model
from unison.observability.plot import draw_plot
from unison.observability.progress import Progress
from unison.observability.run_folder import RunFolder
from unison.weights.checksum import tensors_digest

Metrics = dict[str, float]


@dataclass(slots=True)
class RunResult:
    """What a finished run came to; also in the folder's summary.json."""

    folder: Path
    weights_digest: str
    evaluations: dict[int, Metrics] = field(default_factory=dict)


def finish(
    parts: Parts, folder: RunFolder, evaluations: Mapping[str, Metrics], seconds: float, progress: Progress
) -> RunResult:
    """Export, plot, summary, and the last words. Raises, after all else is written, where the export failed."""
    result = RunResult(
        folder.path,
        tensors_digest(parts.trainer.published()),
        {int(step): metrics for step, metrics in evaluations.items()},
    )
    problem: UnisonError | None = None
    if parts.config.log.export:
        try:
            export_model(parts.trainer.model, parts.model_folder, folder.model)
        except UnisonError as error:
            problem = error
    if parts.config.log.plot:
        _draw_plot(folder, parts.config.run.name, progress)
    summary = _summary(parts, result, seconds)
    _write_summary(folder, summary, progress)
    parts.hooks.tell("on_finish", summary)
    folder.event("finished", step=parts.config.trainer.steps, weights_digest=result.weights_digest)
    for line in _last_words(folder, parts.config, result, seconds):
        progress.print(line)
    if problem is not None:
        # The trained model is what the run was for: without it the run has failed, but all else is written.
        raise problem
    return result


def is_finished(folder: RunFolder, state: RunState, config: TrainConfig) -> bool:
    """Whether nothing is left to do: no step, no evaluation, no export, no last word."""
    exported = folder.model.exists() or not config.log.export
    return state.step >= config.trainer.steps and state.unlogged is None and folder.summary.exists() and exported


def already_finished(folder: RunFolder, state: RunState) -> RunResult:
    """Says so; what it came to then."""
    print(
        f"the run in {folder.path} has done its {state.step} steps; raise trainer.steps to go on, or choose another "
        "folder with --run.dir DIR",
        flush=True,
    )
    evaluations = {int(step): metrics for step, metrics in state.evaluations.items()}
    return RunResult(folder.path, state.weights_digest, evaluations)


def interrupted_words(folder: RunFolder, step: int, saved: Path | None, *, is_saved: bool) -> list[str]:
    """What was saved, and the command that goes on."""
    state = f"step {step} is saved in {saved}" if saved else f"nothing was done since step {step} was saved"
    if not is_saved:
        state = f"step {step} could not be saved; what was saved before it is untouched"
    return [f"interrupted: {state}", f"go on with: unison train {folder.path}"]


def numerics_of(parts: Parts) -> dict[str, Any]:
    """What the bits of a run's weights depend on beside its configuration."""
    import torch

    from unison.engine.sampler import SAMPLER_NAME

    return {
        "path": parts.numerics.path.name,
        "dtype": parts.numerics.dtype_name,
        "threads": torch.get_num_threads(),
        "sampler": SAMPLER_NAME,
        "torch": str(torch.__version__),
        "tokenizer": parts.text_digest,
    }


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _write_summary(folder: RunFolder, summary: Mapping[str, Any], progress: Progress) -> None:
    try:
        folder.write_summary(summary)
    except OSError as error:
        progress.print(f"note: no summary: {error}")


def _draw_plot(folder: RunFolder, title: str, progress: Progress) -> None:
    try:
        draw_plot(folder.metrics, folder.plot, title)
    except (UnisonError, OSError) as error:
        # The run is done and saved: a missing picture must not make it look failed.
        progress.print(f"note: no plot: {error}")


def _summary(parts: Parts, result: RunResult, seconds: float) -> dict[str, Any]:
    return {
        "name": parts.config.run.name,
        "step": parts.config.trainer.steps,
        "optimizer_steps": parts.trainer.num_steps,
        "seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "weights_digest": result.weights_digest,
        "evaluations": {str(step): metrics for step, metrics in result.evaluations.items()},
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
