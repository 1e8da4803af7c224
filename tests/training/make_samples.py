"""Small finished samples for tests of rows and batches."""

from __future__ import annotations

from collections.abc import Sequence

from unison.core.records import Sample, SampleStatus
from unison.core.sampling import SamplingParams


def make_sample(
    prompt: Sequence[int] = (1, 2, 3),
    response: Sequence[int] = (4, 5),
    *,
    logprobs: Sequence[float] | None = None,
    reward: float | None = 0.0,
    status: SampleStatus = SampleStatus.COMPLETED,
    group: str = "g",
    name: str = "s",
    sampling: SamplingParams | None = None,
) -> Sample:
    sample = Sample(
        sample_id=name, group_id=group, trajectory_id=name, sampling=sampling or SamplingParams(), seed=0, reward=reward
    )
    sample.append_world(prompt, "user")
    sample.prompt_length = len(prompt)
    sample.append_sampled(response, logprobs or [-0.5] * len(response), [0] * len(response))
    sample.status = status
    return sample
