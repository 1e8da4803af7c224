"""The process that makes reasoning_gym's rows: requests as lines of JSON in, answers as lines of JSON out.

Some of the package's data sets walk through sets of text, whose order Python draws anew in each
process. Here the hash seed is fixed, and Python's and numpy's global generators are seeded for each
row, so a row is a function of data set, settings, seed and index. It also keeps what some data sets
print away from our own output.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from unison.config.names import did_you_mean
from unison.core.errors import ConfigError, DataError, UnisonError

REFUSED = {"composite": "it joins other data sets; name several in options.dataset, or as parts of data.mix"}
"""Data sets that options alone cannot describe, each with the reason."""
_SCALARS = (bool, int, float, str)


class Maker:
    """The data sets opened so far, and their rows."""

    def __init__(self) -> None:
        self._opened: dict[str, Any] = {}

    def names(self) -> list[str]:
        """All data sets that can be opened."""
        return sorted(set(_known()) - set(REFUSED))

    def open(self, name: str, seed: int, size: int, options: Mapping[str, Any]) -> str:
        """A handle to ask for rows by. Raises ConfigError for a name or option that cannot be meant."""
        known = _known()
        if name in REFUSED:
            raise ConfigError(f"data.options.dataset={name!r} cannot be used: {REFUSED[name]}")
        if name not in known:
            raise ConfigError(f"data.options.dataset={name!r} is unknown to reasoning_gym{did_you_mean(name, known)}")
        handle = json.dumps([name, seed, size, dict(options)], sort_keys=True)
        if handle not in self._opened:
            kind, config_kind = known[name]
            settings = _settings(name, config_kind, options)
            _seed_globals(f"{name} {seed}")
            try:
                config = config_kind(**settings, seed=seed, size=size)
                if hasattr(config, "validate"):
                    config.validate()
                self._opened[handle] = kind(config=config)
            except (AssertionError, TypeError, ValueError) as error:
                raise ConfigError(f"data.options do not suit reasoning_gym's {name}: {error}") from error
        return handle

    def row(self, handle: str, index: int) -> dict[str, Any]:
        """The entry at ``index``. Raises DataError where the data set cannot make it."""
        name, seed, *_ = json.loads(handle)
        _seed_globals(f"{name} {seed} {index}")
        try:
            entry = self._opened[handle][index]
        except Exception as error:
            raise DataError(f"reasoning_gym's {name} failed on row {index}: {type(error).__name__}: {error}") from error
        question = entry.get("question") if isinstance(entry, dict) else None
        if not isinstance(question, str) or not question:
            raise DataError(f"reasoning_gym's {name} made no question for row {index}")
        return dict(entry)


def answer(maker: Maker, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one request: ``{"result": ...}``, or ``{"error": kind, "message": ...}``."""
    try:
        arguments = {name: value for name, value in request.items() if name != "do"}
        calls: dict[str, Callable[..., Any]] = {"names": maker.names, "open": maker.open, "row": maker.row}
        result = calls[request["do"]](**arguments)
        # Not only here to be sent: what is no JSON must be told as an error of this row.
        return {"result": json.loads(json.dumps(result, default=_plain, allow_nan=False))}
    except UnisonError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except (TypeError, ValueError) as error:
        return {"error": "DataError", "message": f"reasoning_gym: the row has no JSON form: {error}"}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    maker = Maker()
    for line in sys.stdin:
        answers.write(json.dumps(answer(maker, json.loads(line))) + "\n")
        answers.flush()


def _known() -> dict[str, tuple[Any, Any]]:
    try:
        package = import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"data.source='reasoning_gym' needs the package reasoning-gym ({error}); pip install 'unison[rewards]'"
        ) from error
    known: dict[str, tuple[Any, Any]] = package.factory.DATASETS
    return known


def _settings(name: str, config_kind: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    neutral = vars(config_kind())
    own = [option for option in neutral if option not in ("seed", "size")]
    settings: dict[str, Any] = {}
    for option, value in options.items():
        if option not in own:
            raise ConfigError(
                f"data.options.{option} is unknown to reasoning_gym's {name}{did_you_mean(option, own)}"
                f" (it takes {', '.join(own) or 'none of its own'})"
            )
        settings[option] = _fitted(f"data.options.{option}", value, neutral[option])
    return settings


def _fitted(path: str, value: Any, default: Any) -> Any:
    """The value as the data set's setting holds it; lists are given as JSON text."""
    if default is None:
        return value
    if isinstance(default, (list, tuple)):
        try:
            items = json.loads(value) if isinstance(value, str) else None
        except ValueError:
            items = None
        if not isinstance(items, list):
            raise ConfigError(
                f"{path}={value!r} must be a list as JSON text, like '{json.dumps(default, default=str)}'"
            )
        inner = [tuple(item) if isinstance(item, list) else item for item in items]
        return tuple(inner) if isinstance(default, tuple) else inner
    if type(default) not in _SCALARS:
        raise ConfigError(f"{path} is a {type(default).__name__}, which no option can hold; leave it out")
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise ConfigError(f"{path}={value!r} must be a {type(default).__name__}, like {default!r}")
    return value


def _seed_globals(text: str) -> None:
    import numpy

    random.seed(text)
    numpy.random.seed(random.getrandbits(32))


def _plain(value: Any) -> Any:
    """numpy's numbers as Python's; whatever else json does not know is refused."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")


if __name__ == "__main__":
    main()
