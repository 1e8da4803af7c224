from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from unison.observability.progress import Progress
from unison.observability.timers import Stopwatch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(progress: Progress) -> None:
    with progress:
        progress.update("rollout", 0, 4)
        progress.update("rollout", 3, 4)
        progress.print("step 1/2  reward 0.5 [bold] :smile: " + "x" * 200)
        progress.update("training", 1, 2)
        progress.idle()
        progress.update("rollout", 1, 4)
        progress.print("step 2/2")


def test_without_a_terminal_only_the_lines_are_written() -> None:
    for mode in ("auto", "off"):
        stream = io.StringIO()
        run(Progress(mode, stream=stream))
        assert stream.getvalue() == "step 1/2  reward 0.5 [bold] :smile: " + "x" * 200 + "\nstep 2/2\n"


def test_off_is_silent_on_a_terminal_too() -> None:
    stream = Terminal()
    with Progress("off", stream=stream) as progress:
        progress.update("rollout", 1, 4)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("mode", "stream"), [("auto", Terminal()), ("on", io.StringIO())])
def test_the_bar_shows_phases_and_leaves_printed_lines_whole(
    mode: str, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    run(Progress(mode, stream=stream))  # type: ignore[arg-type]
    written = stream.getvalue()
    assert "rollout" in written and "training" in written
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r", "\n")
    assert "step 1/2  reward 0.5 [bold] :smile: " + "x" * 200 in plain.splitlines()
    assert "step 2/2" in plain.splitlines()


def test_a_hidden_bar_loads_no_terminal_library() -> None:
    code = (
        "import sys; from unison.observability.progress import Progress\n"
        "with Progress() as p: p.update('rollout', 1, 2)\n"
        "print('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_stopwatch_adds_up_spans_by_name() -> None:
    now = iter([0.0, 1.0, 10.0, 13.0, 20.0, 21.0, 24.0, 25.0])
    watch = Stopwatch(clock=lambda: next(now))
    with watch.span("a"):
        pass
    with pytest.raises(RuntimeError), watch.span("a"):
        raise RuntimeError
    with watch.span("outer"), watch.span("inner"):
        pass
    assert watch.totals_s() == {"a": 4.0, "inner": 3.0, "outer": 5.0}
    assert watch.count("a") == 2 and watch.seconds("never") == 0.0 and watch.count("never") == 0
    watch.reset()
    assert watch.totals_s() == {}
