r"""Mathematical answers, compared by value.

The last closed ``\boxed{...}`` is the answer. Its brackets, lists and written numbers are read here (``math_form``),
expressions are parsed and compared by math-verify 0.9, and numbers are compared exactly (``math_values``).

What math-verify does with text (read in its source and that of latex2sympy2_extended 1.11): LaTeX goes through an ANTLR
grammar whose tree is turned into sympy objects one by one; names become symbols, numbers go to ``sympy.Number``, and no
text reaches ``sympify``, ``parse_expr`` or ``eval``. Its other way in, ``ExprExtractionConfig``, gives text to sympy's
``parse_expr``, which is Python's ``eval``. It is not configured here, so model text is never evaluated as code. Its
time limits use signals, which work only in a main thread; they are switched off, and what may take without end is
refused beforehand. What still does, a simplification above all, only the caller's deadline ends.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, Final

from unison.rewards.extract import has_box, last_box, last_number
from unison.rewards.labels import text_of
from unison.rewards.math_form import MAX_CHARS, Form, Group, Refused, Scalar, Words, read_form, written_number
from unison.rewards.math_values import check_size, probes_agree, same_number
from unison.rewards.optional import optional_module
from unison.rewards.options import check_choice, check_number, checked_by

FALLBACKS: Final = ("none", "number", "whole")
_PRODUCT: Final = re.compile(r"(?<=[\d)])\s?(?=\()")


def _check_options(*, fallback: str = "none", relative_tolerance: float = 0.0) -> None:
    check_choice("fallback", fallback, FALLBACKS)
    check_number("relative_tolerance", relative_tolerance, 0, 1, below_high=True)


@checked_by(_check_options)
def math_answer(text: str, label: object, *, fallback: str = "none", relative_tolerance: float = 0.0) -> float:
    r"""1.0 if the last closed box of the response has the label's value, else 0.0.

    ``label`` is a string or integer: the plain answer, or text with a box. Equal are ``\frac{3}{8}`` and ``0.375``,
    ``12,500`` and ``12500``, ``18\%``, ``18 \text{ percent}``, ``18`` and ``0.18``; sets and bare lists in any order;
    tuples and intervals only in their order, with their brackets. Numbers are exact: rationals as such, irrational ones
    to 50 digits; ``relative_tolerance`` lets written numbers differ by that share of the label. A box that never closes
    is no answer. ``fallback`` says what counts where no box was begun: ``"none"``, the last ``"number"``, or the
    ``"whole"`` text.

    Wrong, without being worked out: more than 1000 characters, 12 levels of brackets, 32 elements or 400 digits; more
    than two levels of powers, powers and factorials of more than 20 000 digits, sums, integrals, limits; text that does
    not parse. Raises ValueError where that is so of the label. Needs math-verify.
    """
    _check_options(fallback=fallback, relative_tolerance=relative_tolerance)
    gold = _gold(text_of(label, "math_answer"))
    answer = _answer_of(text, fallback)
    if answer is None:
        return 0.0
    try:
        return float(_same(gold, read_form(answer), Fraction(relative_tolerance)))
    except (Refused, RecursionError):
        return 0.0


def _answer_of(text: str, fallback: str) -> str | None:
    if has_box(text):
        return _unboxed(last_box(text))
    if fallback == "whole":
        return text
    if fallback == "number":
        return last_number(text)
    return None


def _unboxed(box: str | None) -> str | None:
    """The content without further boxes around all of it."""
    while box is not None and len(box) <= MAX_CHARS and has_box(box):
        inner = last_box(box)
        if inner is None:
            break
        box = inner
    return box


@lru_cache(maxsize=1024)
def _gold(label: str) -> Form:
    content = _unboxed(last_box(label)) if has_box(label) else label
    if content is None:
        raise ValueError(f"math_answer cannot use the label {label[:200]!r}: its box never closes")
    try:
        form = read_form(content)
        _parse_all(form)
    except (Refused, RecursionError) as error:
        raise ValueError(f"math_answer cannot use the label {label[:200]!r}: {error}") from error
    return form


def _parse_all(form: Form) -> None:
    """Raises Refused where some part of it cannot be parsed."""
    if isinstance(form, Group):
        for element in form.elements:
            _parse_all(element)
    elif isinstance(form, Scalar) and form.value is None:
        _parsed(form.text)


def _same(gold: Form, answer: Form, tolerance: Fraction) -> bool:
    if isinstance(gold, Words) or isinstance(answer, Words):
        return gold == answer or _same_words(gold, answer)
    gold, answer = _as_group(gold, answer), _as_group(answer, gold)
    if isinstance(gold, Group) and isinstance(answer, Group):
        return _same_group(gold, answer, tolerance)
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return _same_scalar(gold, answer, tolerance)
    return False


def _same_words(gold: Form, answer: Form) -> bool:
    """Words against a single letter or name: ``\\text{A}`` and ``A``."""
    texts = [form.text.strip("() ").casefold() if not isinstance(form, Group) else None for form in (gold, answer)]
    return texts[0] is not None and texts[0] == texts[1]


def _as_group(form: Form, other: Form) -> Form:
    """A lone element as a set where the other side is one."""
    if isinstance(form, Scalar) and isinstance(other, Group) and not other.ordered and other.opening != "u":
        return Group("{", "}", (form,))
    return form


def _same_group(gold: Group, answer: Group, tolerance: Fraction) -> bool:
    if (gold.opening, gold.closing) != (answer.opening, answer.closing):
        return False
    if gold.ordered:
        pairs = zip(gold.elements, answer.elements, strict=False)
        return len(gold.elements) == len(answer.elements) and all(_same(a, b, tolerance) for a, b in pairs)
    golds, answers = _expanded(gold.elements), _expanded(answer.elements)
    return _covered(golds, answers, tolerance) and _covered(answers, golds, tolerance, swapped=True)


def _covered(these: Sequence[Any], those: Sequence[Any], tolerance: Fraction, *, swapped: bool = False) -> bool:
    """Whether each of these equals one of those."""
    return all(any(_same(*((b, a) if swapped else (a, b)), tolerance) for b in those) for a in these)


def _expanded(elements: Sequence[Form]) -> list[Form]:
    r"""The elements, ``3 \pm 2`` as two."""
    found: list[Form] = []
    for element in elements:
        if isinstance(element, Scalar) and "\\pm" in element.text:
            found += [_scalar(element.text.replace("\\pm", sign)) for sign in ("+", "-")]
        else:
            found.append(element)
    return found


def _scalar(text: str) -> Scalar:
    return Scalar(text, written_number(text.strip()))


def _same_scalar(gold: Scalar, answer: Scalar, tolerance: Fraction) -> bool:
    if "\\pm" in gold.text + answer.text:
        return _same_group(Group("{", "}", (gold,)), Group("{", "}", (answer,)), tolerance)
    if gold.value is not None and answer.value is not None:
        allowed = tolerance * abs(gold.value)
        if gold.percent == answer.percent:
            return abs(gold.value - answer.value) <= allowed
        # A percent sign may be left out, or worked out: 18% is 18 and is 0.18.
        marked, plain = (gold.value, answer.value) if gold.percent else (answer.value, gold.value)
        return abs(marked - plain) <= allowed or abs(marked / 100 - plain) <= allowed / (100 if gold.percent else 1)
    if gold.text == answer.text:
        return True
    return _same_expression(_parsed(gold.text), _parsed(answer.text))


def _same_expression(gold: Any, answer: Any) -> bool:
    sympy, grader = optional_module("sympy", "math-verify"), _math_verify()
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return gold.shape == answer.shape and all(
            _same_expression(a, b) for a, b in zip(gold.flat(), answer.flat(), strict=True)
        )
    gold, answer = _unwrapped(gold, answer, sympy)
    numbers = [isinstance(side, sympy.Expr) and not side.free_symbols for side in (gold, answer)]
    if all(numbers):
        same = same_number(gold, answer, sympy)
        if same is not None:
            return same
    if all(isinstance(side, sympy.Expr) for side in (gold, answer)) and not probes_agree(gold, answer, sympy):
        return False
    return bool(grader.verify(gold, answer, timeout_seconds=None))


def _unwrapped(gold: Any, answer: Any, sympy: Any) -> tuple[Any, Any]:
    """``x = 5`` as 5, where the other side is an expression, or says the same of the same unknown."""
    assigned = [isinstance(side, sympy.Eq) and side.lhs.is_Symbol for side in (gold, answer)]
    if all(assigned) and gold.lhs != answer.lhs:
        return gold, answer
    bare = [isinstance(side, sympy.Expr) for side in (gold, answer)]
    if all(one or other for one, other in zip(assigned, bare, strict=True)):
        gold, answer = (side.rhs if one else side for side, one in zip((gold, answer), assigned, strict=True))
    return gold, answer


@cache
def _math_verify() -> Any:
    module = optional_module("math_verify", "math-verify")
    # It warns once that its time limits are off, as they are meant to be.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return module


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """The expression as math-verify reads it, checked in size. Raises Refused where it reads none."""
    sympy, math_verify = optional_module("sympy", "math-verify"), _math_verify()
    config = math_verify.LatexExtractionConfig(boxed_match_priority=-1)
    # A number before a bracket would be read as a mixed fraction: 2(3) as 2 + 3.
    spelt = _PRODUCT.sub(r"\\cdot ", text)
    found = math_verify.parse(f"${spelt}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    if len(found) != 1 or not isinstance(found[0], (sympy.Basic, sympy.MatrixBase)):
        raise Refused("it does not parse")
    check_size(found[0], sympy)
    return found[0]
