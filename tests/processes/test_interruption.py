from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from unison.core.errors import RunInterrupted
from unison.processes.interruption import Interruption

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_come_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    after = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_told(number: signal.Signals) -> None:
    told: list[str] = []
    with Interruption() as interruption:
        interruption.on_request(lambda: told.append("one"))
        forget = interruption.on_request(lambda: told.append("two"))
        interruption.on_request(lambda: told.append("three"))
        forget()
        interruption.check()
        assert not interruption.requested
        os.kill(os.getpid(), number)
        assert interruption.requested and interruption.signal_name == number.name
        assert told == ["one", "three"]
        for _ in range(2):
            with pytest.raises(RunInterrupted, match=f"interrupted by {number.name}"):
                interruption.check()


def test_a_second_signal_interrupts_at_once_and_tells_nobody_again() -> None:
    told: list[str] = []
    with Interruption() as interruption:
        interruption.on_request(lambda: told.append("once"))
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert interruption.signal_name == "SIGTERM" and told == ["once"]


def test_handlers_come_back_after_an_error_too() -> None:
    with pytest.raises(RuntimeError, match="within"), Interruption():
        raise RuntimeError("within")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_is_ignored_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), number)
            interruption.check()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_handler_that_python_did_not_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = signal.getsignal
    set_handlers: list[int] = []
    put = signal.signal

    def noted(number: int, handler: Any) -> Any:
        set_handlers.append(number)
        return put(number, handler)

    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGHUP else found(number))
    monkeypatch.setattr(signal, "signal", noted)
    with Interruption():
        pass
    monkeypatch.undo()
    assert set(set_handlers) == {signal.SIGINT, signal.SIGTERM}


def test_of_two_the_inner_one_takes_the_signal_and_the_outer_one_those_after_it() -> None:
    with Interruption() as outer:
        with Interruption() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
        assert inner.requested and not outer.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert outer.signal_name == "SIGINT"


def test_another_thread_is_refused_by_python_and_no_handler_is_left() -> None:
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            with Interruption():
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
