"""Frames between two processes of ours arrive whole, in order, whatever pieces they come in."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from unison.core.errors import WorkerError
from unison.processes.channel import PREFIX, AsyncChannel, Channel, frame


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Channel[list[int]]]]:
    ours, theirs = socket.socketpair()
    yield ours, Channel(theirs, list[int])
    ours.close()
    theirs.close()


def test_frames_arrive_in_order_however_they_are_cut(pair: tuple[socket.socket, Channel[list[int]]]) -> None:
    raw, channel = pair
    data = frame([1, 2]) + frame([]) + frame([3] * 1000)
    found: list[list[int]] = []
    for i in range(0, len(data), 7):
        raw.sendall(data[i : i + 7])
        found += channel.receive(1.0)
    assert found == [[1, 2], [], [3] * 1000]


def test_a_receive_returns_empty_at_its_deadline_and_when_it_is_woken(
    pair: tuple[socket.socket, Channel[list[int]]],
) -> None:
    _, channel = pair
    started = time.monotonic()
    assert channel.receive(0.05) == []
    assert time.monotonic() - started >= 0.045
    threading.Timer(0.05, channel.wake).start()
    started = time.monotonic()
    assert channel.receive(30.0) == []
    assert time.monotonic() - started < 10


def test_the_end_of_the_other_side_is_seen_after_what_it_sent(
    pair: tuple[socket.socket, Channel[list[int]]],
) -> None:
    raw, channel = pair
    raw.sendall(frame([4]))
    raw.close()
    assert channel.receive(1.0) == [[4]]
    channel.receive(1.0)
    assert channel.is_closed
    channel.send([1])  # lost, and no error


def test_a_send_waits_for_a_reader_that_is_slow(pair: tuple[socket.socket, Channel[list[int]]]) -> None:
    raw, channel = pair
    message = list(range(2_000_000))
    sender = threading.Thread(target=channel.send, args=(message,))
    sender.start()
    time.sleep(0.1)
    assert sender.is_alive()
    (size,) = PREFIX.unpack(_exactly(raw, PREFIX.size))
    assert msgspec.msgpack.decode(_exactly(raw, size)) == message
    sender.join(10)
    assert not sender.is_alive()


def test_a_frame_that_claims_too_much_is_refused_before_it_is_read(
    pair: tuple[socket.socket, Channel[list[int]]],
) -> None:
    raw, channel = pair
    raw.sendall(PREFIX.pack((1 << 31) + 5) + b"x")
    with pytest.raises(WorkerError, match="2147483653 bytes"):
        channel.receive(1.0)


def test_bytes_that_are_no_message_are_a_typed_error(pair: tuple[socket.socket, Channel[list[int]]]) -> None:
    raw, channel = pair
    raw.sendall(frame(["text"]))
    with pytest.raises(msgspec.MsgspecError):
        channel.receive(1.0)


def test_both_kinds_of_ends_understand_each_other() -> None:
    async def talk() -> tuple[list[int] | None, list[list[int]], list[int] | None]:
        ours, theirs = socket.socketpair()
        channel: Channel[list[int]] = Channel(theirs, list[int])
        link: AsyncChannel[list[int]] = await AsyncChannel.open(ours, list[int])
        sending = asyncio.create_task(asyncio.to_thread(channel.send, list(range(300_000))))
        first = await link.receive()
        await sending
        link.send([7])
        answer = await asyncio.to_thread(channel.receive, 5.0)
        theirs.close()
        return first, answer, await link.receive()

    first, answer, last = asyncio.run(talk())
    assert first == list(range(300_000))
    assert answer == [[7]]
    assert last is None


def _exactly(raw: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        found += raw.recv(size - len(found))
    return bytes(found)


def test_descriptors_do_not_grow_with_channels() -> None:
    def use_one() -> None:
        ours, theirs = socket.socketpair()
        channel: Channel[list[int]] = Channel(theirs, list[int])
        channel.send([1])
        channel.close()
        ours.close()

    use_one()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        use_one()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_channel_works_whatever_the_number_of_its_descriptor() -> None:
    ours, theirs = socket.socketpair()
    high = 1500
    os.dup2(theirs.fileno(), high)
    theirs.close()
    channel: Channel[list[int]] = Channel(socket.socket(fileno=high), list[int])
    try:
        ours.sendall(frame([7]))
        assert channel.receive(1.0) == [[7]]
        sending = threading.Thread(target=channel.send, args=([8] * (1 << 20),))
        sending.start()
        ours.settimeout(10)
        (left,) = PREFIX.unpack(ours.recv(PREFIX.size))
        while left:
            left -= len(ours.recv(min(left, 1 << 16)))
        sending.join(10)
        assert not sending.is_alive()
    finally:
        channel.close()
        ours.close()


def test_a_number_that_does_not_fit_is_an_error_of_its_own() -> None:
    with pytest.raises(WorkerError, match="does not fit"):
        frame([2**70])
