"""The checksum both sides of an update compare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import xxhash

from unison.weights.checksum import buffer_checksum, tensors_digest, weights_checksum

BOTH = pytest.mark.parametrize(("checksum", "length"), [(tensors_digest, 64), (weights_checksum, 32)])


@BOTH
def test_a_checksum_sees_every_bit_name_shape_and_dtype(checksum: Callable[..., str], length: int) -> None:
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
    digests = [checksum(tensors), *map(checksum, others)]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == length for digest in digests)


@BOTH
def test_a_checksum_depends_on_values_alone(checksum: Callable[..., str], length: int) -> None:
    a, b = torch.arange(12.0).view(3, 4), torch.ones(2)
    digest = checksum({"a": a, "b": b})
    assert digest == checksum({"b": b.clone().requires_grad_(), "a": a.t().contiguous().t()})
    low = {"a": a.bfloat16(), "b": b.bfloat16()}
    assert checksum({"a": a, "b": b}, torch.bfloat16) == checksum(low) != digest
    assert checksum({}) != checksum({"": torch.zeros(0)})


def test_the_fast_checksum_is_the_hash_of_headers_and_bytes() -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.ones(2, dtype=torch.bfloat16)
    text = b"a\0torch.float32\0[2, 3]\0" + a.numpy().tobytes() + b"b\0torch.bfloat16\0[2]\0" + b"\x80\x3f" * 2
    assert weights_checksum({"b": b, "a": a}) == xxhash.xxh3_128_hexdigest(text)
    memory = torch.arange(100, dtype=torch.uint8)
    assert buffer_checksum(memory) == xxhash.xxh3_128_hexdigest(bytes(range(100)))
