"""argparse whose complaints are ConfigErrors with a suggestion."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from unison.config.names import join_or, nearest
from unison.core.errors import ConfigError


class HelpShown(Exception):
    """The user asked for help and has got it; there is nothing else to do."""


class ArgumentParser(argparse.ArgumentParser):
    """Never abbreviates, never exits on errors, and names the flag that was probably meant."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Raises ConfigError for anything not understood."""
        found, unknown = self.parse_known_args(arguments)
        if unknown:
            raise ConfigError(self._unknown(unknown[0]))
        return found

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Called by argparse after ``--help``."""
        raise HelpShown

    def error(self, message: str) -> NoReturn:
        hint = "; a value that begins with - is given as --flag=VALUE" if "expected one argument" in message else ""
        raise ConfigError(f"{self.prog}: {message}{hint}; see {self.prog} --help")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{self.prog}: unexpected argument {word!r}; see {self.prog} --help"
        flag = word.partition("=")[0]
        names = [name.lstrip("-") for action in self._actions for name in action.option_strings if name != "-h"]
        found = [f"--{name}" for name in nearest(flag.lstrip("-"), names)]
        hint = f"; did you mean {join_or(found)}?" if found else ""
        return f"{self.prog}: unknown flag {flag}{hint}; see {self.prog} --help"


def id_list(text: str) -> tuple[int, ...]:
    """Token ids given as ``5,6,7``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be token ids like 5,6,7") from None


def id_value(text: str) -> tuple[int, float]:
    """A token id with a number, given as ``ID=X``."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a token id and a number like 5=-1.5") from None
