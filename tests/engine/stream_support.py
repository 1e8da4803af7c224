"""What the tests of streams share: deltas put together again, and answers that a script lays down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta, expand_runs
from unison.engine.engine import Engine
from unison.engine.sampler import Draws, SamplerRow
from unison.engine.streams import OutputStream


def assert_joined(deltas: Sequence[OutputDelta], output: GenerationOutput, text_before: str = "") -> None:
    """The deltas are the output in parts, and only the last of them carries it."""
    assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
    assert [value for delta in deltas for value in delta.logprobs] == output.logprobs
    assert text_before + "".join(delta.text for delta in deltas) == output.text
    assert [v for d in deltas for v in expand_runs(d.weight_versions)] == expand_runs(output.weight_versions)
    assert [top for delta in deltas for top in delta.top_logprobs] == output.top_logprobs
    assert [values for delta in deltas for values in delta.token_id_logprobs] == output.token_id_logprobs
    assert all(delta.request_id == output.request_id for delta in deltas)
    assert all(len(d.token_ids) == len(d.logprobs) == len(expand_runs(d.weight_versions)) for d in deltas)
    assert [delta.output for delta in deltas] == [None] * (len(deltas) - 1) + [output]
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [output.finish_reason]
    assert all(delta.token_ids for delta in deltas[:-1])


def take_all(
    engine: Engine,
    wanted: GenerationRequest,
    *,
    takes: Callable[[int], bool] = lambda _: True,
    abort_after: int | None = None,
) -> tuple[list[OutputDelta], GenerationOutput]:
    """The deltas of one request, taken after those steps that ``takes`` names, and its output; aborted in time."""
    engine.add_request(wanted)
    stream: OutputStream = engine.watch(wanted.request_id)
    deltas: list[OutputDelta] = []
    outputs: list[GenerationOutput] = []
    for step in range(10_000):
        if abort_after is not None and engine.stats.num_sampled_tokens >= abort_after:
            engine.abort(wanted.request_id)
        outputs = engine.step()
        if (outputs or takes(step)) and (delta := stream.take()) is not None:
            deltas.append(delta)
        if outputs:
            break
    assert stream.is_done and stream.take() is None
    (output,) = outputs
    return deltas, output


def scripted(scripts: Mapping[int, Sequence[int]], num_prompt: int) -> Callable[[Tensor, Sequence[SamplerRow]], Draws]:
    """Stands in for the sampler: a request of seed s draws ``scripts[s]``; log-probs count down by position."""

    def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> Draws:
        ids = [scripts[row.seed][row.position - num_prompt] for row in rows]
        return Draws(ids, [-float(row.position) for row in rows], {})

    return sample
