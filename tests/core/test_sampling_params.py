from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from unison.core.errors import RequestError, UnisonError
from unison.core.sampling import (
    MAX_BIASES,
    MAX_CHOSEN_LOGPROBS,
    MAX_COPIES,
    MAX_LISTED_IDS,
    MAX_TAPS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)


def test_defaults_are_neutral() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.n) == (1.0, 1.0, -1, 1)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.seed) == ((), (), False, None)
    assert params.logprobs == "scaled"
    assert params.replayable


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"top_p": 0.99},
        {"top_k": 5},
        {"temperature": 0.5, "top_k": 1},
        {"min_p": 0.01},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -0.1},
        {"presence_penalty": 0.1},
        {"logit_bias": {3: 0.5}},
        {"min_new_tokens": 1},
        {"allowed_token_ids": (1, 2)},
        {"forbidden_token_ids": (1,)},
        {"forced_ids": (1,)},
    ],
)
def test_what_scaled_logprobs_do_not_describe_cannot_be_replayed(settings: dict[str, Any]) -> None:
    assert not SamplingParams(**settings).replayable


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.001},
        {"temperature": 2},
        {"seed": 2**64 - 1},
        {"n": MAX_COPIES},
        {"min_p": 1},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 2},
        {"frequency_penalty": -2, "presence_penalty": 2.0},
        {"logit_bias": dict.fromkeys(range(MAX_BIASES), -1e4)},
        {"min_new_tokens": 8, "max_new_tokens": 8},
        {"allowed_token_ids": tuple(range(MAX_LISTED_IDS))},
        {"forced_ids": (1, 2), "max_new_tokens": 2},
        {"top_logprobs": MAX_TOP_LOGPROBS, "logprob_token_ids": (5,) * MAX_CHOSEN_LOGPROBS},
        {"prompt_logprobs_from": 0},
        {"taps": ("final", "layer.0"), "taps_from": 0},
    ],
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
    "min_p": (-0.1, 1.1, math.nan, "x", None, True),
    "repetition_penalty": (0, 0.0, -1, 1e-9, 2.1, math.inf, None, True, "1"),
    "frequency_penalty": (-2.1, 2.1, math.nan, None, False, "1"),
    "presence_penalty": (-2.1, 2.1, math.nan, None, False, "1"),
    "logit_bias": (
        {-1: 5},
        {"0": 5},
        {"abc": 1},
        {0: "x"},
        {0: math.nan},
        {0: -math.inf},
        {0: 1e5},
        {0: True},
        {True: 1},
        {1.0: 1},
        [(0, 1.0)],
        None,
        dict.fromkeys(range(MAX_BIASES + 1), 1.0),
    ),
    "min_new_tokens": (-1, 1.5, None, True, 129, 2**40),
    "allowed_token_ids": ((), (-1,), (1.0,), (True,), 5, "12", tuple(range(MAX_LISTED_IDS + 1))),
    "forbidden_token_ids": ((-1,), (1.0,), (True,), 5, "12", None, (2**40,), (0,) * (MAX_LISTED_IDS + 1)),
    "ignore_eos": (1, None, "yes"),
    "skip_special_tokens": (0, None, "no"),
    "no_stop_trim": (1, None, "yes"),
    "forced_ids": ((-1,), (1.5,), None, "1", (1,) * 129),
    "top_logprobs": (-1, MAX_TOP_LOGPROBS + 1, 400_000_000, 1.0, True, None),
    "logprob_token_ids": ((-1,), ("a",), None, (1,) * (MAX_CHOSEN_LOGPROBS + 1)),
    "prompt_logprobs_from": (-1, 1.0, True, "0", 2**40),
    "taps": ("final", (1,), None, ("final", "layer.0", "final"), ("layer.0",) * (MAX_TAPS + 1)),
    "taps_from": (-1, 1.0, True, "0", 2**40),
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


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(RequestError, match="min_new_tokens=9 is above max_new_tokens=8"):
        SamplingParams(min_new_tokens=9, max_new_tokens=8)
    with pytest.raises(RequestError, match="leaves no token"):
        SamplingParams(allowed_token_ids=(1, 2), forbidden_token_ids=(2, 1, 3))
    with pytest.raises(RequestError, match="prompt tokens are drawn from no distribution"):
        SamplingParams(prompt_logprobs_from=0, logprobs="processed")
    with pytest.raises(RequestError, match="taps_from=0 without taps"):
        SamplingParams(taps_from=0)


def test_a_bias_changed_by_its_owner_later_changes_no_settings() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}
    assert hash(params) == hash(replace(params, n=1)) and params == replace(params, n=1)


def test_further_logprobs_leave_the_distribution_alone() -> None:
    assert SamplingParams(top_logprobs=3, logprob_token_ids=(1,), prompt_logprobs_from=2, taps=("final",)).replayable
