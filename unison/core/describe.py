"""An exception of somebody's code in one line: its kind, its text, and where it arose."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

_MAX_CHARS: Final = 2000
LAYOUT: Final = "\n\t"
"""What ``printable`` keeps of a text of several lines."""


def describe(error: BaseException) -> str:
    """``ValueError: no number (at my_rewards.py:12)``, fit for a terminal and for any file."""
    return printable(f"{type(error).__name__}: {text_of(error)[:_MAX_CHARS]}{place_of(error)}")


def printable(text: str, *, keep: str = "") -> str:
    """The text with escapes in place of what is no letter, sign or space; ``keep`` has characters to leave alone.

    Such texts quote what a model or a file said: a terminal must not obey it, and no line of it be taken for ours.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else repr(letter)[1:-1] for letter in text)


def place_of(error: BaseException) -> str:
    """Where in their code it arose, as `` (at file:line)``; the frame that called them is left out."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)[1:]
        if not frame.filename.startswith("<frozen") and Path(frame.filename).parts[-2:] != ("importlib", "__init__.py")
    ]
    return f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def text_of(value: object) -> str:
    """The value as text, even where its own code fails."""
    try:
        return str(value)
    except Exception as error:  # a user's __str__ may raise anything; the failure itself is reported all the same
        return f"<no text: {type(error).__name__}>"
