from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.rollout.test_summary import make_sample
from unison.core.errors import ConfigError, DataError
from unison.core.records import SampleStatus
from unison.rollout.filters import discarded_groups, load_filter, no_contrast

GROUPS = [make_sample(group, 3, reward) for group in ("one", "two") for reward in (0.0, 1.0)]


@pytest.mark.parametrize(
    ("verdict", "found"),
    [
        (True, {}),
        (np.bool_(True), {}),
        (np.mean([0.5]) > 0, {}),
        (False, {"one": "discarded by rollout.filter", "two": "discarded by rollout.filter"}),
        (np.bool_(False), {"one": "discarded by rollout.filter", "two": "discarded by rollout.filter"}),
        ("too easy", {"one": "too easy", "two": "too easy"}),
    ],
)
def test_a_group_is_kept_or_discarded_with_a_reason(verdict: Any, found: dict[str, str]) -> None:
    assert discarded_groups(GROUPS, lambda group: verdict) == found


@pytest.mark.parametrize("verdict", [None, "", "  ", 1, 0.0, [True], np.array([True, False])])
def test_any_other_verdict_is_refused_with_the_group(verdict: Any) -> None:
    with pytest.raises(DataError, match=r"for group 'one'; it returns True, False or a reason"):
        discarded_groups(GROUPS, lambda group: verdict)


def test_a_filter_that_raises_is_named_with_its_error() -> None:
    def fail(group: Any) -> bool:
        raise ZeroDivisionError("by zero")

    with pytest.raises(DataError, match=r"failed on group 'one': ZeroDivisionError: by zero"):
        discarded_groups(GROUPS, fail)


def test_a_filter_cannot_change_which_samples_a_group_has() -> None:
    def empty(group: Any) -> bool:
        group.clear()
        return True

    samples = list(GROUPS)
    assert discarded_groups(samples, empty) == {} and samples == GROUPS


def test_without_a_filter_nothing_is_discarded() -> None:
    assert load_filter(None) is None and discarded_groups(GROUPS, None) == {}


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0], "all rewards alike"),
        ([1.0, None, 0.5], True),
        ([1.0, None], "fewer than two scorable samples"),
        ([None, None], "fewer than two scorable samples"),
    ],
)
def test_no_contrast_goes_by_the_scorable_samples(rewards: list[float | None], verdict: bool | str) -> None:
    statuses = [SampleStatus.UNSCORABLE if reward is None else SampleStatus.TRUNCATED for reward in rewards]
    samples = [make_sample("g", 2, reward, status) for reward, status in zip(rewards, statuses, strict=True)]
    assert no_contrast(samples) == verdict


@pytest.mark.parametrize(
    ("name", "message"),
    [("no_contrst", "did you mean no_contrast"), ("math:pi", "is a float"), ("math:absent", "absent")],
)
def test_a_filter_that_is_none_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_filter(name)
