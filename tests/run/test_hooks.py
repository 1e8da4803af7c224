from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loop.test_run_training import make_config
from tests.run import hooks as told
from unison.core.errors import ConfigError, HookError
from unison.loop import run_training
from unison.observability.hooks import HOOK_METHODS, Hooks

TinyModelDir = Callable[..., Path]


def test_a_hook_is_told_of_everything_in_order(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    told.events.clear()
    config = make_config(
        tiny_model_dir(),
        tmp_path / "run",
        run={"hooks": ["tests.run.hooks:Recorder"]},
        trainer={"steps": 2},
        checkpoint={"every": 1},
    )
    run_training(config)
    names = [name for name, _ in told.events]
    assert set(names) == set(HOOK_METHODS)
    assert [name for name in names if name != "on_checkpoint"] == [
        "on_start",
        "on_evaluation",
        "on_samples",
        "on_step",
        "on_samples",
        "on_evaluation",
        "on_step",
        "on_finish",
    ]
    assert [arguments[0] for name, arguments in told.events if name == "on_checkpoint"] == [1, 2]


def test_a_hook_that_fails_stops_the_run_with_its_step_saved(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    config = make_config(
        tiny_model_dir(), tmp_path / "run", run={"hooks": ["tests.run.hooks:fails_at_step_two"]}, trainer={"steps": 4}
    )
    with pytest.raises(HookError, match=r"fails_at_step_two' failed in on_step: RuntimeError: enough \(at hooks\.py:"):
        run_training(config)
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.run.hooks:Misspelt", r"on_stpe, which is never called; did you mean on_step\?"),
        ("tests.run.hooks:Nothing", "has no on_... methods"),
        ("tests.run.hooks:CannotBeMade", "cannot be made: TypeError"),
        ("tests.run.hooks:AsyncHook", "is async"),
    ],
)
def test_what_is_no_hook_is_refused_at_the_start(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Hooks([name])
