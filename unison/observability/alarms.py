"""Alarms: what the metrics of the last steps say is going wrong, each as one sentence with a way out.

``Alarms`` is a state machine of plain data over pure rules (``unison.observability.alarm_rules``): the same metrics
give the same alarms, after a resume as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from unison.config.schema import AlarmConfig
from unison.observability.alarm_rules import RULES, History, Rule
from unison.observability.jsonl import JsonLines
from unison.observability.registry import METRICS_PAGE, anchor
from unison.observability.warn import Warn, warn_on_stderr

WATCHED: Final = tuple(dict.fromkeys(name for rule in RULES for name in rule.reads))
"""Metrics the rules look at; nothing else is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """``text`` is the whole message: what was seen, what it may mean, what to do, and where to read on."""

    step: int
    name: str
    metric: str
    value: float
    limit: float
    window: int
    text: str
    link: str


class Alarms:
    """Watches the metrics of a run. ``observe`` every step once, in order.

    An alarm is said when it begins and every ``alarm.repeat`` steps while it stands. One that comes and goes is not
    said twice within ``alarm.window`` steps.
    """

    def __init__(self, config: AlarmConfig) -> None:
        self._config = config
        self._recent: dict[str, list[float]] = {name: [] for name in WATCHED}
        self._beginning: dict[str, list[float]] = {name: [] for name in WATCHED}
        self._said: dict[str, int] = {}
        self._standing: set[str] = set()

    @property
    def active(self) -> list[str]:
        """Names of the alarms that stand, most urgent first."""
        return [rule.name for rule in RULES if rule.name in self._standing]

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms to say at this step, most urgent first. Values that are missing or not finite are passed over."""
        if not self._config.enabled:
            return []
        for name in WATCHED:
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                self._take(name, float(value))
        found: list[Alarm] = []
        for rule in RULES:
            if not any(name in metrics for name in rule.reads):
                continue  # nothing new of it, such as at an evaluation before the first step
            seen = rule.check(History(self._recent, self._beginning, self._config), self._config)
            if seen is None:
                self._standing.discard(rule.name)
                continue
            if self._is_due(rule, step):
                self._said[rule.name] = step
                found.append(_alarm(rule, step, seen.value, seen.limit, seen.text, self._config.window))
            self._standing.add(rule.name)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "recent": {name: list(values) for name, values in self._recent.items()},
            "beginning": {name: list(values) for name, values in self._beginning.items()},
            "said": dict(self._said),
            "standing": sorted(self._standing),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``. Metrics and alarms that are no longer there are left out."""
        names = {rule.name for rule in RULES}
        for own, kept in ((self._recent, state["recent"]), (self._beginning, state["beginning"])):
            for name in WATCHED:
                own[name] = [float(value) for value in kept.get(name, [])]
        self._said = {name: int(step) for name, step in state["said"].items() if name in names}
        self._standing = set(state["standing"]) & names

    def _take(self, name: str, value: float) -> None:
        window = self._config.window
        if len(self._beginning[name]) < window:
            self._beginning[name].append(value)
        # Twice the window: a spike is compared with the window before it.
        self._recent[name] = [*self._recent[name], value][-2 * window :]

    def _is_due(self, rule: Rule, step: int) -> bool:
        last = self._said.get(rule.name)
        if last is None:
            return True
        pause = self._config.repeat if rule.name in self._standing else self._config.window
        return step - last >= pause


class AlarmLog:
    """Writes alarms to a file of JSON lines, made with the first one."""

    def __init__(self, path: Path, *, warn: Warn = warn_on_stderr) -> None:
        self._path = path
        self._warn = warn
        self._lines: JsonLines | None = None

    def write(self, alarm: Alarm) -> None:
        if self._lines is None:
            self._lines = JsonLines(self._path, warn=self._warn)
        self._lines.append(asdict(alarm))

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def _alarm(rule: Rule, step: int, value: float, limit: float, seen: str, window: int) -> Alarm:
    link = f"{METRICS_PAGE}#{anchor(rule.metric)}"
    return Alarm(
        step=step,
        name=rule.name,
        metric=rule.metric,
        value=value,
        limit=limit,
        window=window,
        text=f"step {step}: {rule.name}: {seen}; {rule.meaning}: {rule.advice} ({link})",
        link=link,
    )
