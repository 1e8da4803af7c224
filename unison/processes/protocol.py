"""What pool and worker say to each other: length-prefixed MessagePack of typed structs, never pickle."""

from __future__ import annotations

import struct
from typing import Final, Literal

import msgspec

MAX_CALL_BYTES: Final = 1 << 30
MAX_REPLY_BYTES: Final = 16 << 20
PREFIX: Final = struct.Struct("<I")

FailureKind = Literal["error", "timeout", "memory", "crash"]
"""error: the code raised. timeout: it ran past its deadline. memory: it ran out of it. crash: its process died."""


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first frame: ``target`` is the ``module:object`` that is called with ``argument`` to open the service."""

    target: str
    argument: bytes
    sys_path: list[str]
    memory_mb: int | None


class Call(msgspec.Struct, frozen=True, tag="call"):
    call_id: int
    seed: int
    payload: bytes


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The service is open; ``description`` is what it says of itself."""

    description: bytes


class NotStarted(msgspec.Struct, frozen=True, tag="not_started"):
    reason: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    call_id: int
    payload: bytes


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    call_id: int
    kind: FailureKind
    reason: str


Reply = Ready | NotStarted | Answer | Raised

_decode_call: Final = msgspec.msgpack.Decoder(Setup | Call)
_decode_reply: Final = msgspec.msgpack.Decoder(Reply)


def frame(message: Setup | Call | Reply) -> bytes:
    """The message with its length before it."""
    body = msgspec.msgpack.encode(message)
    return PREFIX.pack(len(body)) + body


def read_call(body: bytes | bytearray) -> Setup | Call:
    """Raises msgspec.MsgspecError for bytes that are neither."""
    return _decode_call.decode(body)


def read_reply(body: bytes | bytearray) -> Reply:
    """Raises msgspec.MsgspecError for bytes that are no reply."""
    return _decode_reply.decode(body)
