"""Hands a trainer's weights to an engine's store in this process."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from unison.models.names import canonical_name
from unison.weights.checksum import tensors_digest
from unison.weights.transaction import Commit, WeightStore


def push_weights(store: WeightStore, tensors: Mapping[str, Tensor], version: int) -> Commit:
    """One whole update, committed only if both sides hold the same bytes; on any error it is aborted.

    ``tensors`` may have another dtype than the model: what is compared is their cast.
    """
    spec, dtype = store.model.spec, store.model.dtype
    transaction = store.begin(version)
    try:
        for name, tensor in tensors.items():
            transaction.stage(name, tensor)
        sent = {canonical_name(spec, name): tensor for name, tensor in tensors.items()}
        return transaction.commit(expected_checksum=tensors_digest(sent, dtype))
    except BaseException:
        transaction.abort()
        raise
