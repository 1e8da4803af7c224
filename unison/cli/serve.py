"""``unison serve``: an engine behind HTTP."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final, get_args

import msgspec

from unison.cli.arguments import ArgumentParser
from unison.config.names import did_you_mean
from unison.config.schema import EngineConfig
from unison.config.serving import LimitsConfig, ServeConfig, Staging
from unison.core.errors import ConfigError
from unison.processes.parent import end_with

EXAMPLES: Final = """\
examples:
  unison serve --model smollm2-135m
  unison serve --model my-model --port 30000 --threads 1 --engine.max_running 128
  unison serve --model my-model --host 0.0.0.0 --api-key-env USER_KEY --admin-key-env ADMIN_KEY

a first request:
  curl -s http://127.0.0.1:30000/generate -d '{"text": "3+5=", "sampling_params": {"max_new_tokens": 4}}'
"""


def run(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises UnisonError for what keeps it from starting."""
    words, settings = _split(arguments)
    options = _parser().parse(words)
    config = _serve_config(options, settings)
    engine = _section(EngineConfig, settings, "engine")
    if options.end_with_parent:
        parent = os.getppid()
        if parent == 1 or not end_with(parent, signal.SIGTERM):
            raise ConfigError("unison serve: --end-with-parent: the process that started this one is gone")
    if options.cores is not None:
        os.sched_setaffinity(0, options.cores)
    from unison.server.serve import Serving, ready_line, serve

    def on_ready(url: str) -> None:
        print(f"serving {options.model} at {url}", file=sys.stderr, flush=True)
        if options.ready_fd is not None:
            os.write(options.ready_fd, ready_line(url).encode())
            os.close(options.ready_fd)

    return serve(Serving(options.model, options.dtype, options.numerics, engine), config, on_ready)


def _parser() -> ArgumentParser:
    default = ServeConfig()
    parser = ArgumentParser("unison serve", "Put an engine behind HTTP: SGLang's contract, and our own.", EXAMPLES)
    add = parser.add_argument
    beyond = "beyond loopback, control is closed without an admin key"
    staged = "where weight updates are staged: a second copy, or the live weights (%(default)s)"
    admin = "environment variable with the key for weights, pause, abort and the like"
    tensors = "take SGLang's serialised tensors, by an allow-list of exact classes"
    add("--model", required=True, metavar="M", help="model folder, or a short name like smollm2-135m")
    add("--host", default=default.host, help=f"address to listen on (%(default)s); {beyond}")
    add("--port", type=int, default=default.port, metavar="N", help="port, 0 takes a free one (%(default)s)")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="compute dtype (%(default)s)")
    add("--numerics", choices=("auto", "exact", "fast"), default="auto", help="numerics path (%(default)s)")
    add("--staging", choices=get_args(Staging), default=default.staging, help=staged)
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of the engine; 0: all cores (%(default)s)")
    add("--cores", type=_cores, metavar="LIST", help="cores that front end and engine may use, like 0,2-3")
    add("--api-key-env", metavar="VAR", help="environment variable with the key that clients must show")
    add("--admin-key-env", metavar="VAR", help=admin)
    add("--strict", action="store_true", help="refuse unknown request fields")
    add("--incremental-streaming", action="store_true", help="stream only what is new, unless a request says else")
    add("--allow-pickled-tensors", action="store_true", help=tensors)
    add("--profile-dir", default=default.profile_dir, metavar="DIR", help="where profiles are written (%(default)s)")
    for name, text in _SECONDS.items():
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=float, default=getattr(default, name), metavar="S", help=f"{text} (%(default)s)")
    add("--ready-fd", type=int, metavar="FD", help="descriptor that is told the url once requests are taken")
    add("--end-with-parent", action="store_true", help="end when the process that started this one does")
    parser.epilog = (
        f"further settings: --engine.KEY VALUE ({', '.join(EngineConfig.__struct_fields__)}),\n"
        f"--limits.KEY VALUE ({', '.join(LimitsConfig.__struct_fields__)})\n\n" + EXAMPLES
    )
    return parser


_PLAIN: Final = (
    "host",
    "port",
    "staging",
    "threads",
    "strict",
    "incremental_streaming",
    "allow_pickled_tensors",
    "profile_dir",
)
_SECONDS: Final = {
    "health_s": "deadline in seconds of a health probe",
    "hang_s": "an engine silent for so many seconds is killed and started anew",
    "update_s": "a weight update nobody speaks of for so many seconds is given up",
    "drain_s": "seconds that SIGTERM lets requests under way end",
}


def _split(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Words for the parser, and ``--engine.KEY VALUE`` and ``--limits.KEY VALUE`` by their names."""
    words: list[str] = []
    settings: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith(("--engine.", "--limits.")):
            words.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and not rest:
            raise ConfigError(f"unison serve: --{name} needs a value")
        settings[name] = value if equals else rest.pop(0)
    return words, settings


def _section(kind: type[Any], settings: dict[str, str], section: str) -> Any:
    """A section of settings from its flags. Raises ConfigError naming flag and value."""
    values: dict[str, Any] = {}
    for name, text in settings.items():
        where, _, key = name.partition(".")
        if where != section:
            continue
        if key not in kind.__struct_fields__:
            raise ConfigError(f"unison serve: unknown flag --{name}{did_you_mean(key, kind.__struct_fields__)}")
        values[key] = text
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"unison serve: --{section}: {error}") from error


def _serve_config(options: argparse.Namespace, settings: dict[str, str]) -> ServeConfig:
    values = {name: getattr(options, name) for name in (*_PLAIN, *_SECONDS)}
    values["api_key"] = _key(options.api_key_env, "--api-key-env")
    values["admin_key"] = _key(options.admin_key_env, "--admin-key-env")
    values["limits"] = msgspec.to_builtins(_section(LimitsConfig, settings, "limits"))
    try:
        return msgspec.convert(values, ServeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"unison serve: {error}") from error


def _key(variable: str | None, flag: str) -> str | None:
    """A key from the environment: on the command line everybody on the machine could read it."""
    if variable is None:
        return None
    key = os.environ.pop(variable, "")
    if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{flag} {variable}: the variable must hold a key of at least 8 printable characters")
    return key


def _cores(text: str) -> set[int]:
    found: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be cores like 0,2-3") from None
    missing = found - os.sched_getaffinity(0)
    if missing or not found:
        raise argparse.ArgumentTypeError(f"{text!r}: this process may not use the cores {sorted(missing)}")
    return found
