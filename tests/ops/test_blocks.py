"""The order of sums over blocks, and the weights that are summed."""

from __future__ import annotations

import pytest
import torch

from unison.ops.blocks import KEY_BLOCK, num_blocks, softmax_weights_, sum_counted, sum_stacked, wide

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
def test_the_sum_is_the_tree_to_the_bit_and_zeros_at_the_end_change_nothing(dtype: torch.dtype) -> None:
    total = wide(dtype)
    every = (torch.randn(3, 200, 5, generator=torch.Generator().manual_seed(0)) * 1000).to(dtype)
    before = every.clone()
    for count in range(1, 201):
        parts = every[:, :count]
        expected = tree(list(parts.to(total).unbind(1)))
        assert torch.equal(sum_stacked(parts, total), expected), f"{count} parts"
        for num_zeros in (1, 7, 8, 63, 500):
            padded = torch.cat([parts, parts.new_zeros(3, num_zeros, 5)], dim=1)
            assert torch.equal(sum_stacked(padded, total), expected), f"{count} parts and {num_zeros} zeros"
    assert torch.equal(every, before), "what is summed is left as it was"


def test_an_order_that_is_another_shows() -> None:
    parts = torch.randn(1, 30, 200, generator=torch.Generator().manual_seed(1)) * 1000
    assert not torch.equal(sum_stacked(parts.flip(1), torch.float32), sum_stacked(parts, torch.float32))
    assert not torch.equal(parts.cumsum(1)[:, -1], sum_stacked(parts, torch.float32))


def test_counted_sums_go_block_by_block() -> None:
    sums = torch.rand(4, 3, 70, generator=torch.Generator().manual_seed(2)) * 1000
    expected = sums[..., 0].double()
    for i in range(1, 70):
        expected = expected + sums[..., i].double()
    assert torch.equal(sum_counted(sums), expected.float())
    assert torch.equal(sum_counted(torch.cat([sums, torch.zeros(4, 3, 9)], dim=-1)), sum_counted(sums))


def test_weights_of_scores_far_below_the_maximum_are_zero() -> None:
    scores = torch.tensor([[0.0, -1.0, -79.5, -80.1, -200.0, float("-inf")]])
    weights = softmax_weights_(scores.clone(), torch.zeros(1, 1))
    assert torch.equal(weights[0, :3], scores[0, :3].exp())
    assert weights[0, 3:].tolist() == [0.0, 0.0, 0.0]
    assert softmax_weights_(torch.tensor([[float("nan")]]), torch.zeros(1, 1)).isnan().all()


def test_blocks_are_counted_from_position_zero() -> None:
    assert KEY_BLOCK == 64
    assert [num_blocks(count) for count in (0, 1, 63, 64, 65, 128, 129)] == [0, 1, 1, 1, 2, 2, 3]
