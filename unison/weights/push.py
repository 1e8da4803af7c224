"""Hands a trainer's weights to an engine's store in this process."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from unison.weights.checksum import tensors_digest
from unison.weights.transaction import Commit, WeightStore


def push_weights(store: WeightStore, tensors: Mapping[str, Tensor], version: int) -> Commit:
    """One whole update, committed only if both sides hold the same bytes; on any error it is aborted."""
    transaction = store.begin(version)
    try:
        for name, tensor in tensors.items():
            transaction.stage(name, tensor)
        return transaction.commit(expected_checksum=tensors_digest(tensors))
    except BaseException:
        transaction.abort()
        raise
