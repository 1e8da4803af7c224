"""Samples as a rollout leaves them."""

from __future__ import annotations

from itertools import count

from unison.core.records import Sample, SampleStatus
from unison.core.sampling import SamplingParams

_numbers = count()


def finished(text: str, label: object = None, status: SampleStatus = SampleStatus.COMPLETED) -> Sample:
    name = f"s{next(_numbers)}"
    return Sample(
        sample_id=name,
        group_id="g",
        trajectory_id=name,
        sampling=SamplingParams(),
        seed=0,
        status=status,
        text=text,
        metadata={"label": label},
    )
