"""Whole buffers of tensors staged at once: the same bits as tensor by tensor, and nothing where one is wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.conftest import TinyModelDir
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.weights.arena import Arena, ArenaLayout, move_into
from unison.weights.checksum import weights_checksum
from unison.weights.manifest import DTYPES, BufferLayout, TensorEntry, pack_layout
from unison.weights.plan import make_plan
from unison.weights.transaction import Staging, WeightStore

Tensors = dict[str, Tensor]
NAMES = {dtype: name for name, dtype in DTYPES.items()}
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
BOTH_STAGINGS = pytest.mark.parametrize("staging", get_args(Staging))


@pytest.fixture
def model(tiny_model_dir: TinyModelDir) -> Decoder:
    return load_model(tiny_model_dir("qwen3"), torch.bfloat16)


@pytest.fixture
def tied(tiny_model_dir: TinyModelDir) -> Decoder:
    return load_model(tiny_model_dir("llama", tie_word_embeddings=True), torch.bfloat16)


def arena_store(model: Decoder, staging: Staging = "shadow") -> WeightStore:
    layout = ArenaLayout.of(model.spec, model.dtype)
    arenas = [Arena(layout) for _ in range(2 if staging == "shadow" else 1)]
    move_into(model, arenas[0])
    return WeightStore(model, staging=staging, arenas=arenas)


def changed(model: Decoder, factor: float = 2.0) -> Tensors:
    return {name: tensor * factor for name, tensor in published_tensors(model).items()}


def written(layout: BufferLayout, tensors: Mapping[str, Tensor]) -> Tensor:
    """The bytes of the tensors where the layout says; 0xff elsewhere, which is NaN in every dtype."""
    memory = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8)
    for entry in layout.entries:
        value = tensors[entry.name].detach().to(DTYPES[entry.dtype]).contiguous().reshape(-1).view(torch.uint8)
        memory[entry.offset : entry.offset + len(value)] = value
    return memory


def layout_of(tensors: Mapping[str, Tensor]) -> BufferLayout:
    return pack_layout((name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items())


def random_layout(tensors: Mapping[str, Tensor], rng: random.Random) -> BufferLayout:
    """The tensors in any order, with any gaps and dtypes, offsets that no dtype is aligned to included."""
    names = list(tensors)
    if rng.random() < 0.5:
        rng.shuffle(names)
    entries = []
    end = 0
    for name in names:
        end += rng.choice([0, 0, 0, 1, 2, 3, 64, 100])
        dtype = rng.choice(["bfloat16", "bfloat16", "bfloat16", "float32", "float16"])
        entries.append(TensorEntry(name, dtype, tuple(tensors[name].shape), end))
        end += entries[-1].num_bytes
    end += rng.choice([0, 1, 64])
    listed = entries if rng.random() < 0.5 else rng.sample(entries, len(entries))
    return BufferLayout(tuple(listed), end)


@BOTH_STAGINGS
@pytest.mark.parametrize("with_arenas", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_any_layout_gives_the_bits_of_tensor_by_tensor(
    tiny_model_dir: TinyModelDir, staging: Staging, with_arenas: bool, seed: int
) -> None:
    rng = random.Random(seed)
    family = rng.choice(["llama", "qwen2", "qwen3"])
    folder = tiny_model_dir(family, tie_word_embeddings=rng.random() < 0.5)
    model, oracle = load_model(folder, torch.bfloat16), load_model(folder, torch.bfloat16)
    store = arena_store(model, staging) if with_arenas else WeightStore(model, staging=staging)
    by_tensor = WeightStore(oracle)
    for version in (1, 2, 3):
        new = {name: tensor.float() * rng.uniform(0.5, 2.0) for name, tensor in published_tensors(model).items()}
        names = list(new)
        cuts = sorted(rng.sample(range(1, len(names)), rng.randint(0, 3)))
        transaction, expected = store.begin(version), by_tensor.begin(version)
        for start, end in zip([0, *cuts], [*cuts, len(names)], strict=True):
            part = {name: new[name] for name in names[start:end]}
            layout = random_layout(part, rng)
            assert transaction.stage_buffer(layout, written(layout, part)) == len(part)
            for entry in layout.entries:
                expected.stage(entry.name, part[entry.name].to(DTYPES[entry.dtype]))
        prepared = transaction.prepare()
        commit = transaction.commit(prepared.checksum)
        expected.commit()
        assert commit.checksum == weights_checksum(published_tensors(oracle)) == store.weights_checksum()
        assert store.checksum() == by_tensor.checksum()
        assert (commit.num_tensors, store.version, store.complete) == (len(names), version, True)


def test_the_layout_of_the_arena_itself_is_one_copy(model: Decoder, tied: Decoder) -> None:
    for one in (model, tied):
        layout = ArenaLayout.of(one.spec, one.dtype)
        plan = make_plan(layout.published, layout)
        assert (len(plan.runs), plan.span) == (1, 0)
        packed = make_plan(layout_of(published_tensors(one)), layout)
        assert (len(packed.runs), packed.span) == (1, 0)


def test_many_small_tensors_are_one_copy(tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir("qwen2", num_hidden_layers=250, hidden_size=16, intermediate_size=32, vocab_size=512)
    model = load_model(folder, torch.bfloat16)
    store = arena_store(model)
    new = changed(model)
    assert len(new) == 3003
    transaction = store.begin(1)
    layout = store.layout.published
    assert len(store.layouts.plan(layout).runs) == 1
    transaction.stage_buffer(layout, written(layout, new))
    assert transaction.prepare(weights_checksum(new)).num_tensors == 3003
    transaction.commit()
    assert all(torch.equal(tensor, new[name]) for name, tensor in published_tensors(model).items())
