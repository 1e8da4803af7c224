from __future__ import annotations

import contextlib
import math
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unison.core.errors import DataError
from unison.core.records import Provenance, Sample, SampleStatus, VersionRun
from unison.core.sampling import SamplingParams
from unison.core.wire import decode_samples, encode_samples

FLOATS = st.floats(max_value=0, allow_nan=False, width=32)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=6,
)


def make(logprobs: list[float], metadata: dict[str, object], name: str = "row/0") -> Sample:
    sample = Sample(
        sample_id=name,
        group_id="row",
        trajectory_id=name,
        sampling=SamplingParams(temperature=0.7, stop=("\n",), logit_bias={7: -1.5}, seed=(1 << 64) - 1),
        seed=(1 << 64) - 1,
        prompt_length=2,
        metadata=metadata,
    )
    sample.append_world([1, 2], "prompt")
    sample.append_sampled([5] * len(logprobs), logprobs, list(range(len(logprobs))))
    sample.append_world([9], "tool", Provenance.DEMONSTRATION)
    sample.kv_versions = [VersionRun(3, 4)]
    sample.reward_parts = {"exact": 0.1 + 0.2, "none": None}
    sample.status = SampleStatus.TRUNCATED
    sample.finish_reason = "length"
    sample.columns = {"route": [[1, 2], None]}
    return sample


def bits(values: list[float]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


@given(logprobs=st.lists(FLOATS, max_size=5), metadata=st.dictionaries(st.text(st.characters(codec="utf-8")), JSON))
def test_samples_come_back_to_the_bit(logprobs: list[float], metadata: dict[str, object]) -> None:
    sample = make(logprobs, metadata)
    (again,) = decode_samples(encode_samples([sample]))
    assert bits(again.logprobs) == bits(sample.logprobs)
    again.logprobs = sample.logprobs  # NaN is not equal to itself
    assert again == sample
    assert type(again.provenance[-1]) is Provenance and type(again.status) is SampleStatus


def test_metadata_shared_by_a_group_is_written_once_and_shared_again() -> None:
    metadata = {"text": "x" * 10_000}
    data = encode_samples([make([], metadata, f"row/{i}") for i in range(8)])
    assert len(data) < 2 * 10_000
    again = decode_samples(data)
    assert all(sample.metadata is again[0].metadata for sample in again)
    assert again[7].metadata == metadata


def test_equal_samples_are_equal_bytes_however_they_came_about() -> None:
    samples = [make([-0.5], {"label": 1}, f"row/{i}") for i in range(3)]
    assert encode_samples(decode_samples(encode_samples(samples))) == encode_samples(samples)
    shared = {"label": 1}
    assert encode_samples([make([-0.5], shared, f"row/{i}") for i in range(3)]) == encode_samples(samples)


def test_integers_of_any_size_survive_in_metadata() -> None:
    (again,) = decode_samples(encode_samples([make([], {"label": 10**40})]))
    assert again.metadata["label"] == 10**40


def test_metadata_that_no_file_can_hold_is_refused_with_its_key() -> None:
    with pytest.raises(DataError, match=r"sample row/0 holds what no file can.*under 'when'"):
        encode_samples([make([], {"fine": 1, "when": object()})])


def test_no_samples_are_no_samples() -> None:
    assert decode_samples(encode_samples([])) == []


@pytest.mark.parametrize("cut", [0, 1, 5, -1])
def test_bytes_that_were_cut_are_refused(cut: int) -> None:
    with pytest.raises(DataError, match="hold no samples"):
        decode_samples(encode_samples([make([-0.5], {})])[:cut])


@given(place=st.integers(0, 400), value=st.integers(0, 255))
def test_a_changed_byte_never_brings_another_error(place: int, value: int) -> None:
    data = bytearray(encode_samples([make([-0.5, -1.0], {"a": 1})]))
    data[place % len(data)] = value
    with contextlib.suppress(DataError):
        decode_samples(bytes(data))


def test_another_format_is_named() -> None:
    data = msgspec.msgpack.encode({"format": "unison.samples/9", "metadata": [], "metadata_index": [], "samples": []})
    with pytest.raises(DataError, match=r"unison\.samples/9"):
        decode_samples(data)


def test_a_log_prob_that_is_not_a_number_stays_one() -> None:
    (again,) = decode_samples(encode_samples([make([], {})]))
    assert all(math.isnan(value) for value in again.logprobs)
