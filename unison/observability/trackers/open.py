"""From ``log.trackers`` to sinks: names, options and packages are checked before a run starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unison.config.names import did_you_mean
from unison.config.plugins import load_object
from unison.config.schema import LogConfig, TrainConfig
from unison.core.errors import ConfigError
from unison.core.protocols import MetricSink
from unison.observability.trackers.background import BackgroundSink
from unison.observability.trackers.base import (
    MEMORY_FILE,
    Memory,
    OpenTracker,
    TrackerRun,
    public_toml,
    tracker_config,
)
from unison.observability.trackers.known import TRACKERS
from unison.observability.warn import Warn, warn_on_stderr


def check_trackers(log: LogConfig) -> dict[str, dict[str, Any]]:
    """The options of each chosen tracker. Imports nothing but modules of the user's own.

    Raises ConfigError for an unknown tracker or option, one named twice, a package that is not installed, and an
    own one that cannot be loaded.
    """
    for name in log.trackers:
        if log.trackers.count(name) > 1:
            raise ConfigError(f"log.trackers names {name!r} twice; leave one out")
        if ":" in name:
            _own(name)
        elif name not in TRACKERS:
            raise ConfigError(
                f"log.trackers: the tracker {name!r} is unknown{did_you_mean(name, TRACKERS)}"
                f" (known: {', '.join(TRACKERS)}; your own is named module:object)"
            )
        elif importlib.util.find_spec(TRACKERS[name].package) is None:
            raise ConfigError(
                f"log.trackers: {name} needs the package {TRACKERS[name].package}, which is not installed; "
                f"run: pip install 'unison[{TRACKERS[name].extra}]'"
            )
    return _options_by_tracker(log.trackers, log.tracker_options)


def open_trackers(
    config: TrainConfig, folder: Path, resume_step: int | None = None, *, warn: Warn = warn_on_stderr
) -> list[MetricSink]:
    """A sink for each of ``log.trackers``, each in a thread of its own; see ``BackgroundSink``.

    ``resume_step`` is the last step that stays where a run goes on: the trackers go on in the same run of theirs.
    Raises ConfigError as ``check_trackers`` does; whatever fails later only warns.
    """
    options = check_trackers(config.log)
    sinks: list[MetricSink] = []
    for name in config.log.trackers:
        run = TrackerRun(
            name=config.run.name,
            config=tracker_config(config),
            config_toml=public_toml(config),
            folder=folder,
            resume_step=resume_step,
            options=options[name],
            memory=Memory(folder / MEMORY_FILE, name),
        )
        opener: OpenTracker = _own(name) if ":" in name else load_opener(name)
        sinks.append(BackgroundSink(name, partial(opener, run), warn=warn))
    return sinks


def load_opener(name: str) -> OpenTracker:
    """The function that opens a known tracker. Its package is imported when it is called."""
    opener: OpenTracker = load_object(TRACKERS[name].opener, kind="tracker", error=ConfigError)
    return opener


def _own(path: str) -> OpenTracker:
    found: Any = load_object(path, kind="tracker", error=ConfigError)
    if not callable(found):
        raise ConfigError(
            f"the tracker {path!r} is a {type(found).__name__}; name a function (run) that returns an object "
            "with log(step, metrics) and close()"
        )
    opener: OpenTracker = found
    return opener


def _options_by_tracker(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in options.items():
        chosen = max((name for name in names if key.startswith(f"{name}.")), key=len, default=None)
        if chosen is None:
            raise ConfigError(_no_tracker(key, names))
        option = key[len(chosen) + 1 :]
        if chosen in TRACKERS:
            _check_option(chosen, option, value)
        found[chosen][option] = value
    return found


def _check_option(tracker: str, option: str, value: object) -> None:
    known = TRACKERS[tracker].options
    if option not in known:
        raise ConfigError(
            f"log.tracker_options: {tracker} has no option {option!r}{did_you_mean(option, known)}"
            f" (it takes {', '.join(f'{tracker}.{name}' for name in known)})"
        )
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"log.tracker_options: {tracker}.{option} is {value!r}, but must be a text")


def _no_tracker(key: str, names: Sequence[str]) -> str:
    head = key.partition(".")[0]
    if head in TRACKERS:
        return (
            f'log.tracker_options: {key} is set, but log.trackers does not name "{head}"; add it or remove the option'
        )
    return (
        f"log.tracker_options: {key} belongs to no tracker{did_you_mean(head, [*names, *TRACKERS])}; options are "
        "named TRACKER.OPTION, like wandb.project"
    )
