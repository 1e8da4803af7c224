from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import TinyModelDir
from tests.evaluation.runs import make_run, masters
from unison.checkpoint.save import Saver
from unison.core.errors import CheckpointError, ConfigError, ModelError
from unison.evaluation.run_model import RunModel, decoder_of, find_run_model, load_run_weights


def found(reference: object) -> RunModel:
    run_model = find_run_model(str(reference))
    assert run_model is not None
    return run_model


def test_a_run_means_its_exported_model_and_a_step_the_masters_of_that_checkpoint(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    base = tiny_model_dir()
    run = make_run(tmp_path / "run", base)
    exported, first = found(run), found(f"{run}@1")
    assert (exported.step, exported.trained_steps, exported.folder) == (None, 2, run / "model")
    assert (first.step, first.trained_steps, first.folder) == (1, 1, base)
    for name, tensor in masters(base, 1).items():
        assert torch.equal(first.parameters()[name], tensor)
    for name, tensor in masters(base, 2).items():
        assert torch.equal(exported.parameters()[name], tensor.bfloat16())
    assert found(f"{run}@000001").step == 1


def test_without_an_exported_model_the_newest_checkpoint_is_meant(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_model_dir(), steps=(2, 9, 10), exported=False)
    assert found(run).step == 10


def test_what_is_no_run_is_left_to_others(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    assert find_run_model(str(tiny_model_dir())) is None
    assert find_run_model("smollm2-135m") is None
    assert find_run_model("no-such@name") is None
    assert find_run_model("no-such@12") is None
    with pytest.raises(ModelError, match=r"no run folder.*step 3"):
        find_run_model(f"{tiny_model_dir()}@3")


def test_a_folder_whose_own_name_has_an_at_is_taken_as_it_is(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run@1", tiny_model_dir())
    assert found(run).step is None and found(f"{run}@2").step == 2


def test_a_missing_step_names_those_there_are(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_model_dir())
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5.*there are steps 1, 2"):
        load_run_weights(run, 5)


def test_a_run_with_nothing_trained_says_so(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_model_dir(), steps=(), exported=False)
    with pytest.raises(ModelError, match="no trained model"):
        find_run_model(str(run))


def test_a_damaged_checkpoint_config_or_summary_is_named(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_model_dir())
    shard = next((run / "checkpoints" / "step-000001").glob("weights-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="step 1 is damaged"):
        found(f"{run}@1").parameters()
    (run / "summary.json").write_text("[")
    with pytest.raises(ModelError, match=r"summary\.json cannot be read"):
        _ = found(run).trained_steps
    (run / "config.toml").write_text("[")
    with pytest.raises(ConfigError, match=r"config\.toml"):
        find_run_model(str(run))


def test_a_checkpoint_without_the_group_of_weights_is_refused(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_model_dir())
    Saver(run / "checkpoints").save(3, {"other": {"x": torch.ones(2)}}, {}, {})
    with pytest.raises(ModelError, match="'weights', but other"):
        load_run_weights(run, 3)


def test_weights_that_do_not_fit_the_model_are_refused(tiny_model_dir: TinyModelDir) -> None:
    base = tiny_model_dir()
    weights = masters(base, 1)
    with pytest.raises(ModelError, match=r"norm\.weight is on one side only"):
        decoder_of(base, {name: t for name, t in weights.items() if name != "norm.weight"}, torch.float32)
    with pytest.raises(ModelError, match=r"norm\.weight has shape \[3\]"):
        decoder_of(base, {**weights, "norm.weight": torch.ones(3)}, torch.float32)
    with pytest.raises(ModelError, match=r"norm\.weight holds a value that float16"):
        decoder_of(base, {**weights, "norm.weight": weights["norm.weight"] + 1e6}, torch.float16)


def test_a_model_folder_with_a_config_toml_beside_it_is_a_model(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model_dir(), tmp_path / "model"))
    (folder / "config.toml").write_text("")
    assert find_run_model(str(folder)) is None


def test_the_dtype_is_the_one_the_run_computed_in(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_model_dir())
    assert found(f"{run}@1").compute_dtype() == torch.bfloat16
    for odd in ("{}", json.dumps({"numerics": {"dtype": "int4"}}), json.dumps({"numerics": 3})):
        (run / "environment.json").write_text(odd)
        assert found(f"{run}@1").compute_dtype() == torch.float32
