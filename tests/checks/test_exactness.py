from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unison.checks import exactness
from unison.checks.circumstances import Circumstance, circumstances
from unison.checks.exactness import AXES, Cell, ExactnessReport, run_exactness, training_logprobs
from unison.checks.witness import Witness
from unison.checks.workload import Workload, make_workload
from unison.config.schema import EngineConfig
from unison.core.errors import ModelError
from unison.core.records import GenerationRequest
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.numerics import NumericsChoice
from unison.ops import chunk_attention
from unison.ops.blocks import sum_stacked
from unison.ops.padding import EXACT, FAST, NumericsPath
from unison.ops.vocab import token_logprobs
from unison.text.tokenizer import Tokenizer
from unison.training.batch import micro_batches
from unison.training.columns import TokenColumns
from unison.training.rows import TrainingRow

TinyModelDir = Callable[..., Path]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(params=["float32", "bfloat16"])
def report(request: pytest.FixtureRequest, tiny_model_dir: TinyModelDir) -> tuple[ExactnessReport, list[str]]:
    lines: list[str] = []
    found = run_exactness(str(tiny_model_dir("qwen3")), dtype=request.param, quick=True, report=lines.append)
    assert request.param in lines[0]
    return found, lines


def test_the_whole_matrix_is_exact_and_its_control_is_not(report: tuple[ExactnessReport, list[str]]) -> None:
    found, lines = report
    *cells, control = found.cells
    assert found.passed
    assert all(cell.passed and cell.occurred and not cell.is_control for cell in cells)
    assert all(cell.num_tokens > 50 and cell.num_differing == 0 and cell.max_difference == 0 for cell in cells)
    assert control.is_control and control.num_differing > 0 and control.max_difference > 0
    assert len(lines) == len(found.cells) + 2
    assert "exact: every log-prob is bitwise equal" in lines[-1]


class ProductsUnpadded(NumericsPath):
    """Multiplies a block with as many rows as there are."""

    def pad_product_rows(self, num_rows: int, dtype: torch.dtype, head_dim: int) -> int:
        return num_rows


def run_few_cells(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: NumericsPath, dtype: str = "float32", page: int = 192
) -> ExactnessReport:
    """The check over a few cells of the matrix, with ``path`` in place of the exact one."""
    axes = {axis: values[-1:] for axis, values in AXES.items()} | {"temperature": (0.7, 1.0), "threads": (1,)}
    monkeypatch.setattr(exactness, "AXES", axes | {"batch": (8,), "page": (page,)})
    monkeypatch.setattr(exactness, "EXACT", path)
    return run_exactness(str(folder), dtype=dtype, quick=True, report=lambda _: None)


@pytest.mark.parametrize(
    "path",
    [
        replace(EXACT, row_multiple=1),
        pytest.param(
            ProductsUnpadded("exact", row_multiple=8),
            marks=pytest.mark.skipif(
                torch.cpu._is_amx_tile_supported(), reason="MKL adds few terms in one order on CPUs with AMX"
            ),
        ),
        FAST,
    ],
    ids=["rows unpadded", "products with a block unpadded", "nothing padded"],
)
def test_a_path_that_pads_too_little_fails(
    tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch, path: NumericsPath
) -> None:
    found = run_few_cells(tiny_model_dir("qwen3"), monkeypatch, path)
    assert not found.passed
    assert any(cell.num_differing > 0 for cell in found.cells if not cell.is_control)


def test_blocks_summed_in_another_order_fail(tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(parts: Tensor, dtype: torch.dtype) -> Tensor:
        return sum_stacked(parts.flip(1), dtype)

    folder = tiny_model_dir("qwen3")
    monkeypatch.setattr(exactness, "choose_numerics", lambda *_: NumericsChoice(torch.float32, EXACT, ()))
    monkeypatch.setattr(chunk_attention, "sum_stacked", backwards)
    assert not run_few_cells(folder, monkeypatch, EXACT).passed


def test_the_same_few_cells_pass_on_the_exact_path(
    tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_few_cells(tiny_model_dir("qwen3"), monkeypatch, EXACT).passed


def test_a_control_that_finds_nothing_fails() -> None:
    exact = Cell("exact", 10, 0, 0.0, "", True)
    control = Cell("control", 10, 3, 0.1, "", True, is_control=True)
    assert ExactnessReport((exact, control)).passed
    assert not ExactnessReport((exact, replace(control, num_differing=0))).passed
    assert not ExactnessReport((replace(exact, num_differing=1), control)).passed
    assert not ExactnessReport((replace(exact, occurred=False), control)).passed
    assert "FAILED" in replace(exact, occurred=False).line()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_anywhere_counts_as_a_difference(place: int) -> None:
    columns = [[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0]]
    columns[place][1] = math.nan
    rollout, trained, expected = columns
    assert exactness._compare([5, 6], rollout, trained, [5, 6], expected)[0] == 1


def test_other_tokens_count_as_all_different() -> None:
    assert exactness._compare([5, 6], [-1, -2], [-1, -2], [5, 7], [-1, -2]) == (2, math.inf)


def test_a_folder_without_weights_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        run_exactness(str(tmp_path), dtype="float32", report=lambda _: None)


def cell(**axes: Any) -> dict[str, Any]:
    return {
        "batch": 2, "chunk": 4, "page": 64, "threads": 1, "temperature": 1.0, "arrival": "at once", "cache": "off",
    } | axes  # fmt: skip


def watched(model: Decoder, arrival: str, **config: int) -> tuple[Witness, list[GenerationRequest]]:
    requests = [
        GenerationRequest(
            request_id=f"r{i}", prompt_ids=(1,) * 62, sampling=SamplingParams(seed=i, max_new_tokens=length)
        )
        for i, length in enumerate((4, 14, 5, 9))
    ]
    settings = {"max_running": 2, "prefill_chunk": 4, "kv_tokens": 512, "prefix_cache": False} | config
    _, seen = exactness._generate(model, requests, EXACT, EngineConfig(**settings), arrival)  # type: ignore[arg-type]
    return seen, requests


@pytest.fixture
def model(tiny_model_dir: TinyModelDir) -> Iterator[Decoder]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(tiny_model_dir("qwen3"), torch.float32)
    torch.set_num_threads(before)


def test_the_counters_bear_out_a_cell_that_ran_as_named(model: Decoder) -> None:
    for arrival in AXES["arrival"]:
        seen, requests = watched(model, arrival)
        assert seen.proves(cell(arrival=arrival), requests), seen.line()


@pytest.mark.parametrize(
    "claimed",
    [
        {"batch": 3},
        {"batch": 1},
        {"page": 128},
        {"threads": 2},
        {"temperature": 0.7},
        {"arrival": "reversed"},
        {"arrival": "staggered"},
        {"cache": "cold"},
        {"cache": "warm"},
    ],
)
def test_the_counters_disprove_a_cell_that_ran_otherwise(model: Decoder, claimed: dict[str, Any]) -> None:
    seen, requests = watched(model, "at once")
    assert not seen.proves(cell(**claimed), requests)


def test_the_counters_disprove_chunks_that_held_the_whole_prompt(model: Decoder) -> None:
    seen, requests = watched(model, "at once", prefill_chunk=64)
    assert not seen.proves(cell(chunk=7), requests)
    assert seen.proves(cell(chunk=512), requests)


def test_the_counters_bear_out_a_cache_that_was_hit(model: Decoder) -> None:
    seen, requests = watched(model, "at once", prefix_cache=True)
    assert seen.proves(cell(cache="cold"), requests), seen.line()
    assert not seen.proves(cell(cache="off"), requests)


def trainer_logprobs(model: Decoder, columns: TokenColumns, budget: int) -> list[float]:
    """Log-probs as a training step computes them, its graph for the backward pass included."""
    values: list[float] = []
    cut = micro_batches(columns, range(len(columns.rows)), columns.trained_T, budget, path=EXACT)
    for micro in cut:
        hidden = model(micro.tokens_T, micro.positions_1T, micro.plan)
        logprobs, _ = token_logprobs(
            hidden.index_select(0, micro.predictors_N),
            model.head_weight(),
            micro.targets_N,
            micro.temperatures_N,
            path=EXACT,
            chunk_tokens=8,
        )
        assert logprobs.requires_grad
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        values += logprobs.tolist()
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_training_with_gradients_finds_the_logprobs_of_the_rollout(
    tiny_model_dir: TinyModelDir, family: str, dtype: str
) -> None:
    folder = tiny_model_dir(family)
    requests = make_workload(512, None, 10, 140).requests(0.7, 10)
    engine = Engine(load_model(folder, DTYPES[dtype]), path=EXACT, config=EngineConfig(max_running=4, prefill_chunk=13))
    for request in requests:
        engine.add_request(request)
    outputs = sorted(engine.run(), key=lambda output: output.request_id)
    model = load_model(folder, DTYPES[dtype]).requires_grad_(True)
    # Shortest first: rows of a micro-batch then keep their order.
    rows = [
        TrainingRow(
            sample_id=output.request_id,
            group_id="g",
            trajectory_id=output.request_id,
            token_ids=[*output.prompt_ids, *output.token_ids],
            sampled=[False] * len(output.prompt_ids) + [True] * len(output.token_ids),
            loss_weight=[0.0] * len(output.prompt_ids) + [1.0] * len(output.token_ids),
            rollout_logprobs=[math.nan] * len(output.prompt_ids) + output.logprobs,
            temperature=0.7,
        )
        for output in outputs
    ]
    for budget in (64, 4096):
        found = sorted(trainer_logprobs(model, TokenColumns.of(rows), budget))
        assert found == sorted(value for output in outputs for value in output.logprobs)
    without = training_logprobs(model.requires_grad_(False), outputs, 0.7, EXACT)
    assert without == [output.logprobs for output in outputs]


def test_the_real_model_is_exact_in_bfloat16(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts, and two of the ways that requests may go through: groups forked, a prompt shared by later ones."""

    def shorter(vocab_size: int, tokenizer: Tokenizer | None, count: int, longest_prompt: int) -> Workload:
        drawn = make_workload(vocab_size, tokenizer, count, 130)
        shared = max(drawn.prompts, key=len)  # more than a page, twice
        return Workload((shared, shared, *drawn.prompts[2:]), drawn.lengths)

    def two(workload: Workload, page_size: int) -> list[Circumstance]:
        return circumstances(workload, page_size)[:2]

    monkeypatch.setattr(exactness, "make_workload", shorter)
    monkeypatch.setattr(exactness, "circumstances", two)
    report = run_few_cells(smollm2, monkeypatch, EXACT, "bfloat16", page=64)
    assert len(report.cells) == 5 and report.passed, [cell.line() for cell in report.cells]


@pytest.mark.slow
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_real_model_is_exact_in_the_whole_matrix(smollm2: Path, dtype: str, quick: bool) -> None:
    assert run_exactness(str(smollm2), dtype=dtype, quick=quick, report=print).passed
