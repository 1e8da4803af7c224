"""Linear weights laid out once for the bfloat16 kernel.

``F.linear`` lays a weight out anew in each call, which for a few rows costs as much as the product.
The layout kept here gives the same bits for any number of rows; ``unison.ops.selftest`` proves it.

Dims: M rows, K in, N out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_ROWS_HINT = 64
"""Rows the layout is chosen for; it serves every other number as well."""


class PackedWeight:
    """A copy of a weight [N, K] in the kernel's own layout; it takes a tensor's place in ``basic.linear``.

    It does not follow the weight it was made from: whoever changes that one makes a new copy. There is no
    gradient through it.
    """

    __slots__ = ("_packed", "dtype", "shape")

    def __init__(self, weight_NK: Tensor) -> None:
        if not can_pack(weight_NK.dtype):
            raise ValueError(f"a weight of {weight_NK.dtype} cannot be packed here; ask can_pack first")
        self.shape = weight_NK.shape
        self.dtype = weight_NK.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.detach(), _ROWS_HINT)

    def linear(self, x_MK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias -> [M, N]. Raises ValueError where x asks for a gradient."""
        if x_MK.requires_grad:
            raise ValueError("a packed weight passes no gradient on; train with the weight itself")
        return _product(x_MK, self._packed, bias_N, "none", [], "")  # type: ignore[no-any-return]


Weight = Tensor | PackedWeight


@cache
def _has_kernel() -> bool:
    # Asked for when it is needed: oneDNN settles on its instructions with the answer.
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(torch.ops.mkldnn, name) for name in names) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


_product: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and machine have the kernel, and it takes weights of ``dtype``: bfloat16 alone."""
    return dtype == torch.bfloat16 and _has_kernel()
