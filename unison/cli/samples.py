"""``unison samples``: the rollouts of a step, read from the run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unison.cli.arguments import ArgumentParser
from unison.core.describe import printable
from unison.core.errors import DataError
from unison.core.records import Sample

EXAMPLES: Final = """\
Reads files only: no model is loaded, and the run may be under way.

examples:
  unison samples runs/first --step 12
  unison samples runs/first --step 12 --group 3+5@0 --json | jq .reward
"""

_MAX_CHARS: Final = 400


def run(arguments: Sequence[str]) -> int:
    """Print the samples of one step."""
    parser = ArgumentParser("unison samples", "Shows the samples of a step.", EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, metavar="N", help="the step; by default the last one")
    parser.add_argument("--group", metavar="TEXT", help="only groups whose name contains this")
    parser.add_argument("--json", action="store_true", help="whole records, one JSON object a line")
    options = parser.parse(arguments)
    from unison.rollout.kept import read_step_samples

    step, samples = read_step_samples(Path(options.run), options.step)
    chosen = [sample for sample in samples if options.group is None or options.group in sample.group_id]
    if not chosen:
        groups = list(dict.fromkeys(_shown(sample.group_id) for sample in samples))
        raise DataError(f"step {step} has no group with {options.group!r} in its name; it has {', '.join(groups[:8])}")
    if options.json:
        for sample in chosen:
            # Escapes only: valid under any encoding of the terminal, and nothing in it that a terminal obeys.
            print(json.dumps(_record(step, sample)))
        return 0
    print("\n".join(_page(step, chosen)))
    return 0


def _record(step: int, sample: Sample) -> dict[str, object]:
    from unison.observability.run_folder import plain

    record: dict[str, object] = plain(
        {
            "step": step,
            **{name: getattr(sample, name) for name in Sample.__dataclass_fields__ if name != "sampling"},
            "provenance": [who.name.lower() for who in sample.provenance],
            "status": str(sample.status),
            "turns": [[turn.role, turn.start, turn.end] for turn in sample.turns],
            "kv_versions": [[run.version, run.count] for run in sample.kv_versions],
            "temperature": sample.sampling.temperature,
        }
    )
    return record


def _page(step: int, samples: Sequence[Sample]) -> list[str]:
    lines: list[str] = []
    group = None
    for sample in samples:
        if sample.group_id != group:
            group = sample.group_id
            prompt = _shown(sample.metadata.get("prompt", ""))
            lines += [f"── step {step}  {_shown(group)}  label {_shown(sample.metadata.get('label'))}", f"   {prompt}"]
        reward = "-" if sample.reward is None else f"{sample.reward:.3f}"
        parts = "  ".join(
            f"{name}={value}" for name, value in sample.reward_parts.items() if len(sample.reward_parts) > 1
        )
        lines.append(f"   {reward:>7}  {sample.status!s:<10} {sample.response_length:>5} tokens  {_shown(sample.text)}")
        lines += [f"            {parts}"] if parts else []
        lines += [f"            {_shown(sample.error)}"] if sample.error else []
    return lines


def _shown(value: object) -> str:
    """On one line, without control characters: a terminal must not obey what a model wrote."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    return printable(text[:_MAX_CHARS]) + "…" * (len(text) > _MAX_CHARS)
