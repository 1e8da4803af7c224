"""Reward functions in worker processes: each call has a deadline, and one that hangs or dies costs itself alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import msgspec

from unison.config.schema import RewardConfig
from unison.core.errors import RewardError, WorkerError
from unison.core.records import Sample
from unison.core.seeds import derive_seed
from unison.core.wire import encode_samples
from unison.processes import pool as workers
from unison.rewards.base import PartSpec
from unison.rewards.combined import Unit, WeightedReward
from unison.rewards.outcomes import Failure, Outcome, failure
from unison.rewards.service import TARGET, GradeCall, Graded, Opened, Parts


class PooledReward(WeightedReward):
    """The parts' functions, loaded and checked in each worker; nothing of theirs is imported here.

    Raises RewardError where they cannot be loaded or called as configured. ``timeouts_s`` has deadlines of parts that
    differ from ``config.timeout_s``.
    """

    def __init__(
        self, config: RewardConfig, specs: Mapping[str, PartSpec], *, named: bool, timeouts_s: Mapping[str, float]
    ) -> None:
        argument = msgspec.msgpack.encode(Parts(dict(specs), named))
        try:
            self._pool = workers.WorkerPool(TARGET, argument, size=config.workers, memory_mb=config.memory_mb)
        except WorkerError as error:
            raise RewardError(_start_problem(str(error), config)) from error
        opened = msgspec.msgpack.decode(self._pool.description, type=Opened)
        self._timeouts_s = {part: timeouts_s.get(part, config.timeout_s) for part in opened.weights}
        for part, (most_s, said_by) in opened.most_seconds.items():
            if most_s > self._timeouts_s[part]:
                self._pool.close()
                raise RewardError(
                    f"a call of the reward {part} may take {most_s:g} s ({said_by}), over its deadline of "
                    f"{self._timeouts_s[part]:g} s, where it counts as failed and not as wrong; raise reward.timeout_s "
                    "or lower these options"
                )
        super().__init__(opened.weights, opened.forms, named=opened.named, on_timeout=config.on_timeout)

    def grade(self, units: Sequence[Unit], samples: Sequence[Sample]) -> list[list[Outcome] | Failure]:
        futures: list[Future[workers.Outcome]] = []
        try:
            for unit in units:
                futures.append(self._submit(unit, [samples[i] for i in unit.indices]))
            return [_judge(future.result(), len(unit.indices)) for unit, future in zip(units, futures, strict=True)]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def _submit(self, unit: Unit, samples: Sequence[Sample]) -> Future[workers.Outcome]:
        call = GradeCall(unit.part, encode_samples(samples))
        return self._pool.submit(
            msgspec.msgpack.encode(call),
            timeout_s=self._timeouts_s[unit.part],
            seed=derive_seed("reward", unit.part, *(sample.sample_id for sample in samples)),
        )

    @property
    def num_restarts(self) -> int:
        return self._pool.num_restarts

    def close(self) -> None:
        self._pool.close()


def _judge(outcome: workers.Outcome, expected: int) -> list[Outcome] | Failure:
    """Raises RewardError where the function cannot be used at all."""
    if isinstance(outcome, workers.Failed):
        return failure(outcome.reason, outcome.kind)
    try:
        graded = msgspec.msgpack.decode(outcome, type=Graded)
    except msgspec.MsgspecError:
        return failure("its process answered what is no score", "crash")
    if graded.refused is not None:
        raise RewardError(graded.refused)
    if graded.failure is not None:
        return graded.failure
    if graded.outcomes is None or len(graded.outcomes) != expected:
        return failure("its process answered for other samples", "crash")
    return list(graded.outcomes)


def _start_problem(reason: str, config: RewardConfig) -> str:
    if "MemoryError" in reason or "cannot allocate" in reason.lower():
        return f"{reason}; raise reward.memory_mb={config.memory_mb}"
    return reason
