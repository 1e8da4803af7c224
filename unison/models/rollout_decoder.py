"""The decoder as the rollout engine calls it: the same weights and bits, with less work around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import cast

from torch import Tensor, nn

from unison.models.decoder import BoundLayer, Decoder, Layer
from unison.ops.packed import PackedWeight, Weight


class RolloutDecoder(Decoder):
    """Shares the parameters of ``model``, and keeps what can be computed from them once per version.

    With ``pack``, the matrices are also held in the layout of their kernel. What is kept is a copy: whoever
    changes the weights calls ``forget`` before and ``remake`` after. In between, the weights themselves are
    used. Call it without gradients.
    """

    def __init__(self, model: Decoder, pack: bool) -> None:
        nn.Module.__init__(self)
        self.spec = model.spec
        self.dtype = model.dtype
        self.embed, self.layers, self.norm, self.head = model.embed, model.layers, model.norm, model.head
        self._rope = model._rope
        self._pack = pack
        self._kept: list[BoundLayer] | None = None
        self._packed_head: PackedWeight | None = None
        self.remake()

    def forget(self) -> None:
        """Drop all copies; the next call computes with the weights as they are then."""
        self._kept = None
        self._packed_head = None

    def remake(self) -> None:
        """Make the copies anew from the present weights."""
        self.forget()
        self._kept = [cast(Layer, layer).bound(self._pack) for layer in self.layers]
        self._packed_head = PackedWeight(self.embed if self.head is None else self.head) if self._pack else None

    @property
    def kept_bytes(self) -> int:
        """Memory of the packed copies; what else is kept is small."""
        packed = [] if self._packed_head is None else [self._packed_head]
        for layer in self._kept or ():
            weights = (linear.weight for linear in (layer.qkv, layer.out, layer.gate_up, layer.down))
            packed += [weight for weight in weights if isinstance(weight, PackedWeight)]
        return sum(math.prod(weight.shape) * weight.dtype.itemsize for weight in packed)

    def head_weight(self) -> Weight:
        return super().head_weight() if self._packed_head is None else self._packed_head

    def _bound_layers(self) -> Iterable[Callable[..., Tensor]]:
        return super()._bound_layers() if self._kept is None else self._kept
