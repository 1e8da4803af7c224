"""Which groups are trained on: a filter sees a scored group and keeps it, or says why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from unison.core.errors import ConfigError, DataError
from unison.core.records import Sample
from unison.rewards.plugins import Registry
from unison.rollout.greedy import without_greedy

GroupFilter = Callable[[Sequence[Sample]], Any]
"""``(group) -> bool | str``: True keeps it; False, or a text that says why, discards it."""


def no_contrast(group: Sequence[Sample]) -> bool | str:
    """Keep groups that teach something: two scorable samples or more whose rewards are not all alike.

    The filter of dynamic sampling in DAPO (Yu et al. 2025, section 3.2), which drops groups whose accuracy is 0 or 1.
    """
    rewards = [sample.reward for sample in group if sample.reward is not None and sample.scorable()]
    if len(rewards) < 2:
        return "fewer than two scorable samples"
    return True if min(rewards) < max(rewards) else "all rewards alike"


_registry: Registry[GroupFilter] = Registry(
    "rollout filter", ConfigError, {"no_contrast": "unison.rollout.filters:no_contrast"}
)
register_filter: Final = _registry.register


def load_filter(name: str | None) -> GroupFilter | None:
    """The configured filter. Raises ConfigError where there is no such function."""
    if name is None:
        return None
    found = _registry.find(name)
    if not callable(found):
        raise ConfigError(
            f"rollout.filter={name!r} is a {type(found).__name__}; name a function (group) -> bool or text"
        )
    return found


def discarded_groups(samples: Sequence[Sample], keep: GroupFilter | None) -> dict[str, str]:
    """Group id -> reason, of the groups the filter discards. Raises DataError where it fails or returns neither."""
    if keep is None:
        return {}
    groups: dict[str, list[Sample]] = {}
    for sample in without_greedy(samples):
        groups.setdefault(sample.group_id, []).append(sample)
    verdicts = {group_id: _verdict(keep, group_id, group) for group_id, group in groups.items()}
    return {group_id: reason for group_id, reason in verdicts.items() if reason is not None}


def _verdict(keep: GroupFilter, group_id: str, group: list[Sample]) -> str | None:
    try:
        verdict = keep(list(group))
    except Exception as error:  # the user's own code may raise anything
        raise DataError(f"rollout.filter failed on group {group_id!r}: {type(error).__name__}: {error}") from error
    if isinstance(verdict, str) and verdict.strip():
        return verdict
    if not isinstance(verdict, bool | np.bool_):
        raise DataError(
            f"rollout.filter returned {verdict!r} for group {group_id!r}; it returns True, False or a reason"
        )
    return None if verdict else "discarded by rollout.filter"
