"""A disk that is full when a checkpoint is due stops the run with a sentence, or is said and survived."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.observability.test_run_files import largest_file
from tests.run.disturbed import outcome
from tests.run.struck import at_point, train
from unison.checkpoint.load import load_newest
from unison.core.errors import CheckpointError, RunInterrupted

TinyModelDir = Callable[..., Path]
SMALL_BYTES = 300_000
"""Room for every file of the run but those of its weights."""
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_without_room_stops_the_run_and_it_goes_on_once_there_is(
    background: bool, tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = tiny_model_dir(), {"checkpoint": {"every": 1, "background": background}}
    train(model, tmp_path / "whole", **settings)
    at_point(monkeypatch, "loop.concluded", 1, "SIGTERM")
    with pytest.raises(RunInterrupted):
        train(model, tmp_path / "run", **settings)
    monkeypatch.undo()
    refusal = r"^the checkpoint of step \d was not written to .*File too large.*Earlier checkpoints are untouched"
    with largest_file(SMALL_BYTES), pytest.raises(CheckpointError, match=refusal) as caught:
        train(model, tmp_path / "run", **settings)
    assert "\n" not in str(caught.value)
    loaded, skipped = load_newest(tmp_path / "run" / "checkpoints")
    assert loaded is not None and loaded.step == 1 and not skipped
    train(model, tmp_path / "run", **settings)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_checkpoint_without_room_is_said_and_the_run_goes_on_where_it_may(
    tiny_model_dir: TinyModelDir, tmp_path: Path, capsys: Capture
) -> None:
    model = tiny_model_dir()
    settings = {"checkpoint": {"every": 2, "on_error": "warn"}}
    with largest_file(SMALL_BYTES):
        digest = train(model, tmp_path / "run", **settings).weights_digest
    said = capsys.readouterr().out
    assert "note: the checkpoint of step 2 was not written" in said
    assert "the run goes on, and tries again when the next checkpoint is due" in said
    assert (tmp_path / "run" / "summary.json").exists()
    assert train(model, tmp_path / "whole").weights_digest == digest


def test_an_interrupted_run_that_could_not_be_saved_does_not_say_it_was(
    tiny_model_dir: TinyModelDir, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"checkpoint": {"every": 2, "on_error": "warn"}}
    for name in ("loop.concluded", "loop.sample"):
        at_point(monkeypatch, name, 1, "SIGTERM")
        with largest_file(SMALL_BYTES), pytest.raises(RunInterrupted):
            train(tiny_model_dir(), tmp_path / name, **settings)
        said = capsys.readouterr().out
        assert "could not be saved; what was saved before it is untouched" in said
        assert "is saved in" not in said and "nothing was done" not in said


@pytest.mark.parametrize("refused_at_once", [True, False])
def test_a_save_that_failed_is_tried_again_at_the_end(
    refused_at_once: bool,
    tiny_model_dir: TinyModelDir,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import unison.checkpoint.save as saving

    calls = []
    real = saving.check_room if refused_at_once else saving._write_files

    def fails_once(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 1:
            raise CheckpointError("no room this once")
        return real(*arguments)  # type: ignore[operator]

    monkeypatch.setattr(saving, "check_room" if refused_at_once else "_write_files", fails_once)
    settings = {"checkpoint": {"every": 4, "on_error": "warn", "keep_best": 0}, "eval": {"problems": 0}}
    train(tiny_model_dir(), tmp_path / "run", **settings)
    assert "note: no room this once" in capsys.readouterr().out
    if refused_at_once:
        loaded, _ = load_newest(tmp_path / "run" / "checkpoints")
        assert loaded is not None and loaded.step == 4
