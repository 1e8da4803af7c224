"""The choice of dtype and numerics path: what each name gives, and what is said where it cannot be kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from unison.core.errors import NumericsError
from unison.models import numerics
from unison.models.families.llama import read_spec
from unison.models.numerics import choose_numerics, choose_packing, has_fast_bfloat16, shapes_of
from unison.models.tiny_random import CONFIG
from unison.ops.padding import EXACT, FAST
from unison.ops.selftest import SelfTestResult, Shapes, run_selftest

SPEC = read_spec(CONFIG)
Machine = Callable[..., list[str]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """``machine(bfloat16=True, inexact=("float32",))`` pretends; returns the dtypes that get tested, as they are."""

    def pretend(*, bfloat16: bool, inexact: tuple[str, ...] = ()) -> list[str]:
        tested: list[str] = []

        def selftest(dtype: str, shapes: Shapes) -> SelfTestResult:
            assert shapes == shapes_of(SPEC)
            tested.append(dtype)
            failures = (f"linear in {dtype} depends on the batch",) if dtype in inexact else ()
            return SelfTestResult(not failures, failures, 0.1)

        monkeypatch.setattr(numerics, "has_fast_bfloat16", lambda: bfloat16)
        monkeypatch.setattr(numerics, "run_selftest", selftest)
        return tested

    return pretend


@pytest.mark.parametrize(
    ("dtype", "setting", "complaint"),
    [
        ("bf16", "auto", "dtype='bf16' is unknown; did you mean bfloat16.*; use auto, bfloat16 or float32"),
        ("auto", "exct", "numerics='exct' is unknown; did you mean exact.*; use auto, exact or fast"),
    ],
)
def test_an_unknown_name_is_refused_with_the_right_ones(dtype: str, setting: str, complaint: str) -> None:
    with pytest.raises(NumericsError, match=complaint):
        choose_numerics(SPEC, dtype, setting)


@pytest.mark.parametrize("setting", ["auto", "exact"])
def test_a_machine_that_can_do_all_computes_in_exact_bfloat16(machine: Machine, setting: str) -> None:
    tested = machine(bfloat16=True)
    choice = choose_numerics(SPEC, "auto", setting)
    assert (choice.dtype, choice.dtype_name, choice.path, choice.notes) == (torch.bfloat16, "bfloat16", EXACT, ())
    assert tested == ["bfloat16"]


@pytest.mark.parametrize("setting", ["auto", "exact"])
def test_without_bfloat16_instructions_auto_is_float32_and_says_so(machine: Machine, setting: str) -> None:
    tested = machine(bfloat16=False)
    choice = choose_numerics(SPEC, "auto", setting)
    assert (choice.dtype, choice.path) == (torch.float32, EXACT)
    (note,) = choice.notes
    assert "no bfloat16 instructions" in note
    assert tested == ["float32"]


def test_a_dtype_asked_for_is_kept_even_where_it_is_slow(machine: Machine) -> None:
    machine(bfloat16=False)
    choice = choose_numerics(SPEC, "bfloat16", "auto")
    assert (choice.dtype, choice.path, choice.notes) == (torch.bfloat16, EXACT, ())


@pytest.mark.parametrize("setting", ["auto", "exact"])
def test_auto_takes_float32_where_only_that_is_exact_and_says_so(machine: Machine, setting: str) -> None:
    tested = machine(bfloat16=True, inexact=("bfloat16",))
    choice = choose_numerics(SPEC, "auto", setting)
    assert (choice.dtype, choice.path) == (torch.float32, EXACT)
    (note,) = choice.notes
    assert "float32 was chosen" in note and "not exact in bfloat16" in note
    assert tested == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    ("dtype", "expected", "reasons"),
    [
        ("auto", torch.bfloat16, ["bfloat16: linear in bfloat16", "float32: linear in float32"]),
        ("bfloat16", torch.bfloat16, ["bfloat16: linear in bfloat16"]),
        ("float32", torch.float32, ["float32: linear in float32"]),
    ],
)
def test_where_nothing_is_exact_auto_falls_back_loudly_and_exact_is_refused(
    machine: Machine, dtype: str, expected: torch.dtype, reasons: list[str]
) -> None:
    machine(bfloat16=True, inexact=("bfloat16", "float32"))
    choice = choose_numerics(SPEC, dtype, "auto")
    assert (choice.dtype, choice.path) == (expected, FAST)
    (note,) = choice.notes
    assert "fell back to fast" in note and all(reason in note for reason in reasons)
    with pytest.raises(NumericsError, match=r"cannot be kept .* use numerics=fast or auto") as refusal:
        choose_numerics(SPEC, dtype, "exact")
    assert all(reason in str(refusal.value) for reason in reasons)


@pytest.mark.parametrize(("bfloat16", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_fast_is_taken_without_a_test(machine: Machine, bfloat16: bool, expected: torch.dtype) -> None:
    tested = machine(bfloat16=bfloat16, inexact=("bfloat16", "float32"))
    choice = choose_numerics(SPEC, "auto", "fast")
    assert (choice.dtype, choice.path) == (expected, FAST)
    assert tested == []


def test_this_machine_gives_what_its_self_test_finds() -> None:
    choice = choose_numerics(SPEC, "auto", "auto")
    first = "bfloat16" if has_fast_bfloat16() else "float32"
    assert (choice.dtype_name == first and choice.path is EXACT) == run_selftest(first, shapes_of(SPEC)).passed


def test_the_shapes_are_those_of_the_layers() -> None:
    spec = read_spec({**CONFIG, "attention_bias": True, "head_dim": 20})
    linears = ((64, 160, True), (80, 64, True), (64, 256, False), (128, 64, False))
    assert shapes_of(spec) == Shapes(linears, 4, 2, 20, 64, 128, 259, spec.max_positions)


@pytest.mark.parametrize("failures", [(), ("linear 64x192: 8 of 8 rows differ (1 threads)",)])
def test_weights_are_packed_where_the_proof_holds(monkeypatch: pytest.MonkeyPatch, failures: tuple[str, ...]) -> None:
    monkeypatch.setattr(numerics, "can_pack", lambda dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(numerics, "packing_failures", lambda shapes: failures if shapes == shapes_of(SPEC) else None)
    pack, notes = choose_packing(SPEC, torch.bfloat16)
    assert pack is not bool(failures)
    assert len(notes) == len(failures)
    assert all(failure in note for failure, note in zip(failures, notes, strict=True))
    assert choose_packing(SPEC, torch.float32) == (False, ())
