"""A service for the tests: each payload names something that graders have been seen to do. Runs in a worker."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable


def sleep_with_signals_blocked() -> bytes:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(1000)
    return b""


def endless_loop() -> bytes:
    while True:
        pass


def catastrophic_regex() -> bytes:
    return str(re.fullmatch(r"(a+)+b", "a" * 60)).encode()


def nested_powers() -> bytes:
    return str(9**9**9).encode()


def long_number() -> bytes:
    sys.set_int_max_str_digits(0)
    return str(int("7" * 3_000_000) ** 9).encode()


def segfault() -> bytes:
    return ctypes.string_at(0)


def exit_now() -> bytes:
    os._exit(3)


def sys_exit() -> bytes:
    sys.exit("enough")


def recursion() -> bytes:
    return recursion() + b"x"


def memory_hog() -> bytes:
    return bytes(len([bytes(1 << 26) for _ in range(100)]))


def raises() -> bytes:
    raise ValueError("no number here")


def wrong_type() -> bytes:
    return {"not": "bytes"}  # type: ignore[return-value]


def print_a_lot() -> bytes:
    text = "x" * (1 << 20)
    for _ in range(200):
        print(text)
        os.write(1, b"y" * (1 << 16))
    return b"printed"


def reads_stdin() -> bytes:
    return repr(sys.stdin.read()).encode()


def closes_descriptors() -> bytes:
    os.closerange(0, 256)
    return b"closed"


def writes_into_the_channel() -> bytes:
    for fd in range(3, 32):
        try:
            os.write(fd, b"\xff" * 64)
        except OSError:
            continue
    return b"written"


def huge_answer() -> bytes:
    return b"x" * (17 << 20)


def fork_and_return() -> bytes:
    return b"child" if os.fork() == 0 else b"parent"


def leave_children() -> bytes:
    in_group = subprocess.Popen(["sleep", "1000"])
    away = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return f"{in_group.pid} {away.pid}".encode()


def leave_children_and_hang() -> bytes:
    print(leave_children(), flush=True)
    return endless_loop()


def threads_that_never_end() -> bytes:
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(1000,)).start()
    return b"threads"


def draw() -> bytes:
    return str(random.random()).encode()


def limits() -> bytes:
    import resource

    return f"{resource.getrlimit(resource.RLIMIT_CORE)[0]} {os.getsid(0) == os.getpid()} {hash('a')}".encode()


def loaded() -> bytes:
    return " ".join(name for name in ("torch", "numpy", "transformers") if name in sys.modules).encode()


class Hostile:
    """Answers a payload that names nothing above with itself; ``sleep 0.01`` sleeps."""

    description = b"hostile"

    def __init__(self) -> None:
        # By hand: an attribute like `exit` of the module must not be reachable by a payload.
        functions: list[Callable[[], bytes]] = [
            *[sleep_with_signals_blocked, endless_loop, catastrophic_regex, nested_powers, long_number, segfault],
            *[exit_now, sys_exit, recursion, memory_hog, raises, wrong_type, print_a_lot, reads_stdin],
            *[closes_descriptors, writes_into_the_channel, huge_answer, fork_and_return, leave_children],
            *[leave_children_and_hang, threads_that_never_end, draw, limits, loaded],
        ]
        self._functions = {function.__name__.encode(): function for function in functions}

    def __call__(self, payload: bytes) -> bytes:
        if payload.startswith(b"sleep "):
            time.sleep(float(payload[6:]))
            return payload
        function = self._functions.get(payload)
        return payload if function is None else function()


def open_hostile(argument: bytes) -> Hostile:
    if argument == b"hangs":
        endless_loop()
    if argument == b"dies":
        os._exit(7)
    if argument == b"raises":
        raise RuntimeError("no licence")
    if argument.startswith(b"once "):
        # The first worker opens; later ones do not.
        with open(argument[5:], "a+b") as file:
            if file.tell():
                raise RuntimeError("not again")
            file.write(b"x")
    return Hostile()
