from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from unison.ops.isa import TWO_TILES, VARIABLES, rows_at_once
from unison.ops.padding import EXACT, FAST


@pytest.fixture(autouse=True)
def machine_with_amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    rows_at_once.cache_clear()
    yield
    rows_at_once.cache_clear()


def test_exact_bfloat16_takes_blocks_of_rows_and_nothing_else_does() -> None:
    assert EXACT.rows_at_once(torch.bfloat16) == TWO_TILES == 32
    assert EXACT.rows_at_once(torch.float32) is None
    assert FAST.rows_at_once(torch.bfloat16) is None


def test_without_amx_there_are_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert EXACT.rows_at_once(torch.bfloat16) is None


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("AVX512_CORE_BF16", None),
        ("avx2", None),
        ("AVX512_CORE_AMX", 32),
        ("AVX10_1_512_AMX_FP16", 32),
        ("ALL", 32),
        ("no such word", 32),
        ("", 32),
    ],
)
@pytest.mark.parametrize("name", VARIABLES)
def test_a_limit_that_leaves_amx_out_needs_none(
    name: str, limit: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, limit)
    assert EXACT.rows_at_once(torch.bfloat16) == expected


def test_the_first_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "ALL")
    assert EXACT.rows_at_once(torch.bfloat16) is None
