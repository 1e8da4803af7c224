"""How a reference follows the policy, and goes on where it was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import TinyModelDir
from unison.checkpoint.load import load
from unison.checkpoint.save import Saver
from unison.config.algorithm import ReferenceConfig
from unison.core.errors import CheckpointError
from unison.models.loading import load_model
from unison.training.reference import Reference

BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
Weights = dict[str, Tensor]


def masters_of(folder: Path) -> Weights:
    return {name: parameter.detach() for name, parameter in load_model(folder, torch.float32).named_parameters()}


def make(folder: Path, dtype: torch.dtype, update: Any, **settings: Any) -> Reference:
    return Reference(load_model(folder, dtype), ReferenceConfig(update=update, **settings), masters_of(folder))


def weights_of(reference: Reference) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in reference.model.named_parameters()}


def moved(weights: Weights, by: float) -> Weights:
    return {name: weight + by for name, weight in weights.items()}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def as_dtype(weights: Weights, dtype: torch.dtype) -> Weights:
    return {name: weight.to(dtype) for name, weight in weights.items()}


@BOTH_DTYPES
def test_a_fixed_one_never_moves_and_leaves_nothing_to_save(tiny_model_dir: TinyModelDir, dtype: torch.dtype) -> None:
    reference = make(tiny_model_dir(), dtype, "fixed")
    before = weights_of(reference)
    reference.after_step(1, moved(masters_of(tiny_model_dir()), 1.0))
    assert same(weights_of(reference), before) and reference.state_tensors() == {}
    reference.load_state({})
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


@BOTH_DTYPES
def test_a_refreshed_one_is_the_policy_of_every_third_step(tiny_model_dir: TinyModelDir, dtype: torch.dtype) -> None:
    reference = make(tiny_model_dir(), dtype, "refreshed", every=3)
    start = masters_of(tiny_model_dir())
    expected = as_dtype(start, dtype)
    for step in range(1, 8):
        policy = moved(start, 0.01 * step)
        reference.after_step(step, policy)
        if step % 3 == 0:
            expected = as_dtype(policy, dtype)
        assert same(weights_of(reference), expected)


@BOTH_DTYPES
def test_a_moving_average_follows_its_formula(tiny_model_dir: TinyModelDir, dtype: torch.dtype) -> None:
    reference = make(tiny_model_dir(), dtype, "moving_average", decay=0.9)
    start = masters_of(tiny_model_dir())
    assert same(reference.state_tensors(), start)
    expected = {name: weight.double() for name, weight in start.items()}
    for step in range(1, 8):
        policy = moved(start, 0.1 * step)
        reference.after_step(step, policy)
        expected = {name: 0.9 * weight + (1 - 0.9) * policy[name].double() for name, weight in expected.items()}
    averages = reference.state_tensors()
    for name, average in averages.items():
        assert average.dtype == torch.float32
        assert torch.allclose(average.double(), expected[name], rtol=1e-6, atol=1e-6)
    assert same(weights_of(reference), as_dtype(averages, dtype))


@BOTH_DTYPES
def test_an_average_of_equal_weights_keeps_every_bit(tiny_model_dir: TinyModelDir, dtype: torch.dtype) -> None:
    reference = make(tiny_model_dir(), dtype, "moving_average", decay=0.99)
    before, policy = weights_of(reference), masters_of(tiny_model_dir())
    for step in range(1, 4):
        reference.after_step(step, policy)
    assert same(weights_of(reference), before) and same(reference.state_tensors(), policy)


def test_steps_too_small_for_bfloat16_add_up(tiny_model_dir: TinyModelDir) -> None:
    reference = make(tiny_model_dir(), torch.bfloat16, "moving_average", decay=0.99)
    before, policy = weights_of(reference), moved(masters_of(tiny_model_dir()), 0.1)
    name = "norm.weight"
    reference.after_step(1, policy)
    still = (weights_of(reference)[name] == before[name]).double().mean()
    for step in range(2, 301):
        reference.after_step(step, policy)
    gap = (weights_of(reference)[name].double() - policy[name].double()).abs().max()
    assert still > 0.5 and gap < 0.02


UPDATES = pytest.mark.parametrize(("update", "settings"), [("refreshed", {"every": 2}), ("moving_average", {})])


@UPDATES
@BOTH_DTYPES
def test_a_saved_one_goes_on_to_the_same_bits(
    tiny_model_dir: TinyModelDir, dtype: torch.dtype, update: str, settings: dict[str, Any]
) -> None:
    folder = tiny_model_dir()
    first, second = (make(folder, dtype, update, **settings) for _ in range(2))
    start = masters_of(folder)
    for step in (1, 2, 3):
        first.after_step(step, moved(start, 0.03 * step))
    saved = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    second.after_step(2, moved(start, -1.0))
    second.load_state(saved)
    assert same(weights_of(second), weights_of(first))
    for step in (4, 5):
        for reference in (first, second):
            reference.after_step(step, moved(start, -0.02 * step))
        assert same(weights_of(second), weights_of(first))
    assert same(second.state_tensors(), first.state_tensors()) and not same(second.state_tensors(), saved)


@UPDATES
def test_it_is_saved_live_and_may_change_once_the_saver_lets_go(
    tiny_model_dir: TinyModelDir, tmp_path: Path, update: str, settings: dict[str, Any]
) -> None:
    folder = tiny_model_dir()
    reference = make(folder, torch.bfloat16, update, **settings)
    reference.after_step(2, moved(masters_of(folder), 0.3))
    at_save = {name: tensor.clone() for name, tensor in reference.state_tensors().items()}
    saver = Saver(tmp_path)
    saver.begin(2, {"reference": reference.state_tensors()}, {}, {})
    saver.release()
    reference.after_step(4, moved(masters_of(folder), 0.6))
    saved = saver.wait()
    assert saved is not None
    again = make(folder, torch.bfloat16, update, **settings)
    again.load_state(load(tmp_path, 2).tensors["reference"])
    assert same(again.state_tensors(), at_save)


@UPDATES
def test_weights_and_state_stay_the_same_tensors(
    tiny_model_dir: TinyModelDir, update: str, settings: dict[str, Any]
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        reference = make(tiny_model_dir(), dtype, update, **settings)
        places = [tensor.data_ptr() for tensor in (*reference.model.parameters(), *reference.state_tensors().values())]
        policy = moved(masters_of(tiny_model_dir()), 0.5)
        reference.after_step(2, policy)
        reference.load_state({name: tensor.clone() for name, tensor in reference.state_tensors().items()})
        assert places == [
            tensor.data_ptr() for tensor in (*reference.model.parameters(), *reference.state_tensors().values())
        ]
        assert not {tensor.data_ptr() for tensor in policy.values()} & set(places)


def drop(state: Weights) -> None:
    del state["norm.weight"]


def add(state: Weights) -> None:
    state["adapter"] = torch.zeros(2)


def cut(state: Weights) -> None:
    state["norm.weight"] = state["norm.weight"][:-1]


def whole_numbers(state: Weights) -> None:
    state["norm.weight"] = state["norm.weight"].to(torch.int32)


@UPDATES
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"'norm\.weight' is missing \(1 names differ\)"),
        (add, "'adapter' is not one of it"),
        (cut, r"'norm\.weight' is torch\.\w+ \[63\], this model's torch\.\w+ \[64\]"),
        (whole_numbers, r"'norm\.weight' is torch\.int32"),
        (lambda state: state.clear(), "is missing"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    tiny_model_dir: TinyModelDir,
    update: str,
    settings: dict[str, Any],
    change: Callable[[Weights], object],
    message: str,
) -> None:
    reference = make(tiny_model_dir(), torch.bfloat16, update, **settings)
    state = moved(reference.state_tensors(), 1.0)
    before = weights_of(reference)
    change(state)
    with pytest.raises(CheckpointError, match=message):
        reference.load_state(state)
    assert same(weights_of(reference), before)


def test_a_fixed_one_takes_no_state(tiny_model_dir: TinyModelDir) -> None:
    with pytest.raises(CheckpointError, match=r"does not fit reference\.update='fixed'.*is not one of it"):
        make(tiny_model_dir(), torch.float32, "fixed").load_state({"norm.weight": torch.ones(64)})


@UPDATES
def test_another_model_than_the_policy_is_refused(
    tiny_model_dir: TinyModelDir, update: str, settings: dict[str, Any]
) -> None:
    reference = make(tiny_model_dir(), torch.float32, update, **settings)
    with pytest.raises(ValueError, match="do not have the same parameters"):
        reference.after_step(2, masters_of(tiny_model_dir("qwen2")))
