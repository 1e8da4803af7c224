"""What a trainer is saved as makes another trainer take the very same steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.make_trainer import columns_of, make_trainer
from tests.training.test_trainer import as_samples, oracle_batch
from unison.core.errors import CheckpointError
from unison.training.trainer import Trainer
from unison.weights.checksum import tensors_digest

TinyModelDir = Callable[..., Path]
State = dict[str, dict[str, Tensor]]
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "warmup_steps": 2,
    "steps": 9,
    "weight_decay": 0.1,
    "micro_batch_tokens": 48,
}


def copied(trainer: Trainer) -> State:
    return {
        group: {name: tensor.detach().clone() for name, tensor in members.items()}
        for group, members in trainer.state_tensors().items()
    }


def digests(trainer: Trainer) -> tuple[str, ...]:
    state = trainer.state_tensors()
    return (*(tensors_digest(state[group]) for group in ("weights", "optimizer")), tensors_digest(trainer.published()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_the_next_steps_are_the_same_to_the_bit(
    tiny_model_dir: TinyModelDir, dtype: torch.dtype, num_before: int
) -> None:
    samples = as_samples(oracle_batch())
    first = make_trainer(tiny_model_dir(), dtype=dtype, algorithm={"kl_coef": 0.1}, **SETTINGS)
    for _ in range(num_before):
        first.step(columns_of(samples))
    saved = copied(first)
    second = make_trainer(tiny_model_dir(), dtype=dtype, algorithm={"kl_coef": 0.1}, **SETTINGS)
    second.step(columns_of(samples[:2]))  # whatever it did before is forgotten
    second.load_state(saved, first.num_steps)
    assert second.num_steps == num_before and digests(second) == digests(first)
    for order in (1, -1):
        one, other = first.step(columns_of(samples[::order])), second.step(columns_of(samples[::order]))
        assert (one.loss, one.grad_norm, one.learning_rate) == (other.loss, other.grad_norm, other.learning_rate)
        assert digests(second) == digests(first)


def test_a_loaded_state_shares_no_memory_with_what_it_came_from(tiny_model_dir: TinyModelDir) -> None:
    samples = as_samples(oracle_batch())
    trainer = make_trainer(tiny_model_dir(), **SETTINGS)
    trainer.step(columns_of(samples))
    saved = copied(trainer)
    before = {group: tensors_digest(members) for group, members in saved.items()}
    trainer.load_state(saved, 1)
    trainer.step(columns_of(samples))
    assert {group: tensors_digest(members) for group, members in saved.items()} == before


def without(group: str, part: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        name = next(name for name in state[group] if part in name)
        del state[group][name]

    return change


def with_another(group: str, name: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[group][name] = torch.zeros(2)

    return change


def as_dtype(group: str, part: str, dtype: torch.dtype) -> Callable[[State], None]:
    def change(state: State) -> None:
        name = next(name for name in state[group] if part in name)
        state[group][name] = state[group][name].to(dtype)

    return change


def cut(group: str, part: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        name = next(name for name in state[group] if part in name)
        state[group][name] = state[group][name].reshape(-1)[:-1]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("weights", "norm"), r"saved weights do not fit this model: '.*norm.*' is missing \(1 names differ\)"),
        (with_another("weights", "lora"), r"saved weights do not fit this model: 'lora' is not one of it"),
        (without("optimizer", "exp_avg_sq"), r"saved optimizer do not fit this model: 'exp_avg_sq\..*' is missing"),
        (with_another("optimizer", "max_exp"), r"'max_exp' is not one of it"),
        (as_dtype("weights", "embed", torch.bfloat16), r"the saved '.*embed.*' is torch\.bfloat16 .*torch\.float32"),
        (as_dtype("optimizer", "exp_avg.", torch.float64), r"the saved 'exp_avg\..*' is torch\.float64"),
        (cut("weights", "norm"), r"the saved '.*norm.*' is torch\.float32 \[63\], this model's torch\.float32 \[64\]"),
        (lambda state: state.pop("optimizer"), r"saved optimizer do not fit.*is missing"),
        (lambda state: state.pop("weights"), r"saved weights do not fit.*is missing"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    tiny_model_dir: TinyModelDir, change: Callable[[State], Any], message: str
) -> None:
    trainer = make_trainer(tiny_model_dir(), **SETTINGS)
    trainer.step(columns_of(as_samples(oracle_batch())))
    saved = copied(trainer)
    change(saved)
    with pytest.raises(CheckpointError, match=message):
        make_trainer(tiny_model_dir(), **SETTINGS).load_state(saved, 1)


def test_before_the_first_step_there_are_no_moments_and_none_are_taken(tiny_model_dir: TinyModelDir) -> None:
    trainer = make_trainer(tiny_model_dir(), **SETTINGS)
    assert trainer.state_tensors()["optimizer"] == {}
    trainer.step(columns_of(as_samples(oracle_batch())))
    with pytest.raises(CheckpointError, match="is not one of it"):
        make_trainer(tiny_model_dir(), **SETTINGS).load_state(copied(trainer), 0)


WHOLE: dict[str, Any] = {
    "algorithm": {
        "name": "ppo",
        "kl_coef": 0.1,
        "kl_control": "proportional",
        "kl_target": 0.01,
        "kl_horizon": 200,
    },
    "reference_settings": {"update": "moving_average", "decay": 0.9},
    "critic": {"learning_rate": 1e-2, "only_steps": 1},
    "mini_batches": 2,
    "samples": (3, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_critic_reference_and_coefficient_go_on_to_the_bit(
    tiny_model_dir: TinyModelDir, dtype: torch.dtype, num_before: int
) -> None:
    samples = as_samples(oracle_batch())
    first = make_trainer(tiny_model_dir(), dtype=dtype, learning_rate=1e-2, **WHOLE)
    for step in range(1, num_before + 1):
        first.step(columns_of(samples), step)
    saved = copied(first)
    assert saved.keys() == {
        "weights", "optimizer", "critic_weights", "critic_optimizer", "critic_counts", "reference", "algorithm"
    }  # fmt: skip
    second = make_trainer(tiny_model_dir(), dtype=dtype, learning_rate=1e-2, **WHOLE)
    second.step(columns_of(samples[:4]), 2)  # whatever it did before is forgotten
    assert second.load_state(saved, first.num_steps) == []
    for step in range(num_before + 1, num_before + 3):
        one, other = first.step(columns_of(samples), step), second.step(columns_of(samples), step)
        assert (one.loss, one.grad_norm, one.others) == (other.loss, other.grad_norm, other.others)
    now, then = first.state_tensors(), second.state_tensors()
    assert {group: tensors_digest(members) for group, members in now.items()} == {
        group: tensors_digest(members) for group, members in then.items()
    }
    if num_before == 3:
        assert float(now["algorithm"]["kl_coef"]) != 0.1


def test_what_a_state_was_saved_without_begins_anew_and_is_said(tiny_model_dir: TinyModelDir) -> None:
    plain = make_trainer(tiny_model_dir(), learning_rate=1e-2)
    plain.step(columns_of(as_samples(oracle_batch())))
    notes = make_trainer(tiny_model_dir(), learning_rate=1e-2, **WHOLE).load_state(copied(plain), 1)
    assert (
        len(notes) == 2 and "critic begins anew" in notes[0] and "reference is the model the run began with" in notes[1]
    )


def test_a_damaged_critic_is_refused(tiny_model_dir: TinyModelDir) -> None:
    trainer = make_trainer(tiny_model_dir(), learning_rate=1e-2, **WHOLE)
    trainer.step(columns_of(as_samples(oracle_batch())))
    saved = copied(trainer)
    without("critic_weights", "value_head")(saved)
    with pytest.raises(CheckpointError, match=r"critic weights do not fit .*value_head"):
        make_trainer(tiny_model_dir(), **WHOLE).load_state(saved, 0)


def test_a_coefficient_set_anew_takes_effect_and_the_steered_one_is_dropped(tiny_model_dir: TinyModelDir) -> None:
    first = make_trainer(tiny_model_dir(), learning_rate=1e-2, **WHOLE)
    for step in (1, 2):
        first.step(columns_of(as_samples(oracle_batch())), step)
    saved = copied(first)
    changed = {**WHOLE, "algorithm": {**WHOLE["algorithm"], "kl_coef": 5.0}}
    second = make_trainer(tiny_model_dir(), learning_rate=1e-2, **changed)
    second.load_state(saved, first.num_steps)
    assert float(second.state_tensors()["algorithm"]["kl_coef"]) == 5.0
    same = make_trainer(tiny_model_dir(), learning_rate=1e-2, **WHOLE)
    same.load_state(saved, first.num_steps)
    assert float(same.state_tensors()["algorithm"]["kl_coef"]) == float(saved["algorithm"]["kl_coef"]) != 0.1


def test_a_reference_that_is_fixed_from_now_on_is_the_first_model_again(tiny_model_dir: TinyModelDir) -> None:
    first = make_trainer(tiny_model_dir(), learning_rate=1e-2, **WHOLE)
    first.step(columns_of(as_samples(oracle_batch())), 1)
    fixed = make_trainer(tiny_model_dir(), learning_rate=1e-2, **{**WHOLE, "reference_settings": {}})
    (note,) = fixed.load_state(copied(first), first.num_steps)
    assert note == "the reference is the model the run began with: reference.update is fixed now"


def test_a_critic_that_comes_later_has_its_steps_alone_then(tiny_model_dir: TinyModelDir) -> None:
    plain = make_trainer(tiny_model_dir(), learning_rate=1e-2)
    for step in (1, 2, 3):
        plain.step(columns_of(as_samples(oracle_batch())), step)
    later = make_trainer(tiny_model_dir(), learning_rate=1e-2, **WHOLE)
    later.load_state(copied(plain), 3)
    updated = [later.step(columns_of(as_samples(oracle_batch())), step).updated for step in (4, 5)]
    assert updated == [False, True]
