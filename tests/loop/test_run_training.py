from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from unison.config.load import load_config
from unison.config.schema import TrainConfig
from unison.core.errors import ConfigError, DataError, ModelError, NumericsError, RewardError
from unison.loop import RunResult, run_training

TinyModelDir = Callable[..., Path]


def make_config(folder: Path, run_dir: Path, **sections: dict[str, Any]) -> TrainConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "dtype": "float32", "numerics": "exact"},
        "run": {"dir": str(run_dir), "seed": 3, "threads": 1},
        "data": {"source": "sums", "options": {"max_operand": 6, "eval_size": 5}},
        "reward": {"function": "tests.loop.rewards:low_ids"},
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 6},
        "engine": {"kv_tokens": 4096},
        "algorithm": {"kl_coef": 0.01, "truncated": "keep"},
        "trainer": {"steps": 3, "learning_rate": 1e-3, "micro_batch_tokens": 128},
        "eval": {"problems": 5},
        "log": {"rollouts_per_step": 4, "progress": "off", "export": False, "plot": False},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return msgspec.convert(base, TrainConfig)


def run(folder: Path, run_dir: Path, **sections: dict[str, Any]) -> RunResult:
    return run_training(make_config(folder, run_dir, **sections))


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_reports_zero_mismatch_and_a_ratio_of_one_at_every_step(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    result = run(tiny_model_dir(), tmp_path / "run", trainer={"steps": 4}, model={"dtype": "bfloat16"})
    baseline, *steps = metrics_of(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert baseline["step"] == 0 and "eval/accuracy" in baseline and "rollout/reward_mean" not in baseline
    for step in steps:
        assert step["rollout/logp_diff_max"] == 0
        assert step["train/ratio_max"] == 1 and step["train/ratio_mean"] == 1
        assert step["weights/version"] == step["step"]
        assert step["rollout/tokens"] == step["train/trained_tokens"]
    assert steps[0]["train/kl"] == 0
    assert steps[1]["train/kl"] > 0
    for name in ("eval/accuracy", "eval/accuracy_greedy", "eval/accuracy_ci_low", "eval/accuracy_ci_high"):
        assert name in steps[-1]
    assert "eval/accuracy" not in steps[0]
    assert set(result.evaluations) == {0, 4}


def test_the_same_config_gives_the_same_digest_whatever_the_engine_settings(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    engines: list[dict[str, Any]] = [
        {},
        {},
        {"page_size": 128, "prefill_chunk": 3, "max_running": 2},
        {"page_size": 64, "max_batch_tokens": 16, "max_running": 5, "kv_tokens": 256, "poison_freed_pages": True},
    ]
    digests = [
        run(tiny_model_dir(), tmp_path / str(i), engine={"kv_tokens": 4096, **settings}).weights_digest
        for i, settings in enumerate(engines)
    ]
    assert len(set(digests)) == 1
    other_seed = run(tiny_model_dir(), tmp_path / "seed", run={"seed": 4}).weights_digest
    assert other_seed != digests[0]


def test_the_written_config_runs_again_to_the_same_digest(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    first = run(tiny_model_dir(), tmp_path / "first")
    loaded = load_config([tmp_path / "first" / "config.toml"], ["--run.dir", str(tmp_path / "second")])
    assert run_training(loaded.config).weights_digest == first.weights_digest


def test_reward_rises_on_a_reward_that_a_random_model_can_learn(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    run(
        tiny_model_dir(),
        tmp_path / "run",
        trainer={"steps": 12, "learning_rate": 5e-3},
        rollout={"prompts_per_step": 4, "samples_per_prompt": 8},
        algorithm={"kl_coef": 0.0},
        eval={"problems": 0},
    )
    rewards = [step["rollout/reward_mean"] for step in metrics_of(tmp_path / "run")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_a_raising_reward_makes_samples_unscorable_and_training_goes_on(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    run(
        tiny_model_dir(),
        tmp_path / "run",
        reward={"function": "tests.loop.rewards:raises_on_copy_one"},
        eval={"problems": 0},
    )
    for step in metrics_of(tmp_path / "run"):
        assert step["rollout/unscorable"] == 3
        assert step["train/trained_tokens"] < step["rollout/tokens"]
    records = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    failed = [record for record in records if record["status"] == "unscorable"]
    assert failed and all("no opinion can be formed" in record["error"] for record in failed)
    assert all(record["advantage"] == 0 and record["reward"] is None for record in failed)


def test_a_reward_that_never_scores_stops_the_run_with_its_reason(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    for i, problems in enumerate((5, 0)):
        with pytest.raises(RewardError, match=r"none of the first.*the grader is broken"):
            run(
                tiny_model_dir(),
                tmp_path / str(i),
                reward={"function": "tests.loop.rewards:always_raises"},
                eval={"problems": problems},
            )


def test_a_step_that_could_not_be_scored_leaves_the_weights_alone_and_says_so(
    tiny_model_dir: TinyModelDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny_model_dir(), tmp_path / "run", reward={"function": "tests.loop.rewards:breaks_after_a_while"})
    _, first, second, third = metrics_of(tmp_path / "run")
    assert [step["weights/version"] for step in (first, second, third)] == [1, 1, 1]
    assert second["rollout/unscorable"] == 12
    assert "no token was left to train on" in capsys.readouterr().out


def test_a_prompt_over_the_limit_stops_the_run_before_it_starts(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="max_prompt_tokens"):
        run(
            tiny_model_dir(),
            tmp_path / "run",
            data={"source": "sums", "options": {"max_operand": 6, "eval_size": 5}, "max_prompt_tokens": 5},
        )
    assert not (tmp_path / "run").exists()


def test_the_run_folder_holds_what_it_promises(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    result = run(tiny_model_dir(), tmp_path / "run", log={"export": True, "plot": True, "progress": "off"})
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"README.md", "config.toml", "environment.json", "metrics.jsonl", "rollouts.jsonl"} <= names
    assert {"summary.json", "plot.png", "model"} <= names
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["weights_digest"] == result.weights_digest
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["numerics"]["path"] == "exact" and environment["numerics"]["threads"] == 1
    record = json.loads((tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()[0])
    assert len(record["response_ids"]) == len(record["logprobs"]) == len(record["weight_versions"])


def test_the_exported_model_is_the_trained_one_and_transformers_loads_it(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from unison.models.loading import load_model
    from unison.models.names import published_tensors
    from unison.weights.checksum import tensors_digest

    result = run(tiny_model_dir(), tmp_path / "run", log={"export": True, "progress": "off", "plot": False})
    exported = load_model(tmp_path / "run" / "model", torch.float32)
    assert tensors_digest(published_tensors(exported)) == result.weights_digest
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert torch.equal(theirs.get_input_embeddings().weight.detach(), exported.embed.detach())
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").eos_token_id == 258


def test_a_broken_promise_stops_the_run(
    tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import unison.training.prepare

    honest = unison.training.prepare.build_rows

    def shifted(*arguments: Any) -> Any:
        rows = honest(*arguments)
        rows[0].rollout_logprobs[-1] -= 1e-6
        return rows

    monkeypatch.setattr(unison.training.prepare, "build_rows", shifted)
    with pytest.raises(NumericsError, match="differ by up to"):
        run(tiny_model_dir(), tmp_path / "run")


def test_fast_numerics_measures_the_mismatch_and_goes_on(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    run(tiny_model_dir(), tmp_path / "run", model={"numerics": "fast"})
    differences = [step["rollout/logp_diff_max"] for step in metrics_of(tmp_path / "run")[1:]]
    assert all(0 <= value < 1 for value in differences)
    assert any(value > 0 for value in differences)


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"reward": {"function": "tests.loop.rewards:absent"}}, RewardError, "absent"),
        ({"algorithm": {"name": "grpoo"}}, ConfigError, "grpo"),
        ({"data": {"source": "jsonl", "options": {}}}, DataError, "data.train"),
        ({"rollout": {"samples_per_prompt": 1}}, ConfigError, "samples_per_prompt"),
        ({"rollout": {"top_p": 0.5}}, ConfigError, "top_p"),
    ],
)
def test_what_cannot_work_is_refused_before_a_folder_is_made(
    tiny_model_dir: TinyModelDir,
    tmp_path: Path,
    sections: dict[str, dict[str, Any]],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises((error, ConfigError), match=message):
        run(tiny_model_dir(), tmp_path / "run", **sections)
    assert not (tmp_path / "run").exists()


def test_prompts_over_the_context_are_refused_before_the_run_starts(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_text(
        '{"prompt": "ok", "label": "1"}\n' + json.dumps({"prompt": "x" * 2050, "label": "2"})
    )
    with pytest.raises(ConfigError, match="no room in the model's context of 2048"):
        run(
            tiny_model_dir(),
            tmp_path / "run",
            data={"source": "jsonl", "train": str(tmp_path / "long.jsonl"), "options": {}},
            eval={"problems": 0},
        )
    with pytest.raises(ConfigError, match=r"kv_tokens=16 cannot hold the longest prompt"):
        run(tiny_model_dir(), tmp_path / "run", engine={"kv_tokens": 16})
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        run(tiny_model_dir(), tmp_path / "run", rollout={"stop_token_ids": [99999]})
    assert not (tmp_path / "run").exists()


def test_a_failed_export_leaves_everything_else_and_says_so(
    tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unison.models.saving.save_file", full_disk)
    with pytest.raises(ModelError, match="No space left"):
        run(tiny_model_dir(), tmp_path / "run", log={"export": True, "progress": "off", "plot": False})
    assert (tmp_path / "run" / "summary.json").exists()
    assert not list((tmp_path / "run").glob("model*"))
