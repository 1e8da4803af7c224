"""Multiple choice: which letter was chosen."""

from __future__ import annotations

import re
from string import ascii_uppercase
from typing import Final

from unison.core.errors import RewardError
from unison.rewards.extract import last_box
from unison.rewards.options import checked_by

MAX_OPTIONS: Final = len(ascii_uppercase)
_MAX_BOX_CHARS: Final = 64
_LETTER: Final = re.compile(r"[\s(\[*]*(?:\\text(?:bf)?\{\s*)?[\s(\[]*([A-Za-z])(?=[\s)\]}.:,*]|$)")
_ANNOUNCED: Final = re.compile(
    r"\b[Aa][Nn][Ss][Ww][Ee][Rr](?: is|:| is:)[\s*:]{0,8}[(\[]?([A-Z])(?![A-Za-z0-9'\u2019])"
)
_ALONE: Final = re.compile(r"(?<![A-Za-z0-9'\u2019])([A-Z])(?![A-Za-z0-9'\u2019])(?! [a-z])")


def _check_options(*, num_options: int = 4) -> None:
    if isinstance(num_options, bool) or not isinstance(num_options, int) or not 2 <= num_options <= MAX_OPTIONS:
        raise RewardError(f"num_options = {num_options!r}; it must be an integer from 2 to {MAX_OPTIONS}")


@checked_by(_check_options)
def multiple_choice(text: str, label: object, *, num_options: int = 4) -> float:
    """1.0 if the chosen letter is the label's, else 0.0.

    The first of these that is there decides: the last closed box; the last "answer is (B)" or "answer: B"; the last
    capital letter that stands alone and is not followed by a word in small letters (as the article "A" is). Letters
    beyond ``num_options`` are no options and are passed over, but in a box. ``label`` is a letter, or an integer that
    counts from 0. Raises ValueError where it names no option.
    """
    _check_options(num_options=num_options)
    letters = ascii_uppercase[:num_options]
    right = _letter_of(label, letters)
    return float(chosen_letter(text, letters) == right)


def chosen_letter(text: str, letters: str) -> str | None:
    """The letter a response decides for, None where it names none of ``letters``."""
    box = last_box(text)
    if box is not None:
        match = _LETTER.match(box[:_MAX_BOX_CHARS])
        return match.group(1).upper() if match else None
    for pattern in (_ANNOUNCED, _ALONE):
        chosen = None
        for match in pattern.finditer(text):
            chosen = match.group(1) if match.group(1) in letters else chosen
        if chosen is not None:
            return chosen
    return None


def _letter_of(label: object, letters: str) -> str:
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    if isinstance(label, str):
        name = label.strip().strip("().").upper()
        if len(name) == 1 and name in letters:
            return name
    raise ValueError(
        f"multiple_choice cannot use {label!r} as label; give a letter from A to {letters[-1]}, "
        f"or an integer from 0 to {len(letters) - 1}"
    )
