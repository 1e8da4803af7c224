"""A run that is killed, at whatever moment and however often, comes to the same weights when it is started again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.run.disturbed import complete, disturb, killed_after, outcome

MOST_SESSIONS = 60


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = complete(folder)
    assert ended.code == 0, ended.output
    return folder


def kill_and_go_on(folder: Path, undisturbed: Path, num_kills: int, first_seed: int) -> None:
    history = []
    for seed in range(first_seed, first_seed + num_kills):
        history.append(disturb(folder, seed))
        if (folder / "summary.json").exists():
            assert outcome(folder) == outcome(undisturbed), history
            folder = folder.with_name(f"again-{seed}")
    ended = complete(folder)
    assert ended.code == 0, (history, ended.output)
    assert outcome(folder) == outcome(undisturbed), history


def test_a_run_killed_at_five_random_moments_ends_as_the_undisturbed_one(undisturbed: Path, tmp_path: Path) -> None:
    kill_and_go_on(tmp_path / "run", undisturbed, num_kills=5, first_seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(100, 140, 10))
def test_a_run_killed_at_forty_random_moments_ends_as_the_undisturbed_one(
    first_seed: int, undisturbed: Path, tmp_path: Path
) -> None:
    kill_and_go_on(tmp_path / "run", undisturbed, num_kills=10, first_seed=first_seed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_asked_to_stop_saves_says_how_to_go_on_and_goes_on(
    number: signal.Signals, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stopped = killed_after(folder, 1.0, number)
    assert stopped.code == 128 + number, stopped.output
    assert f"go on with: unison train {folder}" in stopped.output
    ended = complete(folder)
    assert ended.code == 0, ended.output
    assert "goes on after step" in ended.output
    assert outcome(folder) == outcome(undisturbed)
