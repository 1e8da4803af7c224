"""What a run says of itself when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from unison.assembly import Parts
from unison.run.restore import Start, numerics_notes, parse_run_step
from unison.run.wrap_up import numerics_of
from unison.training.arithmetic import BatchArithmetic


def introduction(parts: Parts, folder: Path) -> list[str]:
    """What runs, where, and what the batch settings come to."""
    config, spec = parts.config, parts.trainer.model.spec
    arithmetic = replace(BatchArithmetic.from_config(config), max_prompt_tokens=parts.longest_prompt)
    return [
        *(f"note: {note}" for note in parts.notes),
        f"model {config.model.path} ({spec.family}, {spec.num_parameters() / 1e6:.1f} M parameters), "
        f"{parts.numerics.dtype_name}, numerics {parts.numerics.path.name}, seed {config.run.seed}",
        *(f"  {line}" for line in [*arithmetic.describe(), *parts.trainer.algorithm.describe()]),
        f"run folder {folder}",
    ]


def start_lines(
    parts: Parts, start: Start | None, is_continued: bool, changes: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Where a run goes on that does not begin at its beginning, and what is otherwise than it was."""
    changed = [f"  changed: {line}" for line in changes.values()]
    if start is None:
        anew = "no checkpoint had been saved yet: the run begins anew at step 1"
        return [*changed, anew] if is_continued else []
    state = start.state
    notes = [*start.notes, *numerics_notes(state.numerics, numerics_of(parts))]
    pending = f", with {len(start.pending)} samples of step {state.step + 1} drawn or begun" if start.pending else ""
    whose = f"of {parse_run_step(parts.config.run.fork or '', 'run.fork')[0]}" if start.is_fork else "of this run"
    return [
        *(f"note: {note}" for note in notes),
        *changed,
        f"goes on after step {state.step} {whose}{pending}",
    ]
