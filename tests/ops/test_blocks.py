"""The order of sums over blocks: one tree, whichever of its two forms adds it up."""

from __future__ import annotations

import pytest
import torch

from unison.ops.blocks import KEY_BLOCK, num_blocks, sum_in_order, sum_stacked, wide

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """The oracle: eight neighbours from left to right, then the same with their sums, until one is left."""
    while len(parts) > 1:
        sums = []
        for at in range(0, len(parts), 8):
            total = parts[at]
            for part in parts[at + 1 : at + 8]:
                total = total + part
            sums.append(total)
        parts = sums
    return parts[0]


@DTYPES
def test_both_forms_are_the_tree_to_the_bit_and_zeros_at_the_end_change_nothing(dtype: torch.dtype) -> None:
    total = wide(dtype)
    every = (torch.randn(200, 3, 5, generator=torch.Generator().manual_seed(0)) * 1000).to(dtype)
    before = every.clone()
    for count in range(1, 201):
        parts = every[:count]
        expected = tree(list(parts.to(total).unbind()))
        assert torch.equal(sum_in_order(iter(parts), total), expected), f"{count} parts in order"
        assert torch.equal(sum_stacked(parts, total), expected), f"{count} parts stacked"
        for num_zeros in (1, 7, 8, 63, 500):
            padded = torch.cat([parts, parts.new_zeros(num_zeros, 3, 5)])
            assert torch.equal(sum_stacked(padded, total), expected), f"{count} parts and {num_zeros} zeros"
    assert torch.equal(every, before), "what is summed is left as it was"


def test_an_order_that_is_another_shows() -> None:
    parts = torch.randn(30, 200, generator=torch.Generator().manual_seed(1)) * 1000
    assert not torch.equal(sum_in_order(parts.flip(0), torch.float32), sum_in_order(parts, torch.float32))
    assert not torch.equal(parts.cumsum(0)[-1], sum_in_order(parts, torch.float32))


def test_nothing_has_no_sum() -> None:
    with pytest.raises(ValueError, match="nothing to sum"):
        sum_in_order([], torch.float32)


def test_blocks_are_counted_from_position_zero() -> None:
    assert KEY_BLOCK == 64
    assert [num_blocks(count) for count in (0, 1, 63, 64, 65, 128, 129)] == [0, 1, 1, 1, 2, 2, 3]
