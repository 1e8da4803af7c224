"""A model's weights in one flat buffer."""

from __future__ import annotations

import mmap

import pytest
import torch

from tests.conftest import TinyModelDir
from unison.core.errors import WeightUpdateError
from unison.models.loading import load_model
from unison.models.names import published_tensors, tensor_slots
from unison.models.rollout_decoder import RolloutDecoder
from unison.weights.arena import Arena, ArenaLayout, model_over, move_into
from unison.weights.manifest import ALIGNMENT
from unison.weights.transaction import WeightStore

MODELS = pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_size": 24, "head_dim": 6, "vocab_size": 301}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@MODELS
@DTYPES
def test_a_layout_has_every_parameter_and_tensor_once(
    tiny_model_dir: TinyModelDir, family: str, options: dict[str, object], dtype: torch.dtype
) -> None:
    model = load_model(tiny_model_dir(family, **options), dtype)
    layout = ArenaLayout.of(model.spec, dtype)
    parameters = dict(model.named_parameters())
    assert {name: shape for name, (shape, _) in layout.parameters.items()} == {
        name: tuple(parameter.shape) for name, parameter in parameters.items()
    }
    assert [entry.name for entry in layout.published.entries] == [slot.name for slot in tensor_slots(model.spec)]
    taken = torch.zeros(layout.num_bytes, dtype=torch.int32)
    for name, (_, offset) in layout.parameters.items():
        assert offset % ALIGNMENT == 0
        taken[offset : offset + parameters[name].nbytes] += 1
    assert int(taken.max()) == 1
    for entry in layout.published.entries:
        taken[entry.offset : entry.offset + entry.num_bytes] += 1
    assert set(taken.tolist()) <= {0, 2}, "the tensors are the parameters, without a gap"


@MODELS
@DTYPES
def test_views_of_an_arena_are_the_weights(
    tiny_model_dir: TinyModelDir, family: str, options: dict[str, object], dtype: torch.dtype
) -> None:
    model = load_model(tiny_model_dir(family, **options), dtype)
    expected = {name: tensor.clone() for name, tensor in published_tensors(model).items()}
    layout = ArenaLayout.of(model.spec, dtype)
    memory = mmap.mmap(-1, layout.num_bytes + 4096)
    arena = Arena(layout, memory)
    assert not arena.holds(model)
    move_into(model, arena)
    assert arena.holds(model)
    other = Arena(layout, memory)
    second = model_over(other)
    assert not any(parameter.requires_grad for parameter in second.parameters())
    for tensors in (arena.published, other.published, published_tensors(model), published_tensors(second)):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    arena.published["model.norm.weight"].fill_(3.0)
    assert second.norm.weight.tolist() == model.norm.weight.tolist() == [3.0] * model.spec.hidden_size


def test_a_rollout_model_follows_the_arenas(tiny_model_dir: TinyModelDir) -> None:
    model = load_model(tiny_model_dir("qwen3"), torch.bfloat16)
    rollout = RolloutDecoder(model, pack=False)
    layout = ArenaLayout.of(model.spec, model.dtype)
    arenas = [Arena(layout), Arena(layout)]
    move_into(model, arenas[0])
    rollout.remake()
    store = WeightStore(model, derived=rollout, arenas=arenas)
    transaction = store.begin(1)
    transaction.stage_buffer(layout.published, torch.zeros(layout.num_bytes, dtype=torch.uint8))
    transaction.prepare()
    transaction.commit()
    assert arenas[1].holds(rollout)
    assert not any(parameter.any() for parameter in rollout.parameters())


def test_memory_that_cannot_hold_the_weights_is_refused(tiny_model_dir: TinyModelDir) -> None:
    model = load_model(tiny_model_dir("qwen3"), torch.bfloat16)
    layout = ArenaLayout.of(model.spec, model.dtype)
    with pytest.raises(WeightUpdateError, match=f"{layout.num_bytes} bytes does not fit into {layout.num_bytes - 1}"):
        Arena(layout, bytearray(layout.num_bytes - 1))
    with pytest.raises(WeightUpdateError, match="read-only"):
        Arena(layout, memoryview(bytes(layout.num_bytes)))
    with pytest.raises(WeightUpdateError, match=r"flat uint8 tensor, not torch\.int16"):
        Arena(layout, torch.zeros(layout.num_bytes, dtype=torch.int16))
    with pytest.raises(WeightUpdateError, match="odd address"):
        Arena(layout, torch.zeros(layout.num_bytes + 1, dtype=torch.uint8)[1:])
    with pytest.raises(WeightUpdateError, match=r"laid out as torch\.float64"):
        ArenaLayout.of(model.spec, torch.float64)


def test_a_store_refuses_arenas_that_do_not_hold_its_model(tiny_model_dir: TinyModelDir) -> None:
    model = load_model(tiny_model_dir("qwen3"), torch.bfloat16)
    layout = ArenaLayout.of(model.spec, model.dtype)
    arenas = [Arena(layout), Arena(layout)]
    with pytest.raises(WeightUpdateError, match="do not lie in arena 0"):
        WeightStore(model, arenas=arenas)
    move_into(model, arenas[1])
    assert WeightStore(model, arenas=arenas, live_index=1).live_index == 1
    for index in (0, 2, -1):
        with pytest.raises(WeightUpdateError, match=f"do not lie in arena {index}"):
            WeightStore(model, arenas=arenas, live_index=index)
    with pytest.raises(WeightUpdateError, match="shadow staging needs 2 arenas, not 1"):
        WeightStore(model, arenas=arenas[1:])
    with pytest.raises(WeightUpdateError, match="in_place staging needs 1 arenas, not 2"):
        WeightStore(model, staging="in_place", arenas=arenas, live_index=1)
    with pytest.raises(WeightUpdateError, match="live_index=1 names an arena"):
        WeightStore(model, live_index=1)
