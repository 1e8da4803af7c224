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


def test_a_run_killed_at_three_random_moments_ends_as_the_undisturbed_one(undisturbed: Path, tmp_path: Path) -> None:
    kill_and_go_on(tmp_path / "run", undisturbed, num_kills=3, first_seed=1)


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
    # It sleeps in the middle of its second rollout, so that a quick machine is not done before the signal comes.
    stopped = killed_after(folder, 1.0, number, fault="loop.sample:30:sleep=4")
    assert stopped.code == 128 + number, stopped.output
    assert f"go on with: unison train {folder}" in stopped.output
    ended = complete(folder)
    assert ended.code == 0, ended.output
    assert "goes on after step" in ended.output
    assert outcome(folder) == outcome(undisturbed)


WHOLE = (
    "--algorithm.name=ppo",
    "--algorithm.kl_coef=0.05",
    "--algorithm.kl_control=proportional",
    "--algorithm.kl_target=0.01",
    "--algorithm.kl_horizon=100",
    "--reference.update=moving_average",
    "--critic.learning_rate=1e-2",
    "--critic.only_steps=1",
    "--correction.name=mis",
    "--trainer.mini_batches=2",
    "--trainer.epochs=2",
    "--trainer.shuffle_samples=true",
    "--checkpoint.every=1",
)
"""All that a run can carry beside its policy."""


@pytest.mark.parametrize(
    "faults",
    [
        # Between the updates of one rollout, and while what came of them is saved.
        ("loop.micro_batch:9", "checkpoint.within_file:4"),
        # In the passes before an update, after all updates of a rollout, in a later rollout.
        pytest.param(("loop.micro_batch:1", "loop.updated:1", "loop.sample:20"), marks=pytest.mark.slow),
    ],
)
def test_a_run_with_critic_reference_and_several_updates_is_killed_in_each_of_its_parts(
    faults: tuple[str, ...], tmp_path: Path
) -> None:
    undisturbed = tmp_path / "undisturbed"
    ended = complete(undisturbed, *WHOLE)
    assert ended.code == 0, ended.output
    folder = tmp_path / "run"
    for fault in faults:
        struck = complete(folder, *WHOLE, fault=f"{fault}:kill")
        assert struck.code != 0, (fault, struck.output)
    ended = complete(folder, *WHOLE)
    assert ended.code == 0, ended.output
    assert outcome(folder) == outcome(undisturbed)
