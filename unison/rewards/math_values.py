"""Values of parsed expressions: exact where they are rational, to many digits where not, never out of bounds.

Expressions are trees of sympy that were built without being evaluated. Before anything is evaluated, the size of each
power and factorial in the tree is bounded, so that a short text cannot ask for a number that fills the memory.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final

from unison.rewards.math_form import Refused

MAX_VALUE_DIGITS: Final = 20_000
"""Of a number that is worked out, or of its numerator and denominator."""
MAX_FACTORIAL: Final = 5000
MAX_SYMBOLIC_EXPONENT: Final = 100
"""Of a sum with unknowns in it; a single unknown may have any exponent up to MAX_EXPONENT."""
MAX_EXPONENT: Final = 10_000
NUMERIC_DIGITS: Final = 60
EQUAL_DIGITS: Final = 50
"""Two irrational numbers are equal when they agree to this many digits."""
_PROBES: Final = (13717421, 7391853, 22360711, 11547283, 5671437)
_PROBE_DENOMINATOR: Final = 9_999_991
"""A prime, so that no small multiple of a probe is a whole number, of which a factorial could be taken."""


def exact_value(expression: Any, sympy: Any) -> Fraction | None:
    """The rational number an expression is, worked out; None where it is none. Raises Refused where it is too large."""
    if expression.is_Float:
        return Fraction(str(expression)) if expression.is_finite else None
    if expression.is_Rational:
        return _bounded(Fraction(int(expression.p), int(expression.q)))
    if expression.is_Add or expression.is_Mul or isinstance(expression, sympy.UnevaluatedExpr):
        total = Fraction(0) if expression.is_Add else Fraction(1)
        for part in expression.args:
            value = exact_value(part, sympy)
            if value is None:
                return None
            total = _bounded(total + value if expression.is_Add else total * value)
        return total
    if expression.is_Pow:
        return _power(*(exact_value(part, sympy) for part in expression.args))
    if isinstance(expression, sympy.factorial):
        value = exact_value(expression.args[0], sympy)
        if value is None or value.denominator != 1 or value < 0:
            return None
        if value > MAX_FACTORIAL:
            raise Refused(f"a factorial of more than {MAX_FACTORIAL}")
        return Fraction(math.factorial(int(value)))
    return None


def _power(base: Fraction | None, exponent: Fraction | None) -> Fraction | None:
    if base is None or exponent is None:
        return None
    if abs(exponent) > MAX_EXPONENT or _num_digits(base) * abs(exponent) > MAX_VALUE_DIGITS:
        if abs(base) in (0, 1) and exponent.denominator == 1 and exponent > 0:
            return base if exponent % 2 else base * base
        raise Refused(f"a power of more than {MAX_VALUE_DIGITS} digits")
    if base == 0 and exponent < 0:
        raise Refused("it divides by zero")
    return base ** int(exponent) if exponent.denominator == 1 else None


def _num_digits(value: Fraction) -> float:
    return max(abs(value.numerator).bit_length(), value.denominator.bit_length()) * math.log10(2) + 1


def _bounded(value: Fraction) -> Fraction:
    if _num_digits(value) > MAX_VALUE_DIGITS:
        raise Refused(f"a number of more than {MAX_VALUE_DIGITS} digits")
    return value


def check_size(expression: Any, sympy: Any) -> None:
    """Raises Refused where evaluating some part of the expression could take without end."""
    if not isinstance(expression, sympy.Basic):
        for element in getattr(expression, "flat", list)():
            check_size(element, sympy)
        return
    for part in sympy.preorder_traversal(expression):
        if isinstance(part, (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative, sympy.Subs)):
            raise Refused(f"a {type(part).__name__} is not worked out")
        if isinstance(part, sympy.factorial):
            _check_factorial(part, sympy)
        elif part.is_Pow or isinstance(part, sympy.exp):
            _check_power(part, sympy)


def _check_factorial(part: Any, sympy: Any) -> None:
    if not part.args[0].free_symbols and exact_value(part, sympy) is None:
        raise Refused("a factorial of no whole number")


def _check_power(part: Any, sympy: Any) -> None:
    base, exponent = part.as_base_exp() if part.is_Pow else (sympy.E, part.args[0])
    if exponent.free_symbols:
        return
    size = exact_value(exponent, sympy)
    if size is None:  # irrational: its parts were checked, and what is left is a tower
        if any(inner.is_Pow and not inner.args[1].is_Rational for inner in sympy.preorder_traversal(exponent)):
            raise Refused("a tower of powers")
        size = Fraction(str(sympy.Abs(exponent).evalf(15, maxn=30))) if exponent.is_number else Fraction(0)
    if base.free_symbols:
        limit = MAX_SYMBOLIC_EXPONENT if base.has(sympy.Add) else MAX_EXPONENT
        if abs(size) * _reach(base, sympy) > limit:
            raise Refused(f"an exponent of more than {limit}")
        return
    value = exact_value(base, sympy)
    digits = _num_digits(value) if value is not None else _magnitude(base, sympy)
    if digits * abs(size) > MAX_VALUE_DIGITS:
        raise Refused(f"a power of more than {MAX_VALUE_DIGITS} digits")


def _reach(expression: Any, sympy: Any) -> Fraction:
    """The largest product of numeric exponents on the way down: 6 for ((x^2)^3 + 1)."""
    largest = max((_reach(part, sympy) for part in expression.args), default=Fraction(1))
    if expression.is_Pow and expression.args[1].is_Rational:
        exponent = expression.args[1]
        largest *= max(Fraction(1), abs(Fraction(int(exponent.p), int(exponent.q))))
    return largest


def _magnitude(base: Any, sympy: Any) -> float:
    """Digits before or after the point of an irrational number."""
    number = sympy.Abs(base).evalf(15, maxn=30)
    if not number.is_Float or number == 0:
        return 1.0
    return abs(float(sympy.log(number, 10).evalf(5))) + 1


def same_number(left: Any, right: Any, sympy: Any) -> bool | None:
    """Whether two expressions without unknowns are the same number; None where one is no number."""
    values = [exact_value(side, sympy) for side in (left, right)]
    if None not in values:
        return values[0] == values[1]
    if 0 in values:  # relative agreement cannot tell a hidden zero, as in sqrt(2) * sqrt(3) - sqrt(6)
        return bool(sympy.simplify(right if values[0] == 0 else left) == 0)
    return _agree(left, right, sympy)


def _agree(left: Any, right: Any, sympy: Any) -> bool | None:
    """Agreement to EQUAL_DIGITS digits, relative, nothing rounded away."""
    sides = [sympy.N(side, NUMERIC_DIGITS) for side in (left, right)]
    if not all(side.is_number and side.is_finite for side in sides):
        return None
    if any(not part.is_Float and not part.is_Rational for side in sides for part in side.as_real_imag()):
        return None
    difference = sympy.Abs(sides[0] - sides[1])
    largest = max(sympy.Abs(side) for side in sides)
    return bool(difference <= largest * sympy.Float(10, NUMERIC_DIGITS) ** -EQUAL_DIGITS)


def probes_agree(left: Any, right: Any, sympy: Any) -> bool:
    """Whether two expressions have the same values at some points; True where they have no values to compare."""
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    for shift in range(2):
        numerators = [_PROBES[(i + shift) % len(_PROBES)] + i for i in range(len(symbols))]
        points = {
            symbol: sympy.Rational(numerator, _PROBE_DENOMINATOR)
            for symbol, numerator in zip(symbols, numerators, strict=True)
        }
        if _same_at_probe(left.subs(points), right.subs(points), sympy) is False:
            return False
    return True


def _same_at_probe(left: Any, right: Any, sympy: Any) -> bool | None:
    try:
        values = [exact_value(side, sympy) for side in (left, right)]
    except Refused:
        values = [None, None]
    return values[0] == values[1] if None not in values else _agree(left, right, sympy)
