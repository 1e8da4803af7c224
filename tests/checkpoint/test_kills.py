"""A save that is killed, at every point it passes, costs nobody anything but itself."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.checkpoint import states
from tests.checkpoint.conftest import Victim
from unison.checkpoint.find import find
from unison.checkpoint.load import load_newest
from unison.checkpoint.retention import Retention
from unison.core.faults import FAULT_POINTS

POINTS = [name for name in FAULT_POINTS if name.startswith("checkpoint.")]
BEFORE_THE_NAME = POINTS[: POINTS.index("checkpoint.after_rename")]


@pytest.fixture(scope="session")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, and what a killed save has left."""
    root = tmp_path_factory.mktemp("template") / "checkpoints"
    for step in (1, 2):
        states.save(root, step)
    (root / ".tmp-step-000003-1-00000000").mkdir()
    (root / ".tmp-step-000003-1-00000000" / "latest.json").write_text("{")
    return root


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_each_passing_of_a_point_loses_at_most_that_save(
    point: str, two_checkpoints: Path, tmp_path: Path, victim: Victim
) -> None:
    passing = 0
    while True:
        passing += 1
        root = tmp_path / str(passing) / "checkpoints"
        shutil.copytree(two_checkpoints, root)
        code = victim(root, 3, f"{point}:{passing}:kill")
        assert code in (0, -signal.SIGKILL)

        loaded, skipped = load_newest(root)
        assert loaded is not None and loaded.step in (2, 3)
        states.assert_is_state_of(loaded, loaded.step)
        if code == 0:
            assert loaded.step == 3
            assert not skipped
            break
        leftovers = {path.name for path in root.iterdir() if path.name.startswith((".tmp-", ".del-"))}
        assert {entry.path.name for entry in skipped} == leftovers
        assert len([entry for entry in find(root) if entry.step and entry.problem is None]) >= 2 - (loaded.step == 2)

        saved = states.saver(root, Retention(keep_last=2)).save(
            4, states.tensors(4), states.documents(4), states.blobs(4)
        )
        assert all(any(name in note for note in saved.notes) for name in leftovers)
        loaded, skipped = load_newest(root)
        states.assert_is_state_of(loaded, 4)
        assert not skipped
        shutil.rmtree(root.parent)
    assert passing > 1, "the save does not pass this point"


@pytest.mark.parametrize("place", range(10))
def test_a_kill_between_save_and_deletion_leaves_complete_checkpoints(
    place: int, two_checkpoints: Path, tmp_path: Path, victim: Victim
) -> None:
    faults = [
        *((f"checkpoint.{name}", 1) for name in ("after_pointer", "before_delete", "after_delete_rename")),
        *(("checkpoint.within_delete", number) for number in range(1, 7)),
        ("checkpoint.after_delete", 1),
    ]
    root = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, root)
    point, passing = faults[place]
    assert victim(root, 3, f"{point}:{passing}:kill", keep_last=1) == -signal.SIGKILL
    states.assert_is_state_of(load_newest(root)[0], 3)
    # What is half deleted does not look like a checkpoint.
    assert all(entry.problem is None for entry in find(root) if entry.step is not None)
    states.save(root, 4, Retention(keep_last=1))
    assert [entry.path.name for entry in find(root)] == ["step-000004"]


def test_a_first_save_that_is_killed_leaves_no_checkpoint_and_says_so(tmp_path: Path, victim: Victim) -> None:
    root = tmp_path / "checkpoints"
    assert victim(root, 1, "checkpoint.before_rename:1:kill") == -signal.SIGKILL
    loaded, (skipped,) = load_newest(root)
    assert loaded is None
    assert "checkpoints/.tmp-step-000001" in str(skipped) and "incomplete" in skipped.reason
    states.save(root, 1)
    assert [path.name for path in sorted(root.iterdir())] == ["latest.json", "step-000001"]


@pytest.mark.parametrize("point", [point for point in POINTS if "delete" not in point and "sweep" not in point])
def test_an_error_at_a_point_leaves_no_partial_folder(point: str, tmp_path: Path, victim: Victim) -> None:
    root = tmp_path / "checkpoints"
    states.save(root, 1)
    assert victim(root, 2, f"{point}:1:raise") == 3
    assert not list(root.glob(".tmp-*"))
    loaded, skipped = load_newest(root)
    states.assert_is_state_of(loaded, 1 if point in BEFORE_THE_NAME else 2)
    assert not skipped
