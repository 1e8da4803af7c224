from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import unison
from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.data.fingerprint import source_digest
from unison.data.gym import EVAL_OFFSET, GymWorker, open_gym, shared_worker
from unison.data.gym_worker import REFUSED
from unison.data.source import PromptRow, Split, load_source

reasoning_gym: Any = pytest.importorskip("reasoning_gym")
ORDER_OF_SETS = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Data sets whose rows depend on the hash seed of the process."""


def opened(split: Split = "train", **options: Any) -> Any:
    return load_source(DataConfig(source="reasoning_gym", options=options), split, 0)


def test_rows_are_the_packages_own(tmp_path: Path) -> None:
    source = opened(dataset="chain_sum", size=20, seed=42, max_terms=4)
    theirs = reasoning_gym.create_dataset("chain_sum", size=20, seed=42, max_terms=4)
    for index in (19, 0, 7):
        row = source[index]
        assert row.prompt == theirs[index]["question"]
        assert row.row_id == f"chain_sum:42:{index}"
        assert row.label["dataset"] == row.metadata["dataset"] == "chain_sum"
        entry = row.label["entry"]
        assert (entry["answer"], set(entry)) == (theirs[index]["answer"], {"question", "answer", "metadata"})
        assert theirs.score_answer(entry["answer"], entry) == 1.0
    with pytest.raises(IndexError):
        source[20]


def test_several_data_sets_take_turns() -> None:
    source = opened(dataset="chain_sum, gcd,lcm", size=8)
    assert [source[i].metadata["dataset"] for i in range(8)] == ["chain_sum", "gcd", "lcm"] * 2 + ["chain_sum", "gcd"]
    assert len({source[i].row_id for i in range(8)}) == 8


def test_held_out_rows_have_seeds_that_training_rows_never_reach() -> None:
    train, held_out = opened(dataset="gcd", seed=3), opened("eval", dataset="gcd", seed=3)
    assert (train[0].row_id, held_out[0].row_id) == ("gcd:3:0", f"gcd:{3 + EVAL_OFFSET}:0")
    assert {train[i].prompt for i in range(50)}.isdisjoint({held_out[i].prompt for i in range(50)})


def test_the_seed_comes_from_the_run_where_none_is_given() -> None:
    config = DataConfig(source="reasoning_gym", options={"dataset": "gcd"})
    first, again, other = (open_gym(config, "train", run) for run in (1, 1, 2))
    assert first[5] == again[5] != other[5]
    assert source_digest(first) == source_digest(again) != source_digest(other)


def test_rows_do_not_depend_on_the_process() -> None:
    program = (
        "import json; from unison.config.schema import DataConfig; from unison.data.gym import open_gym\n"
        f"options = {{'dataset': {','.join(ORDER_OF_SETS)!r}, 'size': 12}}\n"
        "source = open_gym(DataConfig(source='reasoning_gym', options=options), 'train', 7)\n"
        "print(json.dumps([source[i].label for i in range(12)]))"
    )
    package = str(Path(unison.__file__).parent.parent)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": package},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "dataset is missing"),
        ({"dataset": "chain_sums"}, "'chain_sums' is unknown to reasoning_gym; did you mean chain_sum"),
        ({"dataset": "composite"}, "'composite' cannot be used: it joins other data sets"),
        ({"dataset": "gcd,gcd"}, "names 'gcd' twice"),
        ({"dataset": "gcd", "size": 0}, "size=0 must be a whole number"),
        ({"dataset": "gcd", "seed": -1}, "seed=-1 must be"),
        ({"dataset": "gcd,lcm", "size": 1}, "size=1 leaves some of the 2"),
        ({"dataset": "gcd,lcm", "min_value": 2}, "min_value would be given to each of 2"),
        ({"dataset": "gcd", "min_valeu": 2}, "min_valeu is unknown to reasoning_gym's gcd; did you mean min_value"),
        ({"dataset": "gcd", "min_value": 2.5}, "min_value=2.5 must be a int"),
        ({"dataset": "gcd", "min_value": 9, "max_value": 3}, "do not suit reasoning_gym's gcd"),
        ({"dataset": "basic_arithmetic", "operators": "+"}, "operators='\\+' must be a list as JSON text"),
        ({"dataset": "arc_agi", "board_format_opts": "x"}, "BoardFormattingOptions, which no option can hold"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        opened(**options)


def test_lists_are_given_as_json_text() -> None:
    source = opened(dataset="basic_arithmetic", operators='["+"]', allow_parentheses=False, size=10)
    assert all(not set("-*/") & set(source[i].label["entry"]["metadata"]["expression"]) for i in range(10))


@pytest.mark.parametrize("name", ["train", "prompt_key", "layout"])
def test_settings_of_files_are_refused(name: str) -> None:
    value: Any = "verl" if name == "layout" else "x"
    with pytest.raises(ConfigError, match=f"data.{name}='{value}' has no effect"):
        load_source(DataConfig(source="reasoning_gym", options={"dataset": "gcd"}, **{name: value}), "train", 0)


def test_a_process_that_hangs_or_dies_is_an_error_and_the_next_one_works() -> None:
    impatient = GymWorker(deadline_s=0.0)
    with pytest.raises(DataError, match="took over 0 s to names"):
        impatient.ask("names")
    first = shared_worker()
    source = opened(dataset="gcd", size=3)
    first.close()
    with pytest.raises(DataError, match="ended"):
        source[1]
    assert shared_worker() is not first
    assert isinstance(opened(dataset="gcd", size=3)[1], PromptRow)


def test_the_process_ends_with_the_one_that_asks_even_if_that_is_killed() -> None:
    program = (
        "import time; from unison.data.gym import GymWorker; worker = GymWorker()\n"
        "print(worker._process.pid, flush=True); time.sleep(60)"
    )
    package = str(Path(unison.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": package}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    status = Path(f"/proc/{worker}/stat")
    end = time.monotonic() + 10
    # An ended process that nobody has waited for is still listed, as Z.
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, "the worker goes on"
        time.sleep(0.05)


def test_what_a_data_set_prints_reaches_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    assert opened(dataset="bf", size=5)[0].prompt
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_every_data_set_of_the_package_gives_the_same_rows_in_any_order_and_process() -> None:
    names = set(reasoning_gym.factory.DATASETS)
    assert set(REFUSED) < names
    first, second = GymWorker(), GymWorker()
    assert set(first.ask("names")) == names - set(REFUSED)
    wrong = []
    for name in sorted(names - set(REFUSED)):
        rows = []
        for worker, order in ((first, (0, 3)), (second, (3, 0))):
            handle = worker.ask("open", name=name, seed=5, size=8, options={})
            rows.append({index: worker.ask("row", handle=handle, index=index) for index in order})
        if rows[0] != rows[1] or rows[0][0] == rows[0][3]:
            wrong.append(name)
    assert not wrong
