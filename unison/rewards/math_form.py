r"""The outer form of a mathematical answer, read from its text: numbers, lists, sets, tuples, intervals, unions.

Brackets, commas and percent signs are read here, and only what stands between them goes to a parser: order and
brackets are then exact, and text that could keep a computer algebra system busy for ever is refused before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

MAX_CHARS: Final = 1000
"""Longer answers are refused."""
MAX_DEPTH: Final = 12
"""Brackets and braces in one another."""
MAX_ELEMENTS: Final = 32
MAX_DIGITS: Final = 400
"""Of one written number."""
MAX_POWER_DEPTH: Final = 2
"""Exponents in exponents: e^{x^2} has two."""
MAX_WRITTEN_EXPONENT: Final = 9999
"""Of 1e5 in scientific notation."""

_SPACES: Final = re.compile(r"\\[,!;: ]|~|\\q?quad(?![A-Za-z])|[\s\u00a0\u2009\u202f]+")
_DECORATION: Final = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|phantom\{\})(?![A-Za-z])|\\\$|\$"
)
_GROUPED: Final = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,| |\{,\})\d{3})+(?!\d|,\d|\{,\})")
_PERCENT: Final = re.compile(
    r"\s*(?:\\?%|(?:\\(?:text|mathrm|mbox)\s?\{\s*(?:percent|pct|percentage)\.?\s*\})|\b(?:percent|pct|percentage)\b)\s*$",
    re.IGNORECASE,
)
_AND: Final = re.compile(
    r"\s*,?\s*(?:\\(?:text|mathrm|mbox)\s?\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*"
)
_MEMBER: Final = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_TEXT: Final = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s?\{([^{}\\]*)\}")
_NUMBER: Final = re.compile(r"([-+]?)\s?(\d+(?:\.\d*)?|\.\d+)(?:[eE]([-+]?\d+))?(?:\s?/\s?(\d+))?")
_FRACTION: Final = re.compile(r"([-+]?)\s?\\[dtc]?frac\s?(?:\{\s?(-?\d+)\s?\}\s?\{\s?(\d+)\s?\}|(\d)\s?(\d))")
_REFUSED: Final = re.compile(
    r"\\(?:i*int|oint|sum|prod|coprod|lim|liminf|limsup|gcd|lcm|det|operatorname|exponentialE|over|atop|def|let"
    r"|input|include|write|[gG]amma\s?[({\[])(?![A-Za-z])|\|\s?[_^]|[\x00-\x08\x0b-\x1f\x7f]|__"
)
_LONG_EXPONENT: Final = re.compile(r"\d\s?[eE]\s?[-+]?\d{4}")
_SIDE_BY_SIDE: Final = re.compile(r"(?<!frac)(?<!frac )(?<![_^\d])\d+ \d")
_WORDY: Final = re.compile(r"[A-Za-z][A-Za-z'-]{2,}(?: [A-Za-z'-]+)*|[A-Za-z]+(?: [A-Za-z'-]+)+")
_OPENING: Final = {"(": ")", "[": "]", "\\{": "\\}", "{": "}"}
_TOKEN: Final = re.compile(r"\\begin(?![A-Za-z])|\\end(?![A-Za-z])|\\[A-Za-z]+|\\.|.", re.DOTALL)
_FUNCTION_NAMES: Final = re.compile(
    r"a?(?:sin|cos|tan|sec|csc|cot)h?|sqrt|log|ln|exp|pi|infinity|inf|max|min|mod|theta"
)


class Refused(Exception):
    """The text is no answer that can be graded: too large, too deep, or not in a form that is read."""


@dataclass(frozen=True, slots=True)
class Words:
    """An answer in words, compared without case."""

    text: str


@dataclass(frozen=True, slots=True)
class Scalar:
    """One expression: its exact value where it is a written number, and its text for the parser where not."""

    text: str
    value: Fraction | None = None
    percent: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Elements in brackets. ``opening`` is ``(``, ``[``, ``{`` for a set or a bare list, ``u`` for a union."""

    opening: str
    closing: str
    elements: tuple[Form, ...]

    @property
    def ordered(self) -> bool:
        return self.opening in "(["


Form = Words | Scalar | Group


def read_form(text: str) -> Form:
    """The form of an answer's text. Raises Refused."""
    if len(text) > MAX_CHARS:
        raise Refused(f"it has more than {MAX_CHARS} characters")
    words = _words(text)
    if words is not None:
        return words
    cleaned = _clean(text)
    if not cleaned:
        raise Refused("it is empty")
    _check(cleaned)
    return _read(cleaned)


def _words(text: str) -> Words | None:
    """Text in ``\\text{...}`` that is no unit or percent sign, or three and more bare letters that name no function."""
    text = text.strip().strip("$").strip().rstrip(".")
    wrapped = _TEXT.fullmatch(text)
    content = (wrapped.group(1) if wrapped else text).strip()
    if wrapped and content and not any(character.isdigit() for character in content):
        return Words(" ".join(content.casefold().split()))
    if content.lower() == "no" or (_WORDY.fullmatch(content) and not _FUNCTION_NAMES.match(content.lower())):
        return Words(" ".join(content.casefold().split()))
    return None


def _clean(text: str) -> str:
    text = text.replace("\u2212", "-").replace("\u00d7", "\\times ").replace("\u00b7", "\\cdot ")
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}").replace("\\lbrack", "[").replace("\\rbrack", "]")
    text = _SPACES.sub(" ", _DECORATION.sub("", text)).strip()
    text = text.removesuffix(".").strip()
    return _GROUPED.sub(lambda match: re.sub(r"[^\d]", "", match.group()), text) if _is_one_number(text) else text


def _is_one_number(text: str) -> bool:
    """Whether commas and spaces can only group digits: there are no brackets and no other commas."""
    return not re.search(r"[()\[\]]|\\\{", text) and len(_GROUPED.sub("1", text).split(",")) == 1


def _check(text: str) -> None:
    """Refuse what a parser or an algebra system might not come back from."""
    if _REFUSED.search(text):
        raise Refused("it holds a command or sign that is not read")
    if re.search(rf"\d{{{MAX_DIGITS + 1}}}", text) or _LONG_EXPONENT.search(text):
        raise Refused(f"it holds a number with more than {MAX_DIGITS} digits or too large an exponent")
    if "\\binom" in text and ("^" in text or "!" in text or re.search(r"\d{5}", text)):
        raise Refused("it holds a binomial coefficient of large numbers")
    depth = power_depth = 0
    stack: list[bool] = []
    after_power = False
    for token in _TOKEN.findall(text):
        if token in ("{", "(", "["):
            stack.append(after_power)
            depth, power_depth = max(depth, len(stack)), max(power_depth, sum(stack))
        elif token in ("}", ")", "]") and stack:
            stack.pop()
        if token == "^" and sum(stack) >= MAX_POWER_DEPTH:
            raise Refused(f"powers are nested more than {MAX_POWER_DEPTH} deep")
        after_power = token == "^" or (after_power and token == " ")
    if depth > MAX_DEPTH or power_depth > MAX_POWER_DEPTH:
        raise Refused(f"it is nested more than {MAX_DEPTH} deep, or its powers more than {MAX_POWER_DEPTH}")
    if stack and not re.search(r"[\[(].*[)\]]", text):
        raise Refused("its brackets do not match")


def _read(text: str, depth: int = 0) -> Form:
    if depth > MAX_DEPTH:
        raise Refused(f"it is nested more than {MAX_DEPTH} deep")
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text.strip()
    if text in ("\\emptyset", "\\varnothing"):
        return Group("{", "}", ())
    parts = _split(text, ("\\cup",))
    if len(parts) > 1:
        return Group("u", "u", tuple(_read(part, depth + 1) for part in parts))
    parts = _split(_AND.sub(",", text) if depth == 0 else text, (",", ";"))
    if len(parts) > MAX_ELEMENTS:
        raise Refused(f"it has more than {MAX_ELEMENTS} elements")
    if len(parts) > 1:
        return Group("{", "}", tuple(_read(part, depth + 1) for part in parts))
    inner = _bracketed(text)
    if inner is None:
        return _scalar(text)
    opening, content, closing = inner
    if opening == "{":  # braces that only group
        return _read(content, depth + 1)
    kind = {"\\{": "{"}.get(opening, opening)
    elements = _split(content, (",", ";"))
    if len(elements) > MAX_ELEMENTS:
        raise Refused(f"it has more than {MAX_ELEMENTS} elements")
    if len(elements) == 1 and opening == "(" and closing == ")":
        return _read(content, depth + 1)
    if kind == "{" and not content.strip():
        return Group("{", "}", ())
    return Group(kind, "}" if kind == "{" else closing, tuple(_read(part, depth + 1) for part in elements))


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """The text between separators that stand in no bracket and no environment."""
    parts, start, position, level = [], 0, 0, 0
    for token in _TOKEN.findall(text):
        if token in ("(", "[", "{", "\\{", "\\begin"):
            level += 1
        elif token in (")", "]", "}", "\\}", "\\end"):
            level -= 1
        elif level == 0 and token in separators:
            parts.append(text[start:position])
            start = position + len(token)
        position += len(token)
    return [*parts, text[start:]]


def _bracketed(text: str) -> tuple[str, str, str] | None:
    """(opening, content, closing) where one pair of brackets holds the whole text; ``[0,4)`` is a pair too."""
    tokens = _TOKEN.findall(text)
    if len(tokens) < 2 or tokens[0] not in _OPENING:
        return None
    level = 0
    for index, token in enumerate(tokens):
        if token in ("(", "[", "{", "\\{"):
            level += 1
        elif token in (")", "]", "}", "\\}"):
            level -= 1
            if level == 0 and index < len(tokens) - 1:
                return None
    opening, closing = tokens[0], tokens[-1]
    fits = closing in ")]" if opening in "([" else closing == _OPENING[opening]
    if level != 0 or not fits:
        return None
    content = text[len(opening) : len(text) - len(closing)]
    if closing != _OPENING[opening] and len(_split(content, (",", ";"))) != 2:
        raise Refused("an interval has two ends")
    return opening, content, closing


def _scalar(text: str) -> Scalar:
    text = text.strip()
    percent = _PERCENT.search(text)
    if percent:
        text = text[: percent.start()].strip()
    if not text:
        raise Refused("an element is empty")
    if _SIDE_BY_SIDE.search(text):
        raise Refused("two numbers stand side by side")
    return Scalar(text, written_number(text), bool(percent))


def written_number(text: str) -> Fraction | None:
    r"""The exact value of ``12``, ``-0.5``, ``1.5e3``, ``3/4`` and ``\frac{3}{4}``; None for anything else."""
    match = _NUMBER.fullmatch(text)
    if match:
        sign, digits, exponent, denominator = match.groups()
        if exponent and abs(int(exponent)) > MAX_WRITTEN_EXPONENT:
            raise Refused("its exponent is too large")
        value = Fraction(digits if digits[-1] != "." else digits[:-1]) * Fraction(10) ** int(exponent or 0)
        return _divided(value, int(denominator or 1), sign)
    match = _FRACTION.fullmatch(text)
    if match:
        sign, top, bottom, short_top, short_bottom = match.groups()
        return _divided(Fraction(int(top or short_top)), int(bottom or short_bottom), sign)
    return None


def _divided(value: Fraction, denominator: int, sign: str) -> Fraction:
    if denominator == 0:
        raise Refused("it divides by zero")
    return (-value if sign == "-" else value) / denominator
