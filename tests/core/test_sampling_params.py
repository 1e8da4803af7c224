from __future__ import annotations

import math
from typing import Any

import pytest

from unison.core.errors import RequestError, UnisonError
from unison.core.sampling import MAX_COPIES, SamplingParams


def test_defaults_are_neutral() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.n) == (1.0, 1.0, -1, 1)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.seed) == ((), (), False, None)
    assert params.logprobs == "scaled"
    assert params.replayable


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"top_p": 0.99}, {"top_k": 5}, {"temperature": 0.5, "top_k": 1}]
)
def test_what_scaled_logprobs_do_not_describe_cannot_be_replayed(settings: dict[str, Any]) -> None:
    assert not SamplingParams(**settings).replayable


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.001}, {"temperature": 2}, {"seed": 2**64 - 1}, {"n": MAX_COPIES}]
)
def test_values_at_the_limits_are_taken(settings: dict[str, Any]) -> None:
    SamplingParams(**settings)


BAD_VALUES: dict[str, tuple[object, ...]] = {
    "temperature": (-1, -0.1, math.nan, math.inf, "hot", None, True, 1e-4, 1e5, 10**400),
    "top_p": (0, 0.0, -0.5, 1.5, math.nan, "all", None, False),
    "top_k": (0, -7, 2.0, "5", None, True, 2**40),
    "max_new_tokens": (-1, 1.5, "8", None, True, 2**40),
    "n": (0, -1, 2.0, None, True, MAX_COPIES + 1, 3_000_000),
    "seed": (-1, 2**64, 1.0, "x", False),
    "stop": ("text", ("",), (5,), (None,), None, 5, ("a",) * 65),
    "stop_token_ids": ((-1,), (1.0,), ("a",), (True,), None, 5, "12"),
    "logprobs": ("top", None, 1, True, []),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values])
def test_a_bad_value_is_refused_with_field_and_value(name: str, value: object) -> None:
    with pytest.raises(RequestError) as failure:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert name in str(failure.value) or (name == "stop" and "stop strings" in str(failure.value))
    assert isinstance(failure.value, ValueError) and isinstance(failure.value, UnisonError)


def test_too_small_a_temperature_says_what_to_use() -> None:
    with pytest.raises(RequestError, match="use 0 for greedy or at least"):
        SamplingParams(temperature=1e-9)
