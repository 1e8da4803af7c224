"""The step as one line for people: the same columns in the same order, counters only when not zero."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

_RECENT_STEPS: Final = 10
_COUNTERS: Final = (
    ("rollout/unscorable", "unscorable"),
    ("rollout/aborted", "aborted"),
    ("rollout/failed", "failed"),
    ("data/skipped", "skipped"),
)


class ConsoleSink:
    """Prints a line for the training step and one for the evaluation, as far as their metrics are there.

    ``total_steps`` is the last step's number where steps count finished updates from 1. ``write`` prints
    a line; give a progress bar's own so that the two do not mix.
    """

    def __init__(self, total_steps: int, *, write: Callable[[str], object] | None = None) -> None:
        self._total_steps = total_steps
        self._write = write or _print_line
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "step/seconds" in metrics:
            self._seconds.append(metrics["step/seconds"])
        if "rollout/reward_mean" in metrics or "rollout/samples" in metrics:
            self._write(self._step_line(step, metrics))
        if "eval/accuracy" in metrics or "eval/accuracy_greedy" in metrics:
            self._write(self._eval_line(step, metrics))
        for name in metrics:
            if re.fullmatch(r"eval/[^/]+/accuracy", name):
                self._write(self._set_line(step, name, metrics))

    def close(self) -> None:
        """Nothing is held open."""

    def _step_line(self, step: int, metrics: Mapping[str, float]) -> str:
        def number(name: str) -> float:
            return metrics.get(name, math.nan)

        parts = [
            f"{self._label(step)}",
            f"reward {number('rollout/reward_mean'):6.3f} ± {number('rollout/reward_std'):5.3f}",
            f"len {number('rollout/length_mean'):5.1f}",
            f"kl {kl(metrics.get('train/kl', metrics.get('train/reward_kl'))):>6}",
            f"ent {decimals(metrics.get('train/entropy')):>5}",
            f"trunc {percent(number('rollout/truncated_share')):>4}",
            f"Δlogp {difference(metrics.get('rollout/logp_diff_max')):>7}",
            f"tok/s roll {rate(number('rollout/tokens_per_s')):>5} train {rate(number('train/tokens_per_s')):>5}",
            f"eta {self._eta(step):>6}",
        ]
        counters = [f"{metrics[name]:g} {word}" for name, word in _COUNTERS if metrics.get(name)]
        return "  ".join([*parts, *counters])

    def _eval_line(self, step: int, metrics: Mapping[str, float]) -> str:
        scores = [
            f"{word} {score_with_interval(metrics, name)}"
            for name, word in (("eval/accuracy", "sampled"), ("eval/accuracy_greedy", "greedy"))
            if name in metrics
        ]
        parts = [f"{self._label(step)}  held-out accuracy: {', '.join(scores)}"]
        if "eval/problems" in metrics:
            parts.append(f"on {metrics['eval/problems']:g} problems")
        if "eval/length_mean" in metrics:
            parts.append(f"len {metrics['eval/length_mean']:.1f}")
        if "eval/truncated_share" in metrics:
            parts.append(f"trunc {percent(metrics['eval/truncated_share'])}")
        if metrics.get("eval/unscorable"):
            parts.append(f"{metrics['eval/unscorable']:g} unscorable")
        if "eval/seconds" in metrics:
            parts.append(f"in {duration(metrics['eval/seconds'])}")
        return "  ".join(parts)

    def _set_line(self, step: int, accuracy: str, metrics: Mapping[str, float]) -> str:
        """A named set's line."""
        prefix = accuracy.removesuffix("/accuracy")
        scores = [
            f"{word} {score_with_interval(metrics, name)}"
            for name, word in ((accuracy, "sampled"), (f"{accuracy}_greedy", "greedy"))
            if name in metrics
        ]
        parts = [f"{self._label(step)}  {prefix.removeprefix('eval/')}: {', '.join(scores)}"]
        if f"{prefix}/problems" in metrics:
            parts.append(f"on {metrics[f'{prefix}/problems']:g} problems")
        return "  ".join(parts)

    def _label(self, step: int) -> str:
        width = len(str(self._total_steps))
        return f"step {step:>{width}}/{self._total_steps}"

    def _eta(self, step: int) -> str:
        """Time to the last step, from the mean of the recent ones."""
        if not self._seconds:
            return "?"
        return duration(max(0, self._total_steps - step) * sum(self._seconds) / len(self._seconds))


def score_with_interval(metrics: Mapping[str, float], name: str) -> str:
    """``0.560 [0.491, 0.627]``; without interval where none was logged."""
    low, high = metrics.get(f"{name}_ci_low"), metrics.get(f"{name}_ci_high")
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{metrics[name]:.3f}{interval}"


def difference(value: float | None) -> str:
    """A log-prob difference: exactly 0 is shown as ``0``, so that no rounding can hide a mismatch."""
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def decimals(value: float | None) -> str:
    """A dash where nothing was trained, so that nothing is measured."""
    return "-" if value is None else f"{value:.3f}"


def kl(value: float | None) -> str:
    """A dash where no reference is kept, so that nothing is measured."""
    return "-" if value is None else f"{value:.4f}"


def percent(share: float) -> str:
    return "nan" if math.isnan(share) else f"{100 * share:.0f}%"


def rate(value: float) -> str:
    """Tokens per second in at most five characters: ``7.4``, ``312``, ``14.2k``; a dash where none is known."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return str(value)
    if value >= 99_950:
        return f"{value / 1000:.0f}k"
    if value >= 9_999.5:
        return f"{value / 1000:.1f}k"
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """``8s``, ``4m10s``, ``2h05m``."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _print_line(line: str) -> None:
    print(line, flush=True)
