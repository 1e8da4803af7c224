"""What a tracker is told of a run, and what it must remember to go on in the same run after a resume."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from unison.config.dump import config_fields, dump_toml, value_of
from unison.config.schema import TrainConfig
from unison.core.protocols import MetricSink

MEMORY_FILE: Final = "trackers.json"
"""In the run folder: each tracker's run id and the last step it was given."""

HIDDEN: Final = "(hidden)"
_SECRET_OPTION: Final = re.compile(r"(?:^|[._-])(?:api_?key|key|token|secret|password|passwd|credentials?)$", re.I)
_WRITING: Final = threading.Lock()
"""Trackers share the file and write from threads of their own."""

_URL_LOGIN: Final = re.compile(r"(\w://)[^/@\s]+@")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerRun:
    """What a tracker is opened with. Nothing in it comes from the environment."""

    name: str
    config: Mapping[str, Any]
    """The resolved configuration, flat: ``{"trainer.steps": 20, ...}``; what looks like a secret is hidden."""
    config_toml: str
    """The same as TOML."""
    folder: Path
    resume_step: int | None = None
    """The last step that stays; the next one logged is greater. None: the run begins."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its entries of log.tracker_options, without the tracker's name in front."""
    memory: Memory = field(default_factory=lambda: Memory(None, ""))


OpenTracker = Callable[[TrackerRun], MetricSink]
"""Makes a tracker for a run. May raise or hang: it is called in a thread of its own."""


class Memory:
    """What one tracker keeps in the run folder's trackers.json, written whole at each change.

    ``path`` None remembers nothing (a tracker that is only being tried).
    """

    def __init__(self, path: Path | None, tracker: str) -> None:
        self._path = path
        self._tracker = tracker
        self._values: dict[str, Any] = _entry(path, tracker) if path is not None else {}

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def set(self, key: str, value: Any) -> None:
        """Keep a plain value. Raises OSError where the file cannot be written."""
        self._values[key] = value
        if self._path is None:
            return
        with _WRITING:
            everything = {**_read(self._path), self._tracker: self._values}
            part = self._path.with_name(f".{self._path.name}.part")
            part.write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")
            os.replace(part, self._path)

    def run_id(self, begins: bool) -> str:
        """The id of the tracker's run: the one kept, or a new one where the run begins or none was kept."""
        kept = self.get("run_id")
        if kept is not None and not begins:
            return str(kept)
        made = secrets.token_hex(8)
        self.set("run_id", made)
        self.set("last_step", None)
        return made

    def is_new(self, step: int) -> bool:
        """Whether ``step`` was not given to the tracker before; from now on it was.

        For trackers that cannot take steps back: those repeated after a resume are not logged twice.
        """
        last = self.get("last_step")
        if last is not None and step <= last:
            return False
        self.set("last_step", step)
        return True


class LikeWandb:
    """A sink over a run object with W&B's calls. A step cannot be taken back: one sent before a resume is not sent
    again."""

    def __init__(self, run: Any, memory: Memory) -> None:
        self._run = run
        self._memory = memory

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._memory.is_new(step):
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def tracker_config(config: TrainConfig) -> dict[str, Any]:
    """The configuration as a flat table of plain values, secrets hidden."""
    flat: dict[str, Any] = {}
    for key in config_fields(config):
        value = value_of(config, key.path)
        if key.kind == "table":
            flat |= {f"{key.path}.{option}": _shown(option, entry) for option, entry in value.items()}
        else:
            flat[key.path] = _without_login(value)
    return flat


def public_toml(config: TrainConfig) -> str:
    """The configuration as TOML, secrets hidden."""
    text = _URL_LOGIN.sub(rf"\1{HIDDEN}@", dump_toml(config))
    for key in config_fields(config):
        if key.kind == "table":
            for option, entry in value_of(config, key.path).items():
                if isinstance(entry, str) and entry and _shown(option, entry) == HIDDEN:
                    text = text.replace(json.dumps(entry, ensure_ascii=False), json.dumps(HIDDEN))
    return text


def _shown(option: str, value: Any) -> Any:
    return HIDDEN if isinstance(value, str) and _SECRET_OPTION.search(option) else _without_login(value)


def _without_login(value: Any) -> Any:
    """An address without the name and password that may stand in it."""
    return _URL_LOGIN.sub(rf"\1{HIDDEN}@", value) if isinstance(value, str) else value


def _entry(path: Path, tracker: str) -> dict[str, Any]:
    found = _read(path).get(tracker)
    return dict(found) if isinstance(found, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # lost or damaged: the tracker begins a new run, which is all that can be done
    return found if isinstance(found, dict) else {}
