"""Runs variants in processes of their own, in turn, and compares them."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measured:
    """One run: wall and CPU seconds of the measured part, units of work, peak memory of the process."""

    wall_s: float
    cpu_s: float
    units: int
    peak_bytes: int
    detail: dict[str, Any]


WAIT_POLICY = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


class Meter:
    """``with Meter() as meter: ...`` then ``meter.result(units)``."""

    def __enter__(self) -> Meter:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._wall
        self.cpu_s = time.process_time() - self._cpu

    def result(self, units: int, **detail: Any) -> Measured:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Measured(self.wall_s, self.cpu_s, units, peak, detail)


def emit(measured: Measured) -> None:
    """Called in the child: hand the result to the parent."""
    print("RESULT " + json.dumps(measured.__dict__))


def run_child(script: str, arguments: Sequence[str], python: str = sys.executable) -> Measured:
    # The wait policy of `unison`, for everybody: see unison/cli/env.py.
    environment = {**WAIT_POLICY, **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([python, script, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{script} {' '.join(arguments)} failed with code {done.returncode}")
    return Measured(**json.loads(lines[-1].removeprefix("RESULT ")))


def compare(
    script: str,
    variants: Sequence[str],
    arguments: Sequence[str],
    rounds: int,
    unit: str,
    pythons: Mapping[str, str] | None = None,
) -> None:
    """Run all variants ``rounds`` times, round robin; print a table with ratios to the last variant.

    ``pythons``: interpreters of the variants that need another one than this.
    """
    own = pythons or {}
    runs: dict[str, list[Measured]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant in variants:
            runs[variant].append(
                run_child(script, [*arguments, "--variant", variant], own.get(variant, sys.executable))
            )
    baseline = statistics.median(run.units / run.wall_s for run in runs[variants[-1]])
    print(f"{'variant':<24} {unit + '/s':>12} {'min..max':>16} {unit + '/CPU-s':>12} {'peak GB':>8} {'ratio':>6}")
    for variant, measured in runs.items():
        rates = [run.units / run.wall_s for run in measured]
        per_cpu = statistics.median(run.units / run.cpu_s for run in measured)
        peak = max(run.peak_bytes for run in measured) / 1e9
        median = statistics.median(rates)
        spread = f"{min(rates):.1f}..{max(rates):.1f}"
        print(f"{variant:<24} {median:>12.1f} {spread:>16} {per_cpu:>12.1f} {peak:>8.2f} {median / baseline:>6.2f}")
        if measured[-1].detail:
            print(f"{'':<24} {json.dumps(measured[-1].detail)}")
