"""Prompts of the package reasoning-gym: procedural tasks, each row made when it is asked for."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, cast

import unison
from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.core.seeds import derive_seed
from unison.data.source import PromptRow, PromptSource, Split, refuse_settings

DEFAULT_SIZE: Final = 500
EVAL_OFFSET: Final = 1 << 31
"""From a training seed to the held-out one: rows i of a seed may be rows 0 of seed + i, never so far away."""
MAX_SIZE: Final = 1 << 30
_MAX_SEED: Final = (1 << 30) - 1
_DEADLINE_S: Final = 300.0
_CACHED_ROWS: Final = 4096


class GymSource:
    """Rows of one or more data sets in turn; row i belongs to data set i modulo their number.

    A row's label is ``{"dataset": name, "entry": entry}`` with the package's entry in plain JSON values
    (tuples have become lists, keys text).
    """

    def __init__(self, worker: GymWorker, names: Sequence[str], *, seed: int, size: int, options: Any) -> None:
        self._worker = worker
        self._names = list(names)
        self._seed = seed
        self._size = size
        sizes = [len(range(place, size, len(names))) for place in range(len(names))]
        self._handles = [
            cast(str, worker.ask("open", name=name, seed=seed, size=own, options=options))
            for name, own in zip(names, sizes, strict=True)
        ]
        self.identity = f"reasoning_gym {_version()} {json.dumps([self._handles, size])}"
        self._cached = lru_cache(maxsize=_CACHED_ROWS)(self._make)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> PromptRow:
        if not 0 <= index < self._size:
            raise IndexError(index)
        return self._cached(index)

    def _make(self, index: int) -> PromptRow:
        row, place = divmod(index, len(self._names))
        name = self._names[place]
        entry = self._worker.ask("row", handle=self._handles[place], index=row)
        return PromptRow(
            f"{name}:{self._seed}:{row}", entry["question"], {"dataset": name, "entry": entry}, {"dataset": name}
        )


def open_gym(config: DataConfig, split: Split, seed: int) -> PromptSource:
    """One split, as configured in ``data.options``. Raises ConfigError on a wrong option or data set."""
    unused = ("train", "eval", "layout", "prompt_key", "label_key", "metadata_key", "on_bad_row")
    refuse_settings(config, *unused)
    options = dict(config.options)
    size = _whole(options.pop("size", DEFAULT_SIZE), "size", 1, MAX_SIZE)
    derived = derive_seed(seed, "reasoning_gym") & _MAX_SEED
    own_seed = _whole(options.pop("seed", derived), "seed", 0, _MAX_SEED)
    worker = shared_worker()
    names = _names(options.pop("dataset", None), worker)
    if len(names) > 1 and options:
        raise ConfigError(
            f"data.options.{next(iter(options))} would be given to each of {len(names)} data sets; make each a part of "
            "data.mix with options of its own"
        )
    if size < len(names):
        raise ConfigError(f"data.options.size={size} leaves some of the {len(names)} data sets without a row; raise it")
    own_seed += EVAL_OFFSET if split == "eval" else 0
    return GymSource(worker, names, seed=own_seed, size=size, options=options)


class GymWorker:
    """The process that makes the rows (``unison.data.gym_worker``); it ends with this one."""

    def __init__(self, deadline_s: float = _DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        package = str(Path(unison.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        # -P: no file of the current folder takes the place of a module.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "unison.data.gym_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path},
            bufsize=0,
        )
        self._read = b""
        self.close = weakref.finalize(self, _stop, self._process)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, what: str, **arguments: Any) -> Any:
        """The answer to one request. Raises what the request comes to, DataError where the process fails."""
        request = (json.dumps({"do": what, **arguments}) + "\n").encode()
        with self._lock:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(request)
                reply = json.loads(self._line(what, arguments))
            except (OSError, EOFError) as error:
                self._process.kill()
                raise DataError(f"the process that makes reasoning_gym's rows ended: {self._last_words()}") from error
        if "error" in reply:
            raise (ConfigError if reply["error"] == "ConfigError" else DataError)(reply["message"])
        return reply["result"]

    def _line(self, what: str, arguments: dict[str, Any]) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        end = time.monotonic() + self._deadline_s
        while b"\n" not in self._read:
            if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                self._process.kill()
                raise DataError(f"reasoning_gym took over {self._deadline_s:.0f} s to {what} {arguments}; leave it out")
            piece = os.read(pipe, 1 << 16)
            if not piece:
                raise EOFError
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-500:] or f"status {self._process.wait()}"


_shared: list[GymWorker] = []
_shared_lock: Final = threading.Lock()


def shared_worker() -> GymWorker:
    """The one process of this one, started at first use and again where it has ended."""
    with _shared_lock:
        if not _shared or not _shared[0].alive:
            _shared[:] = [GymWorker()]
        return _shared[0]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _names(given: Any, worker: GymWorker) -> list[str]:
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(
            "data.options.dataset is missing; name a data set of reasoning_gym, several with commas between, or all"
        )
    if given == "all":
        return cast(list[str], worker.ask("names"))
    names = [name.strip() for name in given.split(",")]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"data.options.dataset names {twice[0]!r} twice; a weight is given in data.mix")
    return names


def _whole(value: Any, name: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"data.options.{name}={value!r} must be a whole number from {least} to {most}")
    return value


def _version() -> str:
    try:
        return version("reasoning-gym")
    except PackageNotFoundError:
        return "of unknown version"
