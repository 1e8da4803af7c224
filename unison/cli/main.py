"""The entry point: finds the subcommand, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final

import unison
from unison.cli.arguments import HelpShown
from unison.cli.env import prepare_environment
from unison.config.names import did_you_mean
from unison.core.describe import LAYOUT, printable
from unison.core.errors import ConfigError, RunInterrupted, UnisonError

COMMANDS: Final[dict[str, str]] = {
    "train": "train a model on your prompts and reward",
    "eval": "score a model, or what a run has trained, on held-out prompts",
    "export": "make a run's model a folder that transformers loads",
    "generate": "sample from a model",
    "serve": "put an engine behind HTTP",
    "replay": "take training steps of a run once more, and compare them to the bit",
    "samples": "read the rollouts of a step from a run folder",
    "bench": "measure how fast a workload is answered, here or by a server",
    "check": "prove exactness here, look into a run, or test a plug-in",
    "doctor": "look for what is wrong or slow on this machine",
}
"""Each lives in ``unison.cli.<name>`` as ``run(arguments) -> exit code``."""

EXIT_OK: Final = 0
EXIT_USER_ERROR: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

USAGE: Final = """\
usage: unison COMMAND ...

Reinforcement learning of language models, rollout and training as one system.

commands:
{commands}

options:
  --version    print the version
  --traceback  with a command: show where in the code an error comes from

examples:
  unison train config.toml --trainer.steps 50
  unison generate --model smollm2-135m --chat "What is 2+3?"

`unison COMMAND --help` explains a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 a check failed, 2 a user's error, 130 interrupted
    (143 by SIGTERM)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in arguments
    arguments = [word for word in arguments if word != "--traceback"]
    prepare_environment()
    _tolerate_narrow_encodings()
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except HelpShown:
        return EXIT_OK
    except RunInterrupted as interrupted:
        # What was saved, and how to go on, is said already.
        return 128 + int(getattr(signal, interrupted.signal_name))
    except UnisonError as error:
        if traceback:
            raise
        print(f"error: {printable(str(error), keep=LAYOUT)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        if traceback:
            raise
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has left. What is still buffered must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def usage() -> str:
    width = max(map(len, COMMANDS))
    return USAGE.format(commands="\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return EXIT_OK if arguments else EXIT_USER_ERROR
    name, *rest = arguments
    if name == "--version":
        print(f"unison {unison.__version__}")
        return EXIT_OK
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        known = ["--version", "--help"] if kind == "flag" else COMMANDS
        raise ConfigError(f"unknown {kind} {name!r}{did_you_mean(name, known)}; see unison --help")
    run: Callable[[list[str]], int] = importlib.import_module(f"unison.cli.{name}").run
    return run(rest)


def _tolerate_narrow_encodings() -> None:
    """A letter that the terminal has not is shown as an escape; it must not stop a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
