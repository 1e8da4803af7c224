"""An exception of somebody's code in one line: its kind, its text, and where it arose."""

from __future__ import annotations

import traceback
from pathlib import Path


def describe(error: BaseException) -> str:
    """``ValueError: no number (at my_rewards.py:12)``."""
    return f"{type(error).__name__}: {text_of(error)}{place_of(error)}"


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
