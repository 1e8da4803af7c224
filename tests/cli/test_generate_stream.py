"""``unison generate --stream``: the same output, earlier."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from unison.cli.main import main
from unison.core.records import OutputDelta
from unison.engine import engine as engine_module

Capture = pytest.CaptureFixture[str]
ONE = ("--prompt", "1+1=")
SEVERAL = ("--prompt", "1+1=", "--prompt", "a", "--n", "3")


def run(*words: str) -> int:
    return main(["generate", "--model", "tiny-random", "--dtype", "float32", "--seed", "3", *words])


def shown(capsys: Capture, *words: str) -> tuple[str, list[str]]:
    """Standard output, and standard error without the time that was taken."""
    assert run(*words) == 0
    found = capsys.readouterr()
    return found.out, [line for line in found.err.splitlines() if "tokens/s" not in line]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> list[OutputDelta]:
    """The deltas that were streamed; none where the command did not stream."""
    seen: list[OutputDelta] = []
    stream = engine_module.Engine.stream

    def watched(self: Any, prompts: Any, sampling: Any) -> Iterator[tuple[int, int, OutputDelta]]:
        for prompt, copy, delta in stream(self, prompts, sampling):
            seen.append(delta)
            yield prompt, copy, delta

    monkeypatch.setattr(engine_module.Engine, "stream", watched)
    return seen


@pytest.mark.parametrize("prompts", [ONE, SEVERAL])
@pytest.mark.parametrize(
    "settings", [(), ("--max-new-tokens", "0"), ("--logprobs", "raw"), ("--stop", "X"), ("--stop-token-ids", "46")]
)
def test_the_output_is_that_of_whole_answers(
    capsys: Capture, live: list[OutputDelta], prompts: tuple[str, ...], settings: tuple[str, ...]
) -> None:
    words = (*prompts, "--max-new-tokens", "12", *settings)
    whole = shown(capsys, *words)
    assert live == []
    assert shown(capsys, *words, "--stream") == whole
    assert live


def test_a_terminal_is_streamed_to_and_a_pipe_is_not(
    capsys: Capture, live: list[OutputDelta], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown(capsys, *ONE, "--max-new-tokens", "4")
    assert live == []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown(capsys, *ONE, "--max-new-tokens", "4", "--no-stream")
    shown(capsys, *ONE, "--max-new-tokens", "4", "--json")
    assert live == []
    shown(capsys, *ONE, "--max-new-tokens", "4")
    assert len(live) == 4


@pytest.mark.parametrize("prompts", [ONE, SEVERAL])
def test_text_is_shown_while_it_is_made(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, prompts: tuple[str, ...]
) -> None:
    printed = ""
    made = ""
    stream = engine_module.Engine.stream

    def watched(self: Any, prompts: Any, sampling: Any) -> Iterator[tuple[int, int, OutputDelta]]:
        nonlocal printed, made
        for prompt, copy, delta in stream(self, prompts, sampling):
            yield prompt, copy, delta
            printed += capsys.readouterr().out
            if (prompt, copy) == (0, 0) and delta.output is None:
                made += delta.text
                assert made in printed and printed.endswith(made)

    monkeypatch.setattr(engine_module.Engine, "stream", watched)
    assert run(*prompts, "--max-new-tokens", "12", "--stream") == 0
    assert len(made) > 3


def test_json_is_whole_answers_and_not_streamed(capsys: Capture) -> None:
    assert run(*ONE, "--json", "--stream") == 2
    assert "--json whole answers: give one of them" in capsys.readouterr().err
