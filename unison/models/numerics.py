"""Chooses dtype and numerics path for a model on this machine, and says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unison.config.names import did_you_mean, join_or
from unison.core.errors import NumericsError
from unison.models.spec import DecoderSpec
from unison.ops.packed import can_pack
from unison.ops.padding import EXACT, FAST, PATHS, NumericsPath
from unison.ops.selftest import DTYPES, SelfTestResult, Shapes, packing_failures, run_selftest


@dataclass(frozen=True, slots=True)
class NumericsChoice:
    """notes are whole sentences for people; each automatic choice or fallback leaves one."""

    dtype: torch.dtype
    path: NumericsPath
    notes: tuple[str, ...]

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def shapes_of(spec: DecoderSpec) -> Shapes:
    """The shapes the self-test has to prove for this model."""
    heads, kv, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    linears = (
        (hidden, (heads + 2 * kv) * dim, spec.qkv_bias),
        (heads * dim, hidden, spec.output_bias),
        (hidden, 2 * inner, spec.mlp_bias),
        (inner, hidden, spec.mlp_bias),
    )
    return Shapes(linears, heads, kv, dim, hidden, inner, spec.vocab_size, spec.max_positions)


def has_fast_bfloat16() -> bool:
    """Whether the CPU computes bfloat16 in hardware; emulated, it is many times slower than float32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_numerics(spec: DecoderSpec, dtype: str, numerics: str) -> NumericsChoice:
    """Resolve "auto" for this model and machine.

    dtype auto: bfloat16 where the CPU has instructions for it, else float32. numerics auto: exact
    where the self-test holds (in float32 if bfloat16 fails and dtype is auto), else fast. Raises
    NumericsError where exact is demanded and the self-test fails, or a name is unknown.
    """
    _check_name("dtype", dtype, ("auto", *DTYPES))
    _check_name("numerics", numerics, ("auto", *PATHS))
    notes: list[str] = []
    candidates = [dtype] if dtype != "auto" else _automatic_dtypes(notes)
    if numerics == "fast":
        return NumericsChoice(DTYPES[candidates[0]], FAST, tuple(notes))
    results: list[tuple[str, SelfTestResult]] = []
    for name in candidates:
        result = run_selftest(name, shapes_of(spec))
        if result.passed:
            if results:
                notes.append(f"dtype {name} was chosen: the operators are not exact in {results[0][0]} here.")
            return NumericsChoice(DTYPES[name], EXACT, tuple(notes))
        results.append((name, result))
    reasons = "; ".join(f"{name}: {result.failures[0]}" for name, result in results)
    if numerics == "exact":
        raise NumericsError(f"numerics=exact cannot be kept on this machine ({reasons}); use numerics=fast or auto")
    notes.append(
        f"numerics fell back to fast: the self-test failed ({reasons}). "
        "Rollout and training will differ slightly; the difference is measured each step."
    )
    return NumericsChoice(DTYPES[candidates[0]], FAST, tuple(notes))


def choose_packing(spec: DecoderSpec, dtype: torch.dtype) -> tuple[bool, tuple[str, ...]]:
    """Whether this model's matrices are to be packed for rollout, and notes for people.

    Packed where the kernel exists for ``dtype`` and the self-test finds no bit of difference; the note names
    what it found where it does.
    """
    if not can_pack(dtype):
        return False, ()
    failures = packing_failures(shapes_of(spec))
    if not failures:
        return True, ()
    note = (
        f"prepack_linears has no effect: packed weights differ from plain ones here ({failures[0]}). "
        "Rollout goes on without them, slower and with the same bits as training."
    )
    return False, (note,)


def _check_name(setting: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise NumericsError(f"{setting}={value!r} is unknown{did_you_mean(str(value), known)}; use {join_or(known)}")


def _automatic_dtypes(notes: list[str]) -> list[str]:
    if has_fast_bfloat16():
        return ["bfloat16", "float32"]
    notes.append("dtype float32 was chosen: this CPU has no bfloat16 instructions.")
    return ["float32"]
