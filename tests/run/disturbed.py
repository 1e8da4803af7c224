"""A small run in a process of its own, which may be struck down at any moment and started again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]
FLAGS = (
    "--run.threads=1",
    "--trainer.steps=5",
    "--rollout.prompts_per_step=4",
    "--rollout.samples_per_prompt=4",
    "--rollout.max_new_tokens=12",
    "--rollout.filter=no_contrast",
    "--rollout.refill=1",
    "--eval.every=2",
    "--eval.problems=4",
    "--eval.samples=2",
    "--checkpoint.every=2",
    "--log.export=false",
    "--log.plot=false",
)
TIMEOUT_S = 300


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    seconds: float


def command(folder: Path, *flags: str) -> list[str]:
    words = [sys.executable, "-m", "unison.cli.main", "train", "examples/tiny.toml", *FLAGS, "--run.dir", str(folder)]
    return [*words, *flags]


def begin(folder: Path, *flags: str, fault: str | None = None) -> subprocess.Popen[str]:
    """Start the run, or go on with it, as the leader of a session of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    environment.pop("UNISON_FAULT", None)
    if fault is not None:
        environment["UNISON_FAULT"] = fault
    return subprocess.Popen(
        command(folder, *flags),
        cwd=REPO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def complete(folder: Path, *flags: str, fault: str | None = None) -> Ended:
    """The run up to its end, or to where the fault strikes it down."""
    started = time.monotonic()
    process = begin(folder, *flags, fault=fault)
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        kill_group(process)
    return Ended(process.returncode, output, time.monotonic() - started)


def killed_after(folder: Path, seconds: float, number: int = signal.SIGKILL, *, fault: str | None = None) -> Ended:
    """The run with its whole process group sent a signal so long after its first line."""
    started = time.monotonic()
    process = begin(folder, fault=fault)
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        time.sleep(seconds)
        if number == signal.SIGKILL:
            kill_group(process)
        else:
            process.send_signal(number)
        output = first + process.communicate(timeout=TIMEOUT_S)[0]
    finally:
        kill_group(process)
    return Ended(process.returncode, output, time.monotonic() - started)


def kill_group(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def outcome(folder: Path) -> tuple[str, str, list[str]]:
    """What must not depend on any disturbance: final weights, ledger, and the metrics that are no times."""
    summary = json.loads((folder / "summary.json").read_text())
    metrics = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        metrics.append(json.dumps({name: value for name, value in record.items() if not _is_measured(name)}))
    return summary["weights_digest"], (folder / "ledger.jsonl").read_text(), metrics


def _is_measured(name: str) -> bool:
    return name.endswith(("seconds", "_per_s", "share", "bytes")) and not name.startswith("eval/truncated")


FAULTS = (
    ("loop.sample", 40),
    ("loop.scored", 6),
    ("loop.micro_batch", 5),
    ("loop.updated", 5),
    ("loop.samples_written", 5),
    ("loop.recorded", 5),
    ("loop.concluded", 5),
    ("checkpoint.after_file", 6),
    ("checkpoint.within_file", 6),
    ("checkpoint.after_manifest", 2),
    ("checkpoint.after_rename", 2),
    ("checkpoint.before_pointer", 2),
    ("checkpoint.after_delete_rename", 1),
)
"""Points of the loop and of a save, and how often a session of the small run passes them about."""


def disturb(folder: Path, seed: int) -> str:
    """One session that is killed at a random moment, unless it ends before; what was done to it."""
    draw = random.Random(seed)
    if draw.random() < 0.5:
        seconds = draw.uniform(0.0, 4.0)
        ended = killed_after(folder, seconds)
        return f"killed {seconds:.2f} s after its first line, code {ended.code}"
    name, passes = draw.choice(FAULTS)
    fault = f"{name}:{draw.randint(1, passes)}:kill"
    ended = complete(folder, fault=fault)
    return f"{fault}, code {ended.code}"
