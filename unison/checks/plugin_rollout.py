"""A rollout function, run on the toy model's engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from unison.checks.plugin_report import Called, Report, call
from unison.core.errors import ConfigError
from unison.core.records import GenerationRequest, Provenance, Sample
from unison.core.sampling import SamplingParams
from unison.engine.client import InProcessClient
from unison.engine.engine import Engine
from unison.models.tiny_random import NAME
from unison.rollout.collect import PromptTask, collect
from unison.rollout.functions import check_rollout as check_signature

DEADLINE_S: Final = 60.0
_MAX_NEW_TOKENS: Final = 12
_METADATA: Final = {"row_id": "made-up", "prompt": "5+3=", "label": "8"}


def check_rollout(report: Report, path: str, found: Any, options: Mapping[str, Any]) -> None:
    """Drawn twice: whole samples, token by token as the engine gave them, and the same again."""
    if options:
        report.problem("rollout functions take no options", "write them into the function")
    try:
        check_signature(path, found)
    except ConfigError as error:
        report.problem(str(error), "write async def f(client, task, sampling, sample)")
        return
    report.ok("it is async and takes (client, task, sampling, sample)")
    engine = Engine.from_pretrained(NAME)
    first, second = _draw(engine, found), _draw(engine, found)
    if first.error is not None:
        report.problem(f"drawing two samples failed: {first.error}", "see docs/plugins.md for a function that works")
        return
    samples: list[Sample] = first.value
    report.ok(f"two calls made {len(samples)} samples")
    whole = [_check_tokens(report, sample) for sample in samples]
    if all(whole):
        _check_scores(report, engine, samples)
    _check_group(report, samples)
    report.expect(
        second.error is None and [_drawn(sample) for sample in second.value] == [_drawn(sample) for sample in samples],
        "drawn again, the samples are the same",
        "drawn again, the samples differ",
        "take all noise from sampling.seed: pass sampling on, and derive a seed for every further request",
    )


def _draw(engine: Engine, function: Any) -> Called:
    """Two samples of a prompt, as in a run."""
    task = PromptTask("made-up@0", tuple(b"5+3="), dict(_METADATA))
    sampling = SamplingParams(n=2, max_new_tokens=_MAX_NEW_TOKENS, logprobs="scaled")

    async def draw() -> list[Sample]:
        async with asyncio.timeout(DEADLINE_S):
            return await collect(InProcessClient(engine), [task], sampling, run_seed=1, function=function)

    return call(lambda: asyncio.run(draw()))


def _drawn(sample: Sample) -> tuple[Any, ...]:
    return sample.sample_id, sample.token_ids, sample.logprobs[sample.prompt_length :], str(sample.status)


def _check_tokens(report: Report, sample: Sample) -> bool:
    name, count = f"sample {sample.sample_id}", len(sample.token_ids)
    columns = {
        "log-probs": len(sample.logprobs),
        "provenances": len(sample.provenance),
        "weight versions": len(sample.weight_versions),
    }
    wrong = {what: length for what, length in columns.items() if length != count}
    if wrong:
        what, length = next(iter(wrong.items()))
        report.problem(
            f"{name} has {count} tokens but {length} {what}", "append by append_sampled and append_world alone"
        )
        return False
    sampled = list(sample.sampled_positions())
    if not report.expect(
        bool(sampled),
        f"{name}: {len(sampled)} sampled tokens",
        f"{name} has no sampled tokens",
        "append what was drawn",
    ):
        return False
    bad = [i for i in sampled if not math.isfinite(sample.logprobs[i]) or sample.logprobs[i] > 0]
    if bad:
        report.problem(f"{name}: the log-prob of token {bad[0]} is {sample.logprobs[bad[0]]}", "keep the engine's own")
    if sample.finish_reason is None:
        report.problem(f"{name} has no finish_reason", "set it, as complete_sample does")
    return not bad


def _check_scores(report: Report, engine: Engine, samples: list[Sample]) -> None:
    """Each sampled token's log-prob must be the one the model gives it after the very ids before it."""
    for sample in samples:
        scored = call(_rescore, engine, sample)
        if scored.error is not None:
            report.problem(
                f"sample {sample.sample_id} cannot be scored again: {scored.error}", "append ids of the model"
            )
            continue
        wrong = [i for i in sample.sampled_positions() if scored.value[i - 1] != sample.logprobs[i]]
        report.expect(
            not wrong,
            f"sample {sample.sample_id}: every sampled token has the model's log-prob, to the bit",
            f"sample {sample.sample_id}: token {wrong[0] if wrong else 0} was not drawn after the ids before it",
            "keep ids and log-probs together as the engine gave them: never encode text again, change or reorder "
            "ids, and give each request exactly the ids that come before in the sample",
        )


def _rescore(engine: Engine, sample: Sample) -> list[float]:
    """Log-probs of tokens 1 and on, as a prompt."""
    sampling = replace(sample.sampling, n=1, max_new_tokens=1, prompt_logprobs_from=1, logprobs="scaled")
    request = GenerationRequest(request_id="again", prompt_ids=tuple(sample.token_ids), sampling=sampling)

    async def score() -> list[float]:
        return (await InProcessClient(engine).generate(request)).prompt_logprobs

    return asyncio.run(score())


def _check_group(report: Report, samples: list[Sample]) -> None:
    worldly = sum(who is Provenance.OBSERVATION for s in samples for who in s.provenance[s.prompt_length :])
    if worldly:
        report.note(f"{worldly} tokens are the world's; they are not trained")
