"""The checksum both sides of an update compare."""

from __future__ import annotations

import torch

from unison.weights.checksum import tensors_digest


def test_a_checksum_sees_every_bit_name_shape_and_dtype() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(2, 3)}
    flipped = tensors["b"].clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    others = [
        {**tensors, "b": flipped},
        {**tensors, "a": -tensors["a"]},
        {"a": tensors["b"], "b": tensors["a"]},
        {"a": tensors["a"], "c": tensors["b"]},
        {"a": tensors["a"]},
        {**tensors, "b": tensors["b"].view(3, 2)},
        {**tensors, "a": torch.zeros(2, 3, dtype=torch.int32)},
        {**tensors, "c": torch.zeros(0)},
    ]
    digests = [tensors_digest(tensors), *map(tensors_digest, others)]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 64 for digest in digests)


def test_a_checksum_depends_on_values_alone() -> None:
    a, b = torch.arange(12.0).view(3, 4), torch.ones(2)
    digest = tensors_digest({"a": a, "b": b})
    assert digest == tensors_digest({"b": b.clone().requires_grad_(), "a": a.t().contiguous().t()})
    low = {"a": a.bfloat16(), "b": b.bfloat16()}
    assert tensors_digest({"a": a, "b": b}, torch.bfloat16) == tensors_digest(low) != digest
