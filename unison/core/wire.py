"""Samples as bytes, for files and for other processes: every token, log-prob and version comes back to the bit.

MessagePack by schema; nothing in it is ever executed. Metadata travels as JSON, so that what a row held (an integer
of any size) is what its reader gets; tuples in it become lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from unison.core.errors import DataError, RequestError
from unison.core.records import Sample

FORMAT: Final = "unison.samples/1"


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    metadata: list[str]
    """Each distinct one once: the samples of a group share theirs."""
    metadata_index: list[int]
    samples: list[Sample]


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """The samples as bytes. Raises DataError for metadata that JSON cannot hold."""
    # By content, not by object: equal samples are equal bytes, whether they were just drawn or read from a file.
    texts = [_metadata_text(sample) for sample in samples]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    envelope = _Envelope(
        format=FORMAT,
        metadata=list(places),
        metadata_index=[places[text] for text in texts],
        samples=[replace(sample, metadata={}) for sample in samples],
    )
    try:
        return msgspec.msgpack.encode(envelope)
    except (TypeError, OverflowError, ValueError, msgspec.MsgspecError) as error:
        raise DataError(f"samples cannot be written as bytes: {error}") from error


def decode_samples(data: bytes) -> list[Sample]:
    """The samples that ``encode_samples`` was given. Raises DataError for anything else."""
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope, strict=True)
        metadata = [json.loads(text) for text in envelope.metadata]
    except (msgspec.MsgspecError, ValueError, RecursionError, RequestError) as error:
        raise DataError(f"these bytes hold no samples: {error}") from error
    if envelope.format != FORMAT:
        raise DataError(f"samples in the format {envelope.format!r} cannot be read; this version reads {FORMAT!r}")
    if len(envelope.metadata_index) != len(envelope.samples):
        raise DataError(f"{len(envelope.samples)} samples have {len(envelope.metadata_index)} pieces of metadata")
    for sample, place in zip(envelope.samples, envelope.metadata_index, strict=True):
        if not 0 <= place < len(metadata) or not isinstance(metadata[place], dict):
            raise DataError(f"sample {sample.sample_id} refers to metadata that is not there")
        sample.metadata = metadata[place]
    return envelope.samples


def _metadata_text(sample: Sample) -> str:
    try:
        return json.dumps(dict(sample.metadata), ensure_ascii=True, check_circular=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"the metadata of sample {sample.sample_id} holds what no file can: {error}{_culprit(sample.metadata)}; "
            "give rows plain values (text, numbers, booleans, lists and tables of them)"
        ) from error


def _culprit(metadata: Mapping[str, Any]) -> str:
    for key, value in metadata.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            return f" (under {key!r})"
    return ""
