"""Proves that rollout equals training to the last bit, over everything that must not matter.

Each cell runs the same requests through an engine under other circumstances (company, chunks, pages,
threads, order of arrival, prefix cache) and compares every token and log-prob with one reference: the trainer's
forward pass over the finished sequences. Counters prove that the circumstance really occurred. A
negative control runs stock, unpadded operators and has to differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unison.checks.circumstances import (
    Circumstance,
    circumstances,
    plain_requests,
    plain_requests_hot,
    send,
    temperatures,
)
from unison.checks.pairs import all_pairs
from unison.checks.witness import Witness
from unison.checks.workload import Workload, make_workload
from unison.config.schema import EngineConfig
from unison.core.records import GenerationOutput, GenerationRequest
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.models.loading import load_model, read_config
from unison.models.numerics import choose_numerics
from unison.models.registry import read_spec
from unison.models.sources import resolve_model
from unison.ops.blocks import KEY_BLOCK
from unison.ops.padding import EXACT, FAST, NumericsPath
from unison.ops.plan import packed_plan
from unison.ops.selftest import threads_set_to
from unison.ops.vocab import token_logprobs
from unison.text.tokenizer import Tokenizer

AXES: dict[str, Sequence[Any]] = {
    "batch": (1, 8, 64),
    "chunk": (512, 13, 7),
    "page": (64, 128, 192),
    "threads": (1, 2),
    "temperature": (0.7, 1.0),
    "arrival": ("at once", "reversed", "staggered"),
    "cache": ("off", "cold", "warm"),
}
_NUM_ALONE = 6
_REQUESTS: dict[float, Callable[[Workload], list[GenerationRequest]]] = {0.7: plain_requests, 1.0: plain_requests_hot}
_PACK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the matrix. Zero is the only value of num_differing that passes (but in the control)."""

    name: str
    num_tokens: int
    num_differing: int
    max_difference: float
    counters: str
    occurred: bool
    """Whether the counters show that the circumstances of the cell really happened."""
    is_control: bool = False

    @property
    def passed(self) -> bool:
        return self.occurred and (self.num_differing > 0 if self.is_control else self.num_differing == 0)

    def line(self) -> str:
        verdict = "ok" if self.passed else "FAILED"
        return (
            f"{self.name:<78} tokens {self.num_tokens:>5}  differing {self.num_differing:>5}  "
            f"max {self.max_difference:.3g}  [{self.counters}]  {verdict}"
        )


@dataclass(frozen=True, slots=True)
class ExactnessReport:
    cells: tuple[Cell, ...]

    @property
    def passed(self) -> bool:
        return all(cell.passed for cell in self.cells)


def run_exactness(
    model: str, *, dtype: str = "auto", quick: bool = False, report: Callable[[str], None] = print
) -> ExactnessReport:
    """Run the matrix on a model folder or short name; one line per cell goes to ``report``.

    ``quick`` keeps all pairs but sends fewer and shorter requests. Raises NumericsError where the
    start-up self-test already fails.
    """
    folder = resolve_model(model)
    choice = choose_numerics(read_spec(read_config(folder)), dtype, "exact")
    check = _Check(folder, choice.dtype, quick)
    report(f"model {model}, dtype {choice.dtype_name}, {len(check.cells)} cells hold all pairs of axis values")
    cells = []
    for cell in check.run():
        report(cell.line())
        cells.append(cell)
    result = ExactnessReport(tuple(cells))
    total = sum(cell.num_tokens for cell in cells if not cell.is_control)
    verdict = _verdict(result)
    report(f"{verdict} ({total} tokens compared)")
    return result


def _verdict(report: ExactnessReport) -> str:
    if report.passed:
        return "exact: every log-prob is bitwise equal"
    num_differing = sum(cell.num_differing for cell in report.cells if not cell.is_control)
    if num_differing:
        return f"NOT exact: {num_differing} log-probs differ"
    return "not proven: no log-prob differs, but in the cells marked FAILED the circumstances named did not occur"


class _Check:
    def __init__(self, folder: Path, dtype: torch.dtype, quick: bool) -> None:
        self._model = load_model(folder, dtype)
        self._trainer_model = load_model(folder, dtype)
        tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
        longest = 400 if quick else 520
        longest = min(longest, self._model.spec.max_positions - 32)
        self._count = 16 if quick else 72
        self._workload = make_workload(self._model.spec.vocab_size, tokenizer, self._count, longest)
        axes = AXES | {"batch": tuple(min(size, self._count) for size in AXES["batch"])}
        self.cells = all_pairs(axes)
        self._answers: dict[Callable[[Workload], list[GenerationRequest]], list[GenerationOutput]] = {}
        self._trainer_logprobs: dict[tuple[float, int], list[list[float]]] = {}

    def run(self) -> Iterator[Cell]:
        for axes in self.cells:
            yield self._cell(axes)
        for circumstance in circumstances(self._workload, KEY_BLOCK):
            yield self._special(circumstance)
        yield self._control()

    def _plain(self, make: Callable[[Workload], list[GenerationRequest]]) -> list[GenerationOutput]:
        """The requests answered undisturbed and without a cache; made once for those who share them."""
        if make not in self._answers:
            config = EngineConfig(prefix_cache=False, max_running=8)
            self._answers[make], _ = _generate(self._model, make(self._workload), EXACT, config)
        return self._answers[make]

    def _trained(self, temperature: float, threads: int) -> list[list[float]]:
        """The *trainer's* log-probs of the workload's plain answers, by one packed pass for each number of threads."""
        key = temperature, threads
        if key not in self._trainer_logprobs:
            with threads_set_to(threads):
                self._trainer_logprobs[key] = training_logprobs(
                    self._trainer_model, self._plain(_REQUESTS[temperature]), temperature, EXACT
                )
        return self._trainer_logprobs[key]

    def _cell(self, axes: dict[str, Any]) -> Cell:
        count = min(_NUM_ALONE if axes["batch"] == 1 else self._count, self._count)
        requests = self._workload.requests(axes["temperature"], count)
        config = EngineConfig(
            max_running=axes["batch"],
            max_batch_tokens=1024,
            prefill_chunk=axes["chunk"],
            page_size=axes["page"],
            prefix_cache=axes["cache"] != "off",
            # Room for everything at once, so that what was cached is still there when it is asked for again.
            kv_tokens=2 * sum(len(p) + n + axes["page"] for p, n in self._workload.items()),
            poison_freed_pages=True,
        )
        with threads_set_to(axes["threads"]):
            warm = axes["cache"] == "warm"
            outputs, seen = _generate(self._model, requests, EXACT, config, axes["arrival"], warm)
        temperature = axes["temperature"]
        trained = self._trained(temperature, axes["threads"])[:count]
        plain = self._plain(_REQUESTS[temperature])[:count]
        tokens = [output.token_ids for output in plain]
        reference = list(zip(tokens, self._trained(temperature, min(AXES["threads"])), strict=False))
        name = ", ".join(f"{key} {value}" for key, value in axes.items())
        return _judge(name, outputs, trained, reference, seen, occurred=seen.proves(axes, requests))

    def _special(self, circumstance: Circumstance) -> Cell:
        """Requests that went through something, against the same ones alone and undisturbed."""
        requests = circumstance.requests(self._workload)
        plain = self._plain(circumstance.requests)
        engine = Engine(self._model, path=EXACT, config=circumstance.config)
        seen = Witness(engine)
        answers = circumstance.drive(engine, requests, seen)
        outputs = [answers[request.request_id] for request in requests]
        trained: dict[str, list[float]] = {}
        for temperature in temperatures(outputs):
            chosen = [output for output in outputs if output.sampling.temperature == temperature]
            values = training_logprobs(self._trainer_model, chosen, temperature, EXACT)
            trained |= {output.request_id: own for output, own in zip(chosen, values, strict=True)}
        in_order = [trained[request.request_id] for request in requests]
        reference = [(output.token_ids, own) for output, own in zip(plain, in_order, strict=True)]
        occurred = circumstance.occurred(seen, answers)
        return _judge(circumstance.name, outputs, in_order, reference, seen, occurred=occurred)

    def _control(self) -> Cell:
        requests = self._workload.requests(1.0, self._count)
        outputs, seen = _generate(self._model, requests, FAST, EngineConfig(max_running=8, prefill_chunk=13))
        trained = training_logprobs(self._trainer_model, outputs, 1.0, FAST)
        pairs = [
            pair
            for output, own in zip(outputs, trained, strict=True)
            for pair in zip(output.logprobs, own, strict=True)
        ]
        differing = [abs(a - b) for a, b in pairs if a != b]
        name = "negative control: stock operators, unpadded (must differ)"
        return Cell(name, len(pairs), len(differing), max(differing, default=0.0), seen.line(), True, True)


def _judge(
    name: str,
    outputs: Sequence[GenerationOutput],
    trained: Sequence[list[float]],
    reference: Sequence[tuple[list[int], list[float]]],
    seen: Witness,
    *,
    occurred: bool,
) -> Cell:
    num_differing, worst, num_tokens = 0, 0.0, 0
    for output, own, (tokens, logprobs) in zip(outputs, trained, reference, strict=True):
        num_tokens += len(tokens)
        differing, difference = _compare(output.token_ids, output.logprobs, own, tokens, logprobs)
        num_differing += differing
        worst = max(worst, difference)
    return Cell(name, num_tokens, num_differing, worst, seen.line(), occurred)


def _compare(
    tokens: list[int], rollout: list[float], trained: list[float], expected_tokens: list[int], expected: list[float]
) -> tuple[int, float]:
    if tokens != expected_tokens:
        return len(expected_tokens), float("inf")
    triples = list(zip(rollout, trained, expected, strict=True))
    # Compared before subtracting: a NaN differs from everything, but max() may pass it over.
    num_differing = sum(not a == b == c for a, b, c in triples)
    return num_differing, max((max(abs(a - c), abs(b - c)) for a, b, c in triples), default=0.0)


def _generate(
    model: Decoder,
    requests: list[GenerationRequest],
    path: NumericsPath,
    config: EngineConfig,
    arrival: str = "at once",
    warm: bool = False,
) -> tuple[list[GenerationOutput], Witness]:
    engine = Engine(model, path=path, config=config)
    if warm:
        for request in requests:
            engine.add_request(request)
        engine.run()
    seen = Witness(engine)
    # Few at a time, but enough for the batch to fill up before the first ones end.
    at_once = max(3, len(requests) // 8) if arrival == "staggered" else len(requests)
    outputs = send(engine, requests[::-1] if arrival == "reversed" else requests, seen, at_once)
    return [outputs[request.request_id] for request in requests], seen


@torch.no_grad()
def training_logprobs(
    model: Decoder, outputs: Sequence[GenerationOutput], temperature: float, path: NumericsPath
) -> list[list[float]]:
    """`scaled` log-probs of each output's tokens by the trainer's packed forward pass."""
    results: list[list[float]] = []
    pending = list(outputs)
    while pending:
        taken, size = 0, 0
        while taken < len(pending) and (taken == 0 or size + _length(pending[taken]) <= _PACK_TOKENS):
            size += _length(pending[taken])
            taken += 1
        results += _packed_logprobs(model, pending[:taken], temperature, path)
        del pending[:taken]
    return results


def _length(output: GenerationOutput) -> int:
    return len(output.prompt_ids) + len(output.token_ids)


def _packed_logprobs(
    model: Decoder, outputs: Sequence[GenerationOutput], temperature: float, path: NumericsPath
) -> list[list[float]]:
    rows = [[*output.prompt_ids, *output.token_ids][:-1] for output in outputs]
    plan = packed_plan([len(row) for row in rows], path=path)
    padding = [0] * (plan.num_rows - sum(map(len, rows)))
    tokens = torch.tensor([token for row in rows for token in row] + padding)
    positions = torch.tensor([[place for row in rows for place in range(len(row))] + padding])
    hidden = model(tokens, positions, plan)
    predictors = [
        i for o, (_, end) in zip(outputs, plan.segments, strict=True) for i in range(end - len(o.token_ids), end)
    ]
    targets = torch.tensor([token for output in outputs for token in output.token_ids])
    values, _ = token_logprobs(
        hidden[torch.tensor(predictors)],
        model.head_weight(),
        targets,
        torch.full((len(targets),), temperature, dtype=torch.float32),
        path=path,
        with_entropy=False,
    )
    return [part.tolist() for part in torch.split(values, [len(output.token_ids) for output in outputs])]
