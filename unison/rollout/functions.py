"""Rollout functions: how one sample comes about, where a single answer is not enough.

    async def rollout(client, task, sampling, sample) -> list[Sample] | None

``client`` is an EngineClient, ``task`` the PromptTask, ``sampling`` the settings with this sample's own seed, and
``sample`` holds the prompt already. The function appends to it: tokens the policy sampled with ``append_sampled`` (or
``complete_sample``), the world's with ``append_world``, and ends it by setting ``status`` and ``finish_reason``. It
returns None for that sample, or a list of samples of this trajectory. All its noise must come from ``sampling.seed``,
so that the sample is the same whenever it is drawn.

A function that raises, or is not done after ``rollout.timeout_s``, costs that sample alone: it is ``failed``, with the
prompt and the reason, is not trained and not counted among the rewards. One that blocks the thread cannot be stopped.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from unison.core.describe import describe, text_of
from unison.core.errors import ConfigError, DataError, UnisonError
from unison.core.protocols import EngineClient
from unison.core.records import Sample, SampleStatus
from unison.core.sampling import SamplingParams
from unison.observability.warn import Warn, warn_on_stderr
from unison.rewards.plugins import Registry
from unison.rollout.collect import PromptTask, RolloutFunction, copy_of

_PARAMETERS: Final = ("client", "task", "sampling", "sample")
_MAX_TOLD: Final = 8
_MAX_SHOWN_CHARS: Final = 80
_MAX_AT_FIRST: Final = 64
"""A function that fails so often, and has never come to an end, ends the run."""

_registry: Registry[RolloutFunction] = Registry("rollout function", ConfigError)
register_rollout: Final = _registry.register


def load_rollout(name: str | None, timeout_s: float, warn: Warn = warn_on_stderr) -> RolloutFunction | None:
    """The configured function, its failures held to their samples. Raises ConfigError where it cannot be called."""
    if name is None:
        return None
    found = _registry.find(name)
    check_rollout(name, found)
    return _Contained(name, found, timeout_s, warn)


class _Contained:
    """A rollout function whose error or delay makes one sample ``failed``. What the engine raises goes through."""

    def __init__(self, name: str, function: RolloutFunction, timeout_s: float, warn: Warn) -> None:
        self._name = name
        self._function = function
        self._timeout_s = timeout_s
        self._warn = warn
        self._num_begun = 0
        self._num_failed = 0

    async def __call__(
        self, client: EngineClient, task: PromptTask, sampling: SamplingParams, sample: Sample
    ) -> Sequence[Sample] | None:
        fresh = copy_of(sample)
        self._num_begun += 1
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                drawn = await self._function(client, task, sampling, sample)
        except UnisonError:
            raise
        except (Exception, SystemExit) as error:  # a user's code may raise anything; counted, and shown below
            late = f"not done after rollout.timeout_s={self._timeout_s:g}"
            return [self._failed(fresh, late if deadline.expired() else describe(error))]
        if drawn is not None and not _are_samples(drawn):
            wanted = "it returns None or a list of Sample, each of them once"
            return [self._failed(fresh, f"returned {text_of(drawn)[:_MAX_SHOWN_CHARS]!a}; {wanted}")]
        return drawn

    def _failed(self, fresh: Sample, reason: str) -> Sample:
        """Raises DataError where all that was tried has failed."""
        self._num_failed += 1
        if self._num_failed <= _MAX_TOLD:
            self._warn(f"{self._name} failed for sample {fresh.sample_id}: {reason}")
        # Others may be under way still: to fail is often quicker than to come to an end.
        if self._num_failed >= max(_MAX_AT_FIRST, self._num_begun):
            raise DataError(
                f"rollout.function={self._name!r} brought about none of the first {self._num_failed} samples; the last "
                f"one: {reason}"
            )
        return replace(fresh, status=SampleStatus.FAILED, error=f"{self._name}: {reason}")


def _are_samples(drawn: object) -> bool:
    return (
        isinstance(drawn, list | tuple)
        and len(drawn) > 0
        and all(isinstance(one, Sample) for one in drawn)
        and len({one.sample_id for one in drawn}) == len(drawn)
    )


def check_rollout(name: str, function: object) -> None:
    """Raise ConfigError where the object is no ``async (client, task, sampling, sample)`` function."""
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"rollout.function={name!r} is no async function; write async def f(client, task, sampling, sample)"
        )
    try:
        inspect.signature(function).bind(*_PARAMETERS)
    except TypeError as error:
        raise ConfigError(
            f"rollout.function={name!r} cannot be called with ({', '.join(_PARAMETERS)}): {error}"
        ) from error
