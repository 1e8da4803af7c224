"""Several optimizer steps per rollout, and that none of them depends on how its samples are cut or ordered."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.make_samples import make_sample
from tests.training.make_trainer import columns_of, make_trainer
from tests.training.test_trainer import gradients, relative_difference
from unison.algorithms.recipes import RECIPES
from unison.core.errors import ConfigError
from unison.core.records import Sample
from unison.training.mini_batches import cut_mini_batches, shuffle_seed
from unison.training.trainer import Trainer
from unison.weights.checksum import tensors_digest

TinyModelDir = Callable[..., Path]


def group(name: str, rewards: list[float], start: int) -> list[Sample]:
    """Ragged samples of one prompt, with log-probs that are not the model's, some with a tool's answer inside."""
    generator = torch.Generator().manual_seed(start)
    samples = []
    for k, reward in enumerate(rewards):
        length = 1 + int(torch.randint(1, 9, (1,), generator=generator))
        ids = torch.randint(0, 512, (length,), generator=generator).tolist()
        logprobs = (-6 - torch.rand(length, generator=generator)).tolist()
        sample = make_sample([start, start + 1], ids, logprobs=logprobs, reward=reward, group=name, name=f"{name}/{k}")
        if k % 2:
            sample.append_world([7, 8, 9], "tool")
            sample.append_sampled([11, 12], [-6.5, -5.5], [0, 0])
        samples.append(sample)
    return samples


def rollout() -> list[Sample]:
    return [
        *group("a", [1.0, 0.0, 0.5], 20),
        *group("b", [0.0, 1.0, 0.0], 60),
        *group("c", [1.0, 0.25, 0.0], 90),
        *group("d", [0.0, 0.0, 1.0], 130),
    ]


def digest(trainer: Trainer) -> str:
    return tensors_digest(trainer.state_tensors()["weights"])


def test_mini_batches_are_single_steps_taken_one_after_the_other(tiny_model_dir: TinyModelDir) -> None:
    samples = rollout()
    whole = make_trainer(tiny_model_dir(), learning_rate=1e-3, mini_batches=2, epochs=2, samples=(4, 3))
    totals = whole.step(columns_of(samples))
    single = make_trainer(tiny_model_dir(), learning_rate=1e-3)
    losses, norms = [], []
    for _ in range(2):
        for half in (samples[:6], samples[6:]):
            found = single.step(columns_of(half))
            losses.append(found.loss)
            norms.append(found.grad_norm)
    assert totals.num_optimizer_steps == whole.num_steps == single.num_steps == 4
    assert digest(whole) == digest(single)
    assert totals.loss == sum(losses) / 4 and totals.grad_norm == sum(norms) / 4
    assert totals.metrics()["train/grad_norm_max"] == max(norms)


def test_only_the_first_step_is_compared_with_the_rollout(tiny_model_dir: TinyModelDir) -> None:
    columns = columns_of(rollout())
    totals = make_trainer(tiny_model_dir(), learning_rate=1e-2, mini_batches=4, samples=(4, 3)).step(columns)
    assert totals.num_compared_tokens < totals.num_trained_tokens
    # Recomputed before the first update, all of them are.
    columns = columns_of(rollout())
    trainer = make_trainer(
        tiny_model_dir(), learning_rate=1e-2, mini_batches=4, samples=(4, 3), correction={"name": "recompute"}
    )
    totals = trainer.step(columns)
    assert totals.num_compared_tokens == totals.num_trained_tokens
    assert columns.old_logprobs_T is columns.trainer_logprobs_T
    first = make_trainer(tiny_model_dir(), learning_rate=0.0, samples=(4, 3), correction={"name": "recompute"})
    assert first.step(columns_of(rollout())).ratio_max == 1.0


def test_the_schedule_counts_optimizer_steps(tiny_model_dir: TinyModelDir) -> None:
    trainer = make_trainer(
        tiny_model_dir(), learning_rate=2e-6, schedule="linear", steps=10, mini_batches=4, samples=(4, 3)
    )
    for step in range(1, 4):
        trainer.step(columns_of(rollout()), step)
    assert trainer.num_steps == 12
    saved = {group: {n: t.clone() for n, t in members.items()} for group, members in trainer.state_tensors().items()}
    resumed = make_trainer(
        tiny_model_dir(), learning_rate=2e-6, schedule="linear", steps=10, mini_batches=4, samples=(4, 3)
    )
    resumed.load_state(saved, 12)
    assert resumed.step(columns_of(rollout()), 4).learning_rate == pytest.approx(1.4e-6, rel=1e-12)


def test_an_order_is_a_function_of_seed_step_and_pass_alone() -> None:
    rows = list(range(3, 27))
    cut = cut_mini_batches(rows, 4, seed=shuffle_seed(5, 2, 0))
    assert cut == cut_mini_batches(rows, 4, seed=shuffle_seed(5, 2, 0))
    assert sorted(i for part in cut for i in part) == rows and {len(part) for part in cut} == {6}
    assert cut != cut_mini_batches(rows, 4, seed=shuffle_seed(5, 2, 1))
    assert cut_mini_batches(rows, 4, seed=None) == [rows[i : i + 6] for i in range(0, 24, 6)]
    assert cut_mini_batches([4, 9], 5, seed=None) == [[4], [9]]
    assert cut_mini_batches([], 5, seed=1) == []


SETTINGS: list[dict[str, Any]] = [
    *({"algorithm": {"name": name}} for name in RECIPES if name != "remax"),
    *(
        {"algorithm": {"aggregation": name}}
        for name in (
            "token_sum",
            "sequence_mean_token_sum",
            "sequence_mean_token_mean",
            "trajectory_mean",
            "prompt_mean",
        )
    ),
    {"algorithm": {"name": "ppo", "kl_coef": 0.1}},
    {"algorithm": {"name": "rloo", "kl_coef": 0.1}},
    {"algorithm": {"kl_coef": 0.1, "kl": "k1", "kl_ratio_weighted": True, "entropy_coef": 0.05}},
    *({"correction": {"name": name}} for name in ("tis", "icepop", "mis", "sequence_tis", "sequence_mask")),
    {"correction": {"name": "tis", "normalize": True, "reject": "geometric", "reject_upper": 2.0}},
    {"correction": {"name": "icepop", "denominator": "reduced"}},
]


def name_of(settings: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for part in settings.values() for key, value in part.items())


@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_loss_and_gradient_do_not_depend_on_cut_or_order(
    tiny_model_dir: TinyModelDir, settings: dict[str, Any]
) -> None:
    samples = rollout()
    found = []
    for budget, order in ((4, 1), (40, 1), (4096, 1), (4096, -1)):
        trainer = make_trainer(
            tiny_model_dir(), learning_rate=0.0, max_grad_norm=0.0, micro_batch_tokens=max(budget, 8), **settings
        )
        totals = trainer.step(columns_of(samples[::order]))
        critic = trainer.critic.learner.masters.gradients() if trainer.critic is not None else []
        found.append((totals.loss, gradients(trainer), totals.num_micro_batches, [g.clone() for g in critic]))
    assert len({count for _, _, count, _ in found}) > 1
    loss, gradient, _, critic = found[0]
    assert any(float(g.abs().max()) > 0 for g in gradient.values())
    for other_loss, other, _, other_critic in found[1:]:
        assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert relative_difference(other, gradient) < 1e-5
        if critic:
            one, two = dict(enumerate(other_critic)), dict(enumerate(critic))
            assert relative_difference(one, two) < 1e-5  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_observation_tokens_reach_neither_loss_nor_gradient(
    tiny_model_dir: TinyModelDir, settings: dict[str, Any]
) -> None:
    """Their log-probs are NaN already; a value, a reference or a weight computed at them would be NaN too."""
    trainer = make_trainer(tiny_model_dir(), learning_rate=1e-3, **settings)
    totals = trainer.step(columns_of(rollout()))
    assert totals.updated and math.isfinite(totals.loss) and totals.grad_norm > 0
    assert all(math.isfinite(value) for value in totals.metrics().values())


def test_interrupting_before_the_first_update_leaves_every_weight(tiny_model_dir: TinyModelDir) -> None:
    class StopError(Exception):
        pass

    trainer = make_trainer(tiny_model_dir(), learning_rate=1e-2, mini_batches=2, samples=(4, 3), micro_batch_tokens=16)
    before, events = digest(trainer), []

    def stop(done: int, total: int) -> None:
        events.append((done, total))
        if len(events) == 2:
            raise StopError

    with pytest.raises(StopError):
        trainer.step(columns_of(rollout()), on_progress=stop)
    assert digest(trainer) == before and trainer.num_steps == 0
    events.clear()
    totals = trainer.step(columns_of(rollout()), on_progress=lambda done, total: events.append((done, total)))
    assert events[-1][0] == events[-1][1] == totals.num_micro_batches == len(events)
    fresh = make_trainer(tiny_model_dir(), learning_rate=1e-2, mini_batches=2, samples=(4, 3), micro_batch_tokens=16)
    fresh.step(columns_of(rollout()))
    assert digest(trainer) == digest(fresh)


def test_readers_of_the_weights_hear_before_each_update(tiny_model_dir: TinyModelDir) -> None:
    trainer = make_trainer(
        tiny_model_dir(), learning_rate=1e-2, mini_batches=2, samples=(4, 3), algorithm={"name": "ppo"}
    )
    seen: list[tuple[str, str]] = []

    def told() -> None:
        state = trainer.state_tensors()
        seen.append((tensors_digest(state["weights"]), tensors_digest(state["critic_weights"])))

    before = trainer.state_tensors()
    start = (tensors_digest(before["weights"]), tensors_digest(before["critic_weights"]))
    trainer.step(columns_of(rollout()), before_update=told)
    assert seen[0] == start and len(seen) == 4


def test_batch_settings_that_do_not_fit_are_refused_with_numbers() -> None:
    from unison.config.schema import ModelConfig, RolloutConfig, TrainConfig, TrainerConfig
    from unison.training.arithmetic import BatchArithmetic, check_arithmetic

    def config(prompts: int, copies: int, **trainer: Any) -> TrainConfig:
        return TrainConfig(
            model=ModelConfig(path="x"),
            rollout=RolloutConfig(prompts_per_step=prompts, samples_per_prompt=copies),
            trainer=TrainerConfig(**trainer),
        )

    for bad, words in (
        (config(5, 4, batch_samples=64), ["batch_samples=64", "5", "4", "20 samples"]),
        (config(12, 5, batch_samples=16), ["batch_samples=16", "60 samples", "15"]),
        (config(8, 4, mini_batches=5), ["mini_batches=5", "32 samples", "4"]),
        (config(8, 4, mini_batches=2, batch_samples=8), ["mini_batches=2", "batch_samples=8", "32"]),
        (config(8, 4, shuffle_samples=True), ["shuffle_samples=true", "no effect"]),
    ):
        with pytest.raises(ConfigError) as caught:
            check_arithmetic(bad)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    fine = config(8, 4, batch_samples=8, epochs=2, steps=10)
    check_arithmetic(fine)
    assert "2 passes x 4 mini-batches of 8 samples = 8 steps per rollout, 80 in all" in "\n".join(
        BatchArithmetic.from_config(fine).describe()
    )
    check_arithmetic(config(8, 4, batch_samples=32))


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_checkpointing_changes_no_bit(tiny_model_dir: TinyModelDir, name: str, dtype: torch.dtype) -> None:
    digests = []
    for checkpointing in (False, True):
        trainer = make_trainer(
            tiny_model_dir(),
            dtype=dtype,
            learning_rate=1e-2,
            algorithm={"name": name, "entropy_coef": 0.01},
            gradient_checkpointing=checkpointing,
        )
        for step in (1, 2):
            trainer.step(columns_of(rollout()), step)
        digests.append([tensors_digest(tensors) for tensors in trainer.state_tensors().values()])
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_mean", "fixed_length", "sequence_mean_token_sum", "prompt_mean"]
)
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_kept_denominators_count_whole_answers_that_were_left_out(
    tiny_model_dir: TinyModelDir, aggregation: str, mini_batches: int
) -> None:
    """The gradient that is left is the same, and smaller by the share that still counts."""
    samples = rollout()
    for sample in samples[1::3]:
        sample.logprobs = [value - 300.0 if value == value else value for value in sample.logprobs]
    norms = {}
    for denominator in ("kept", "reduced"):
        trainer = make_trainer(
            tiny_model_dir(),
            learning_rate=0.0,
            max_grad_norm=0.0,
            algorithm={"loss": "policy_gradient", "aggregation": aggregation, "advantage": "reinforce"},
            correction={"old": "trainer", "reject": "sequence", "reject_upper": 1e8, "denominator": denominator},
            mini_batches=mini_batches,
            samples=(4, 3),
        )
        columns = columns_of(samples)
        norms[denominator] = trainer.step(columns).grad_norm
        assert columns.kept_T is not None
        rejected = {int(i) for i in columns.row_T[columns.trained_T & ~columns.kept_T]}
        assert rejected == set(range(1, 12, 3))
    if aggregation == "token_mean" and mini_batches == 1:
        kept = int((columns.trained_T & columns.kept_T).sum()) if columns.kept_T is not None else 0
        assert norms["kept"] / norms["reduced"] == pytest.approx(kept / int(columns.trained_T.sum()), rel=1e-5)
    elif aggregation in ("fixed_length", "sequence_mean_token_sum", "sequence_mean_token_mean") and mini_batches == 1:
        assert norms["kept"] / norms["reduced"] == pytest.approx(8 / 12, rel=1e-5)
    else:
        assert norms["kept"] < 0.95 * norms["reduced"]


def test_samples_of_one_trajectory_are_weighed_and_dealt_out_together(tiny_model_dir: TinyModelDir) -> None:
    samples = rollout()
    samples[1].trajectory_id = samples[0].trajectory_id
    samples[0].logprobs = [value - 3.0 / 3 if value == value else value for value in samples[0].logprobs]
    trainer = make_trainer(tiny_model_dir(), learning_rate=0.0, correction={"name": "sequence_tis", "upper": 1e8})
    columns = columns_of(samples)
    trainer.step(columns)
    assert columns.correction_T is not None
    weights = [float(columns.correction_T[columns.row_T == row][0]) for row in range(3)]
    assert weights[0] == weights[1] != weights[2]
    assert cut_mini_batches([0, 1, 2, 3], 3, units=["a", "a", "b", "c"], seed=None) == [[0, 1], [2], [3]]


def test_the_coefficient_of_the_kl_waits_for_the_policy(tiny_model_dir: TinyModelDir) -> None:
    trainer = make_trainer(
        tiny_model_dir(),
        learning_rate=1e-2,
        steps=4,
        algorithm={"name": "ppo", "kl_coef": 0.1, "kl_control": "doubling", "kl_target": 1e6},
        critic={"only_steps": 2},
        samples=(4, 3),
    )
    values = []
    for step in range(1, 4):
        trainer.step(columns_of(rollout()), step)
        values.append(float(trainer.state_tensors()["algorithm"]["kl_coef"]))
    assert values == [0.1, 0.1, 0.05]


def test_a_rollout_that_a_correction_rejects_whole_moves_neither_policy_nor_critic(
    tiny_model_dir: TinyModelDir,
) -> None:
    trainer = make_trainer(
        tiny_model_dir(),
        learning_rate=1e-2,
        algorithm={"name": "ppo"},
        critic={"learning_rate": 1e-2},
        correction={"old": "trainer", "veto": 0.5},
        mini_batches=2,
        samples=(4, 3),
    )
    trainer.step(columns_of(rollout()), 1)  # moments that would go on moving the weights
    before = {
        group: tensors_digest(tensors) for group, tensors in trainer.state_tensors().items() if "count" not in group
    }
    samples = rollout()
    for sample in samples:
        sample.logprobs = [value + 300.0 if value == value else value for value in sample.logprobs]
    totals = trainer.step(columns_of(samples), 2)
    after = {
        group: tensors_digest(tensors) for group, tensors in trainer.state_tensors().items() if "count" not in group
    }
    assert not totals.updated and before == after
