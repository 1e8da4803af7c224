"""Bounds of request fields: each refusal names the field, the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from unison.core.errors import RequestError

MAX_ID = 1 << 31
"""Bound of ids before the vocabulary is known; the engine checks against that."""


def check_number(name: str, value: object, *, low: float, high: float, low_open: bool = False) -> None:
    # Compared, not math.isfinite: that one raises on an integer too large for a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
        raise RequestError(f"{name}={value!r} must be a finite number")
    if not (low < value if low_open else low <= value) or value > high:
        bracket = "(" if low_open else "["
        raise RequestError(f"{name}={value!r} is outside {bracket}{low:g}, {high:g}]")


def check_int(name: str, value: object, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}={value!r} must be an integer")
    if not low <= value <= high:
        raise RequestError(f"{name}={value!r} is outside [{low}, {high}]")


def check_sequence(name: str, values: object) -> None:
    if not isinstance(values, (tuple, list)):
        raise RequestError(f"{name}={values!r} must be a tuple, not {type(values).__name__}")


def check_ids(name: str, ids: object, *, max_count: int) -> None:
    """Token ids: a tuple of at most max_count integers from 0 on."""
    check_sequence(name, ids)
    assert isinstance(ids, (tuple, list))  # check_sequence has said so
    if len(ids) > max_count:
        raise RequestError(f"{name} holds {len(ids)} ids; at most {max_count} are allowed")
    # One pass in C over what is nearly always right; the slow one only finds the culprit.
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_ID):
        for token in ids:
            check_int(name, token, low=0, high=MAX_ID)


def check_bias(name: str, bias: object, *, max_count: int, limit: float) -> None:
    """{id: number in [-limit, limit]} of at most max_count ids."""
    if not isinstance(bias, Mapping):
        raise RequestError(f"{name}={bias!r} must map token ids to numbers, not be of type {type(bias).__name__}")
    if len(bias) > max_count:
        raise RequestError(f"{name} holds {len(bias)} ids; at most {max_count} are allowed")
    for token, value in bias.items():
        check_int(f"an id of {name}", token, low=0, high=MAX_ID)
        check_number(f"{name}[{token}]", value, low=-limit, high=limit)
