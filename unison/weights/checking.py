"""Proves that an update reaches every tensor: remember, spoil, update, compare."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

from unison.core.errors import WeightUpdateError
from unison.models.names import published_tensors
from unison.weights.transaction import WeightStore


class WeightsChecker:
    """Digests of the live tensors of a store, one for each published name."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._snapshot: dict[str, str] | None = None

    def snapshot(self) -> int:
        """Remember the live weights; the number of tensors."""
        self._snapshot = self._digests()
        return len(self._snapshot)

    @torch.no_grad()
    def reset(self) -> None:
        """Overwrite the live weights with NaN: whatever an update leaves out will show. Invalidates them."""
        with self._store.lock:
            self._store.complete = False
            for parameter in self._store.model.parameters():
                parameter.fill_(float("nan"))

    def compare(self) -> list[str]:
        """Names of tensors that differ from those remembered. Raises WeightUpdateError without a snapshot."""
        if self._snapshot is None:
            raise WeightUpdateError("there is no snapshot to compare with; take one first")
        now = self._digests()
        return [name for name, digest in now.items() if self._snapshot.get(name) != digest]

    def _digests(self) -> dict[str, str]:
        return {name: _digest(tensor) for name, tensor in published_tensors(self._store.model).items()}


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(data.numpy().data)
