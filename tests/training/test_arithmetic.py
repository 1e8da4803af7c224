from __future__ import annotations

from typing import Any

import msgspec
import pytest

from unison.config.schema import TrainConfig
from unison.core.errors import ConfigError
from unison.training.arithmetic import BatchArithmetic, check_arithmetic


def config(**sections: dict[str, Any]) -> TrainConfig:
    return msgspec.convert({"model": {"path": "m"}, **sections}, TrainConfig)


def test_the_defaults_fit_together() -> None:
    check_arithmetic(config())


def test_ordinary_batches_are_accepted() -> None:
    check_arithmetic(config(rollout={"prompts_per_step": 8, "samples_per_prompt": 4}))
    check_arithmetic(config(rollout={"top_p": 0.9, "top_k": 20, "temperature": 0, "allow_filtered_sampling": True}))
    check_arithmetic(config(algorithm={"name": "mine:f"}, rollout={"samples_per_prompt": 1}))
    check_arithmetic(config(trainer={"steps": 0}))
    check_arithmetic(config(trainer={"schedule": "cosine", "min_learning_rate": 1e-7, "warmup_steps": 19}))
    check_arithmetic(config(engine={"kv_tokens": 129}, trainer={"micro_batch_tokens": 129}))


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        (
            {"trainer": {"micro_batch_tokens": 128}},
            ["trainer.micro_batch_tokens=128", "rollout.max_new_tokens=128", "at least 129"],
        ),
        ({"engine": {"max_batch_tokens": 63}}, ["engine.max_batch_tokens=63", "engine.max_running=64"]),
        ({"engine": {"kv_tokens": 128}}, ["engine.kv_tokens=128", "rollout.max_new_tokens=128", "use 0"]),
        ({"trainer": {"warmup_steps": 21}}, ["trainer.warmup_steps=21", "trainer.steps=20"]),
        (
            {"trainer": {"schedule": "linear", "min_learning_rate": 1e-3}},
            ["trainer.min_learning_rate=0.001", "trainer.learning_rate=1e-06"],
        ),
        (
            {"trainer": {"schedule": "cosine", "warmup_steps": 20}},
            ["trainer.schedule='cosine' has no effect", "trainer.warmup_steps=20"],
        ),
        ({"critic": {"value_clip": 0.5}}, ["critic.value_clip=0.5", "one optimizer step per rollout"]),
        ({"reference": {"update": "refreshed"}}, ["reference.every=1", "one optimizer step per rollout"]),
        (
            {"algorithm": {"clip_high": 0.5}, "correction": {"name": "tis"}},
            ["algorithm.clip_high=0.5", "trainer's own log-probs"],
        ),
        ({"trainer": {"min_learning_rate": 1e-7}}, ["trainer.min_learning_rate=1e-07", "schedule='constant'"]),
        ({"rollout": {"top_p": 0.9}}, ["rollout.top_p=0.9", "rollout.allow_filtered_sampling"]),
        ({"rollout": {"top_k": 20}}, ["rollout.top_k=20", "use -1"]),
        ({"rollout": {"temperature": 0}}, ["rollout.temperature=0", "a positive temperature"]),
        ({"trainer": {"max_grad_norm": float("inf")}}, ["trainer.max_grad_norm=inf", "finite"]),
        ({"algorithm": {"kl_coef": float("inf")}}, ["algorithm.kl_coef=inf", "finite"]),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_values_and_fix(sections: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_arithmetic(config(**sections))
    for words in named:
        assert words in str(caught.value)
    assert str(caught.value).count("\n") == 1


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_arithmetic(config(rollout={"top_p": 0.9, "top_k": 5}, trainer={"warmup_steps": 30}))
    assert str(caught.value).count("\n- ") == 3


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"samples_per_prompt": 0}},
        {"rollout": {"prompts_per_step": 0}},
        {"trainer": {"learning_rate": -1}},
        {"trainer": {"learning_rate": float("nan")}},
        {"trainer": {"globl_batch_size": 64}},
    ],
)
def test_values_outside_their_range_and_unknown_keys_never_become_a_config(sections: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        config(**sections)


def test_counts_multiply_out() -> None:
    sums = BatchArithmetic.from_config(
        config(
            rollout={"prompts_per_step": 16, "samples_per_prompt": 8, "max_new_tokens": 100},
            data={"max_prompt_tokens": 200},
            trainer={"steps": 20, "warmup_steps": 2, "micro_batch_tokens": 2048},
        )
    )
    assert sums.samples_per_step == 128
    assert sums.max_row_tokens == 300
    assert sums.max_tokens_per_step == 38_400
    assert sums.max_response_tokens_per_step == 12_800
    assert sums.micro_batches_estimate == 7
    text = "\n".join(sums.describe())
    for words in (
        "16 a step x 20 steps = 320",
        "16 prompts x 8 = 128 a step, 2,560 in all",
        "200 prompt + 100 response = 300 tokens",
        "38,400 a step, of which 12,800 responses",
        "of 2,048 tokens; about 7 a step",
        "1 pass x 1 mini-batch of 128 samples = 1 step per rollout, 20 in all, the first 2 warming up",
    ):
        assert words in text
    assert "gets one of its own" not in text


def test_rows_over_the_micro_batch_budget_are_announced() -> None:
    assert any("a longer row gets one of its own" in line for line in BatchArithmetic.from_config(config()).describe())
