from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import states
from unison.checkpoint.disk import delete_folder
from unison.checkpoint.find import find
from unison.checkpoint.load import load_newest
from unison.checkpoint.retention import Retention, apply_retention
from unison.checkpoint.save import Saver
from unison.core.errors import ConfigError


def kept(root: Path, retention: Retention, scores: dict[int, float | None]) -> list[str]:
    for step, score in scores.items():
        Saver(root, retention).save(step, {}, {"step": step}, {}, score=score)
    return [entry.path.name.removeprefix("step-0000") for entry in find(root)]


@pytest.mark.parametrize(
    ("retention", "expected"),
    [
        (Retention(keep_last=1), ["10"]),
        (Retention(keep_last=3), ["10", "09", "08"]),
        (Retention(keep_last=99), ["10", "09", "08", "07", "06", "05", "04", "03", "02", "01"]),
        (Retention(keep_last=1, keep_best=2), ["10", "06", "03"]),
        (Retention(keep_last=2, keep_every=4), ["10", "09", "08", "04"]),
        (Retention(keep_last=1, keep_best=1, keep_every=5), ["10", "06", "05"]),
    ],
)
def test_the_last_the_best_and_every_nth_stay(retention: Retention, expected: list[str], tmp_path: Path) -> None:
    scores = dict.fromkeys(range(1, 11), 0.1) | {3: 0.9, 6: 0.9, 8: None, 10: -1.0}
    assert kept(tmp_path, retention, scores) == expected


def test_what_was_just_saved_stays_though_a_later_step_lies_there(tmp_path: Path) -> None:
    assert kept(tmp_path, Retention(keep_last=1), {9: None, 5: None}) == ["09", "05"]


def test_of_two_saves_of_a_step_kept_for_good_the_later_stays(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Retention(keep_last=1, keep_every=2))
    for step in (2, 2, 3):
        saver.save(step, {}, {}, {})
    assert [entry.path.name for entry in find(tmp_path)] == ["step-000003", "step-000002.1"]


def test_a_damaged_one_does_not_count_and_goes_when_all_kept_are_newer(tmp_path: Path) -> None:
    for step in (1, 2):
        states.save(tmp_path, step)
    (tmp_path / "step-000002" / "loop.json").unlink()
    states.save(tmp_path, 3)
    assert [(entry.step, entry.problem is None) for entry in find(tmp_path)] == [(3, True), (2, False), (1, True)]
    saved = states.saver(tmp_path).save(4, {}, {}, {})
    assert [entry.step for entry in find(tmp_path)] == [4, 3]
    assert any("step-000002: deleted (it was damaged: loop.json: is missing)" in note for note in saved.notes)


def test_what_will_not_go_is_told_and_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, os.strerror(13))

    states.save(tmp_path, 1)
    monkeypatch.setattr("unison.checkpoint.retention.delete_folder", refuse)
    saved = states.saver(tmp_path, Retention(keep_last=1)).save(2, {}, {}, {})
    assert "step-000001: could not be deleted: Permission denied" in saved.notes[0]
    assert len(find(tmp_path)) == 2


def test_one_that_another_process_deletes_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_the_race(path: Path) -> None:
        delete_folder(path)
        delete_folder(path)

    for step in (1, 2):
        states.save(tmp_path, step)
    monkeypatch.setattr("unison.checkpoint.retention.delete_folder", lose_the_race)
    assert apply_retention(tmp_path, Retention(keep_last=1), tmp_path / "step-000002") == []
    states.assert_is_state_of(load_newest(tmp_path)[0], 2)


@pytest.mark.parametrize("values", [{"keep_last": 0}, {"keep_last": True}, {"keep_best": -1}, {"keep_every": 1.5}])
def test_settings_that_cannot_be_meant_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(values))}="):
        Retention(**values)
