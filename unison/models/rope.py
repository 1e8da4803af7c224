"""Rotary tables: cos and sin of every position, computed once and read by index.

A table, because cos of an angle must not depend on which other angles share the call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unison.models.spec import RopeSpec
from unison.ops.basic import rope_factors

_GROWTH = 1024


class RopeTable:
    """Factors of ``ops.rope`` for each position in float32, grown in fixed blocks as positions are asked for."""

    def __init__(self, spec: RopeSpec, head_dim: int) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim)
        self._cos = torch.empty(0, 1, head_dim)
        self._sin = torch.empty(0, 1, head_dim)

    def rows(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D] of the given positions, as ``ops.rope`` takes them."""
        needed = int(positions_T.max()) + 1 if positions_T.numel() else 0
        while self._cos.shape[0] < needed:
            self._grow()
        return self._cos.index_select(0, positions_T), self._sin.index_select(0, positions_T)

    def _grow(self) -> None:
        start = self._cos.shape[0]
        positions = torch.arange(start, start + _GROWTH, dtype=torch.float32)
        # Angles in float32 as published models were trained; cos and sin in float64, rounded once.
        angles = (positions[:, None] * self._frequencies[None]).double()
        cos, sin = rope_factors(angles.cos().float(), angles.sin().float())
        self._cos = torch.cat([self._cos, cos])
        self._sin = torch.cat([self._sin, sin])


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """[D/2] float32. llama3: slow frequencies are divided by factor, with a ramp between the two bounds."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "llama3":
        return _llama3(frequencies, spec)
    return frequencies


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest = spec.original_max_positions / spec.low_freq_factor
    shortest = spec.original_max_positions / spec.high_freq_factor
    ramp = (spec.original_max_positions / wavelengths - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    between = (1 - ramp) * frequencies / spec.factor + ramp * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / spec.factor, frequencies)
    medium = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(medium, between, scaled)
