"""A signal, wherever it comes, leaves a state from which the run goes on as if there had been none."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loop.test_run_training import make_config, metrics_of, run
from tests.run.disturbed import outcome
from tests.run.struck import CutOff, at_point, train
from unison.checkpoint.load import load_newest
from unison.checks.run import check_run
from unison.cli.main import main
from unison.config.dump import dump_toml
from unison.core.errors import FaultError, RunInterrupted
from unison.core.wire import decode_samples

TinyModelDir = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_model_dir: TinyModelDir) -> Path:
    return tiny_model_dir()


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(model, folder)
    return folder


def problems_of(folder: Path) -> list[str]:
    return [problem for finding in check_run(folder) for problem in finding.problems]


PLACES = [
    ("loop.sample", 29),
    ("loop.scored", 3),
    ("loop.micro_batch", 5),
    ("loop.updated", 2),
    ("loop.samples_written", 2),
    ("loop.recorded", 1),
    ("loop.concluded", 3),
    ("checkpoint.before_manifest", 1),
    ("checkpoint.before_pointer", 1),
]
RARE = [("loop.sample", 1), ("loop.scored", 1), ("loop.micro_batch", 1), ("checkpoint.after_claim", 1)]


@pytest.mark.parametrize(
    ("point", "at_pass"), [*PLACES, *(pytest.param(*place, marks=pytest.mark.slow) for place in RARE)]
)
def test_a_stop_anywhere_saves_and_the_run_goes_on_to_the_same_end(
    point: str, at_pass: int, model: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_point(monkeypatch, point, at_pass, "SIGTERM")
    started = time.monotonic()
    with pytest.raises(RunInterrupted):
        train(model, tmp_path / "run")
    assert time.monotonic() - started < 10
    monkeypatch.undo()
    loaded, skipped = load_newest(tmp_path / "run" / "checkpoints")
    assert loaded is not None and not skipped
    assert problems_of(tmp_path / "run") == []
    train(model, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(undisturbed)
    assert problems_of(tmp_path / "run") == []


def test_a_run_stopped_at_every_place_in_turn_ends_the_same(
    model: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for point in ("loop.sample", "loop.scored", "loop.micro_batch", "loop.updated", "loop.sample", "loop.concluded"):
        at_point(monkeypatch, point, 1, "SIGINT")
        with pytest.raises(RunInterrupted):
            train(model, tmp_path / "run")
        assert problems_of(tmp_path / "run") == []
    monkeypatch.undo()
    train(model, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(undisturbed)


@pytest.mark.parametrize("step", [0, 2])
def test_a_stop_during_an_evaluation_leaves_it_to_be_made(
    step: int, model: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unison.observability.progress import Progress

    begun = []

    def stopping(progress: Progress, phase: str, done: int, total: int) -> None:
        if phase == "evaluation" and done == 1:
            begun.append(total)
            if len(begun) == 1 + step // 2:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Progress, "update", stopping)
    with pytest.raises(RunInterrupted):
        train(model, tmp_path / "run")
    monkeypatch.undo()
    loaded, _ = load_newest(tmp_path / "run" / "checkpoints")
    assert loaded is not None and loaded.step == step
    assert not list((tmp_path / "run" / "evaluations").glob(f"step-{step:06d}*"))
    train(model, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(undisturbed)
    assert list((tmp_path / "run" / "evaluations").glob(f"step-{step:06d}*"))


def test_prompts_drawn_right_after_the_stop_are_not_lost(
    model: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unison.assembly import Parts

    draw = Parts.draw
    for place in (1, 2):
        calls = []

        def stopping(parts: Parts, count: int, place: int = place, calls: list[int] = calls) -> Any:
            calls.append(count)
            if len(calls) == place:
                os.kill(os.getpid(), signal.SIGTERM)
            return draw(parts, count)

        monkeypatch.setattr(Parts, "draw", stopping)
        folder = tmp_path / str(place)
        with pytest.raises(RunInterrupted):
            train(model, folder)
        monkeypatch.undo()
        loaded, _ = load_newest(folder / "checkpoints")
        assert loaded is not None
        pending = decode_samples(loaded.blobs["pending"])
        assert len({sample.group_id for sample in pending}) == sum(loaded.documents["state"]["pending_draws"])
        assert problems_of(folder) == []
        train(model, folder)
        assert outcome(folder) == outcome(undisturbed)


def test_a_stop_between_a_filter_and_the_prompts_it_asks_for_loses_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import unison.loop

    settings = {"reward": {"function": "tests.run.rewards:alike"}, "trainer": {"steps": 1}}
    train(model, tmp_path / "whole", **settings)
    discarded_groups, told = unison.loop.discarded_groups, []

    def stopping(*arguments: Any) -> Any:
        if not told:
            told.append(os.kill(os.getpid(), signal.SIGTERM))
        return discarded_groups(*arguments)

    monkeypatch.setattr(unison.loop, "discarded_groups", stopping)
    with pytest.raises(RunInterrupted):
        train(model, tmp_path / "run", **settings)
    monkeypatch.undo()
    loaded, _ = load_newest(tmp_path / "run" / "checkpoints")
    assert loaded is not None and loaded.documents["state"]["pending_draws"] == [3, 3]
    assert problems_of(tmp_path / "run") == []
    train(model, tmp_path / "run", **settings)
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == (tmp_path / "whole" / "ledger.jsonl").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_slow_rewards_run_in_their_processes_ends_the_command_with_its_code(
    number: signal.Signals, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    reward = {"function": "tests.run.rewards:slow", "isolation": "process", "workers": 1}
    config = make_config(model, folder, reward=reward, eval={"problems": 0}, trainer={"steps": 2})
    (tmp_path / "config.toml").write_text(dump_toml(config))

    def stop_in_the_first_call() -> None:
        # Scoring has begun where the rollout's samples are there and nothing is written of them.
        deadline = time.monotonic() + 30
        while not (folder / "events.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop_in_the_first_call)
    thread.start()
    assert main(["train", str(tmp_path / "config.toml")]) == 128 + number
    thread.join()
    output = capsys.readouterr().out
    assert "interrupted: step 0 is saved in" in output and f"go on with: unison train {folder}" in output
    assert main(["train", str(folder)]) == 0
    assert "with 12 samples of step 1 drawn or begun" in capsys.readouterr().out
    whole = run(model, tmp_path / "whole", eval={"problems": 0}, trainer={"steps": 2}).weights_digest
    assert outcome(folder)[0] == whole


def test_a_second_signal_ends_the_run_at_once_and_it_goes_on_from_what_was_saved(
    model: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import unison.loop

    def twice(point: str) -> None:
        if point == "loop.updated":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(unison.loop, "fault_point", twice)
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path / "run")
    monkeypatch.undo()
    train(model, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(undisturbed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_every_prompt_is_accounted_for_once_over_random_schedules_of_failures(
    seed: int, model: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, history = random.Random(seed), []
    for _ in range(5):
        point, most = draw.choice([(name, 2 * at_pass) for name, at_pass in PLACES if name.startswith("loop.")])
        action = draw.choice(["cut off", "error", "SIGTERM"])
        history.append((point, at_pass := draw.randint(1, most), action))
        at_point(monkeypatch, point, at_pass, action)
        try:
            train(model, tmp_path / "run")
        except (CutOff, FaultError, RunInterrupted):
            assert problems_of(tmp_path / "run") == [], history
        else:
            break
    monkeypatch.undo()
    train(model, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(undisturbed), history
    assert problems_of(tmp_path / "run") == [], history


def test_rewards_drawn_at_random_are_the_same_after_a_stop_between_steps(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "reward": {"function": "tests.run.rewards:by_chance", "isolation": "none"},
        "eval": {"problems": 0},
        "rollout": {"filter": None, "refill": 0},
    }
    random.seed(7)
    train(model, tmp_path / "whole", **settings)
    random.seed(7)
    at_point(monkeypatch, "loop.concluded", 2, "SIGTERM")
    with pytest.raises(RunInterrupted):
        train(model, tmp_path / "run", **settings)
    monkeypatch.undo()
    random.seed(99)
    train(model, tmp_path / "run", **settings)
    assert outcome(tmp_path / "run")[:2] == outcome(tmp_path / "whole")[:2]


def test_groups_that_are_all_filtered_leave_the_weights_and_refills_end(model: Path, tmp_path: Path) -> None:
    train(
        model,
        tmp_path / "run",
        reward={"function": "tests.run.rewards:alike_from_step_two"},
        rollout={"filter": "no_contrast", "refill": 3},
        trainer={"steps": 3},
        eval={"problems": 0},
    )
    first, second, third = (json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines())
    assert first["draws"] == [3] and second["draws"] == third["draws"] == [3, 3, 3, 3]
    assert first["weights_digest"] == second["weights_digest"] == third["weights_digest"] != first["base_digest"]
    assert (second["weights_version"], second["optimizer_steps"], third["optimizer_steps"]) == (1, 1, 1)
    for entry in (second, third):
        assert len(entry["groups"]) == 12 and entry["filtered"] == list(entry["groups"])
        assert {group["reason"] for group in entry["groups"].values()} == {"all rewards alike"}
    metrics = metrics_of(tmp_path / "run")
    assert [step["rollout/filtered_groups"] for step in metrics] == [0, 12, 12]
    keys = [key for entry in (first, second, third) for key in entry["groups"]]
    assert len(keys) == len(set(keys)) == 27
    assert problems_of(tmp_path / "run") == []


def test_a_refill_draws_as_many_prompts_as_the_filter_took_and_all_are_accounted_for(
    undisturbed: Path,
) -> None:
    for line in (undisturbed / "ledger.jsonl").read_text().splitlines():
        entry = json.loads(line)
        draws, filtered = entry["draws"], entry["filtered"]
        assert draws[0] == 3 and len(draws) <= 2 and sum(draws) == len(entry["groups"])
        num_filtered_first = sum(key in filtered for key in list(entry["groups"])[:3])
        assert draws[1:] == ([num_filtered_first] if num_filtered_first else [])
        assert set(filtered) == {key for key, group in entry["groups"].items() if group["outcome"] == "discarded"}
