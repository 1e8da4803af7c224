"""Mathematical answers: known pairs, exactness, labels, limits, and use from threads."""

from __future__ import annotations

import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unison.core.errors import RewardError
from unison.rewards.math_form import Refused, written_number
from unison.rewards.mathematics import math_answer

pytest.importorskip("math_verify")

EQUAL = [
    (r"\frac{3}{8}", "0.375"),
    (r"\frac59", r"\frac{5}{9}"),
    (r"\frac 5 9", r"\dfrac{5}{9}"),
    (r"\{2,5\}", r"\{5,2\}"),
    (r"\{2,5\}", "5,2"),
    ("1,2", r"2 \text{ and } 1"),
    (r"\{1,1,2\}", r"\{1,2\}"),
    (r"\emptyset", r"\{\}"),
    ("(2,5)", r"\left(2,\,5\right)"),
    (r"(1,\frac12)", "(1,0.5)"),
    ("((1,2),(3,4))", "((1,2),(3,4))"),
    (r"18\%", r"18 \text{ percent}"),
    (r"18\%", "18 percent"),
    (r"18\%", "0.18"),
    ("18", r"18\,\%"),
    ("12500", "12,500"),
    ("12{,}500", "12500"),
    (r"5\,000", "5000"),
    (r"\frac{1}{1500!}", r"\frac{1}{1500!}"),
    ("0.1", r"\frac{1}{10}"),
    ("1.5e3", "1500"),
    (r"1.5 \times 10^5", "150000"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
    ("0", r"\sqrt{2}\sqrt{3}-\sqrt{6}"),
    (r"\log_2 8", "3"),
    (r"\sin(\pi/6)", r"\frac12"),
    ("2^{2^{3}}", "256"),
    (r"2\frac{1}{2}", "2.5"),
    ("(2)(3)", "6"),
    ("2(3)", "6"),
    (r"\binom{5}{2}", "10"),
    ("x^2+2x", "x(x+2)"),
    ("e^{x^2}", "e^{x^{2}}"),
    ("x=5", "5"),
    ("5", "x = 5"),
    (r"x \ge 3", r"3 \le x"),
    (r"x \in [0,1]", "[0,1]"),
    (r"\pm 3", "3,-3"),
    (r"3 \pm \sqrt{5}", r"3-\sqrt5, 3+\sqrt5"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\text{Monday}", "monday"),
    ("A", r"\text{A}"),
    ("5", r"5 \text{ cm}"),
    ("5", r"\$5"),
    ("-5", "\u22125"),
]
DIFFERENT = [
    (r"\frac{2}{7}", r"\frac{2}{9}"),
    ("(2,5)", "(5,2)"),
    ("(2,5)", "[2,5]"),
    ("(2,5)", r"\{2,5\}"),
    ("(2,5)", "2,5"),
    ("[0,4)", "(0,4]"),
    (r"\frac{1}{1500!}", r"\frac{1}{1501!}"),
    (r"x+\frac{1}{1500!}", r"x+\frac{1}{1501!}"),
    (r"x=\frac{1}{1500!}", r"x=\frac{1}{1501!}"),
    (r"\frac{1}{1500!}", "0"),
    ("6", r"6\sqrt{5}"),
    (r"\sqrt{2}", "1.41421356"),
    (r"\pi", "3.14159"),
    (r"\frac13", "0.333333"),
    ("1,2", "1"),
    ("1", "1,2"),
    (r"\pm 3", "3"),
    (r"18\%", "1800"),
    (r"18\%", "19"),
    ("3", "9^{9^{9^{9}}}"),
    ("Monday", "Mondya"),
    ("no", "on"),
    ("x=1", "y=1"),
    ("-5", "5"),
    (r"(-\infty,1)\cup(2,\infty)", r"(-\infty,1]\cup(2,\infty)"),
    (r"\infty", r"-\infty"),
    ("5", "2 3"),
    ("0", r"\frac{0}{0}"),
    ("0", ""),
    ("1", "1/0"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal_answers(gold: str, answer: str) -> None:
    assert math_answer(f"So it is \\boxed{{{answer}}}.", gold) == 1.0
    assert math_answer(f"\\boxed{{{answer}}}", f"\\boxed{{{gold}}}") == 1.0


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different_answers(gold: str, answer: str) -> None:
    assert math_answer(f"So it is \\boxed{{{answer}}}.", gold) == 0.0


FRACTIONS = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**6)


def spelt(value: Fraction, how: str) -> str:
    sign = "-" if value < 0 else ""
    top, bottom = abs(value.numerator), value.denominator
    return f"{sign}\\frac{{{top}}}{{{bottom}}}" if how == "frac" else f"{sign}{top}/{bottom}"


@settings(max_examples=150, deadline=None)
@given(FRACTIONS, FRACTIONS, st.sampled_from(["frac", "slash"]), st.sampled_from(["frac", "slash"]))
def test_rationals_compare_as_fractions_do(left: Fraction, right: Fraction, how: str, other: str) -> None:
    assert math_answer(f"\\boxed{{{spelt(left, how)}}}", spelt(left, other)) == 1.0
    assert math_answer(f"\\boxed{{{spelt(left, how)}}}", spelt(right, other)) == float(left == right)


@settings(max_examples=150, deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=12, min_value=-(10**9), max_value=10**9))
def test_a_decimal_has_its_exact_value(number: object) -> None:
    assert written_number(f"{number:f}") == Fraction(str(number))


def test_the_last_closed_box_decides() -> None:
    text = r"I first got \boxed{7}. Checking again gives \boxed{9}."
    assert math_answer(text, 9) == 1.0
    assert math_answer(text, 7) == 0.0
    assert math_answer(r"so the answer is \boxed{4", 4, fallback="number") == 0.0
    assert math_answer(r"\boxed{\boxed{4}}", 4) == 1.0


def test_without_a_box_the_fallback_decides() -> None:
    assert math_answer("The answer is 12,500.", 12500) == 0.0
    assert math_answer("The answer is 12,500.", 12500, fallback="number") == 1.0
    assert math_answer(r"\frac{1}{2}", "0.5", fallback="whole") == 1.0
    assert math_answer("none", 1, fallback="number") == 0.0


def test_a_tolerance_is_relative_to_the_label() -> None:
    assert math_answer(r"\boxed{0.3333}", r"\frac13", relative_tolerance=1e-3) == 1.0
    assert math_answer(r"\boxed{0.33}", r"\frac13", relative_tolerance=1e-3) == 0.0


@pytest.mark.parametrize(
    "label", [None, True, 1.5, [], {}, "", r"\boxed{4", r"\frac{1}{", "9^{9^{9^{9}}}", "1/0", "x" * 2000, "2 3", "=="]
)
def test_an_unusable_label_raises_whatever_the_answer(label: object) -> None:
    for answer in (r"\boxed{4}", "no box", rf"\boxed{{{label}}}"):
        with pytest.raises(ValueError, match="math_answer"):
            math_answer(answer, label)


@pytest.mark.parametrize("options", [{"fallback": "last"}, {"relative_tolerance": 1.0}, {"relative_tolerance": -1}])
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(RewardError):
        math_answer("4", 4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "9^9^9^9^9^9",
        "(9^{9^{9}},3)",
        "[1,9^{9^9})",
        "(9!)!",
        "((9!)!)!",
        "99999!",
        "(((2)^{99})^{99})^{99}",
        "(((x+1)^{99})^{99})^{99}",
        "((x^{99})^{99})^{99}",
        "e^{e^{99}}",
        "10^{-10^{10}}",
        r"\sqrt{2}^{\sqrt{2}^{\sqrt{2}}}",
        r"\pi^{\pi^{\pi}}",
        r"(\sqrt2)^{99999}",
        r"\binom{10^9}{10^8}",
        r"\sum_{n=1}^{10^{10}} n!",
        r"\lfloor 9^{9^9}\rfloor",
        "1E999999",
        "9" * 1000,
        "-" * 900 + "1",
        r"\sqrt{" * 12 + "2" + "}" * 12,
        "(" * 12 + "x" + ")" * 12,
    ],
)
@pytest.mark.parametrize("gold", ["3", "(1,2)", "x+7", r"\sqrt{2}"])
def test_what_could_take_without_end_is_wrong_at_once(answer: str, gold: str) -> None:
    start_s = time.process_time()
    assert math_answer(f"\\boxed{{{answer}}}", gold) == 0.0
    assert time.process_time() - start_s < 3.0


def test_it_works_outside_the_main_thread_and_leaves_no_thread() -> None:
    before = threading.active_count()
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(math_answer(r"\boxed{x(x+3)}", "x^2+3x")))
    thread.start()
    thread.join(60)
    assert scores == [1.0]
    assert threading.active_count() == before


def test_a_division_by_zero_is_refused() -> None:
    with pytest.raises(Refused):
        written_number("1/0")
