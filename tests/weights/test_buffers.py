"""Whole buffers of tensors staged at once: the same bits as tensor by tensor, and nothing where one is wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.conftest import TinyModelDir
from unison.core.errors import WeightUpdateError
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.weights.arena import Arena, ArenaLayout, move_into
from unison.weights.checksum import weights_checksum
from unison.weights.manifest import DTYPES, BufferLayout, TensorEntry, pack_layout
from unison.weights.plan import LayoutBook, make_plan
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


def entry_of(store: WeightStore, name: str) -> TensorEntry:
    return store.layout.entries[name]


def one(name: str, dtype: str, shape: tuple[int, ...], offset: int = 0, num_bytes: int = 1 << 20) -> BufferLayout:
    return BufferLayout((TensorEntry(name, dtype, shape, offset),), num_bytes)


REFUSED = {
    "names no tensor": BufferLayout((), 64),
    "'foreign' has no place in this model": one("foreign", "bfloat16", (64,)),
    r"shape \[63\]; \[64\] is needed": one(NORM, "bfloat16", (63,)),
    r"shape \[64, 1\]; \[64\] is needed": one(NORM, "bfloat16", (64, 1)),
    r"shape \[\]; \[64\] is needed": one(NORM, "bfloat16", ()),
    "dtype int64; float32, bfloat16 or float16": one(NORM, "int64", (64,)),
    "dtype float8_e4m3fn;": one(NORM, "float8_e4m3fn", (64,)),
    r"cannot have shape \[-64\] at offset 0": one(NORM, "bfloat16", (-64,)),
    r"cannot have shape \[-8, -8\]": one(NORM, "bfloat16", (-8, -8)),
    "at offset -2": one(NORM, "bfloat16", (64,), -2),
    "ends at byte 130 of a buffer of 129": one(NORM, "bfloat16", (64,), 2, 129),
    f"ends at byte {(1 << 62) + 128} of": one(NORM, "bfloat16", (64,), 1 << 62),
    f"ends at byte {1 << 81} of": one(NORM, "bfloat16", (1 << 40, 1 << 40)),
    "the buffer has 1048576 bytes; its layout needs": one(NORM, "bfloat16", (64,), 0, 1 << 40),
    "ends at byte 128 of a buffer of -1": one(NORM, "bfloat16", (64,), 0, -1),
    f"'{NORM}' was given twice": BufferLayout(
        (TensorEntry(NORM, "bfloat16", (64,), 0), TensorEntry(NORM, "bfloat16", (64,), 128)), 256
    ),
    "overlap in the buffer": BufferLayout(
        (
            TensorEntry("model.layers.0.input_layernorm.weight", "bfloat16", (64,), 126),
            TensorEntry(NORM, "bfloat16", (64,), 0),
        ),
        256,
    ),
}


@BOTH_STAGINGS
@pytest.mark.parametrize("message", REFUSED)
def test_a_refused_buffer_writes_nothing(model: Decoder, staging: Staging, message: str) -> None:
    store = arena_store(model, staging)
    before = [arena.flat.clone() for arena in store._arenas]
    transaction = store.begin(1)
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    with pytest.raises(WeightUpdateError, match=f"update to version 1: .*{message}"):
        transaction.stage_buffer(REFUSED[message], memory)
    assert store.complete
    assert all(torch.equal(arena.flat, old) for arena, old in zip(store._arenas, before, strict=True))
    new = changed(model)
    layout = layout_of(new)
    transaction.stage_buffer(layout, written(layout, new))
    assert store.complete is (staging == "shadow")
    transaction.prepare(weights_checksum(new))
    transaction.commit()
    assert store.complete


@pytest.mark.parametrize(
    "memory", [torch.zeros(64, dtype=torch.int8), torch.zeros(8, 8, dtype=torch.uint8), torch.zeros(128).byte()[::2]]
)
def test_memory_that_is_not_flat_bytes_is_refused(model: Decoder, memory: Tensor) -> None:
    with pytest.raises(WeightUpdateError, match="a buffer must be a flat uint8 tensor"):
        arena_store(model).begin(1).stage_buffer(one(NORM, "bfloat16", (16,), 0, 32), memory)


@BOTH_STAGINGS
def test_a_tensor_of_two_buffers_is_refused_and_the_rest_of_the_update_stands(model: Decoder, staging: Staging) -> None:
    store = arena_store(model, staging)
    new = changed(model)
    names = list(new)
    first, second = ({name: new[name] for name in part} for part in (names[:10], names[10:]))
    transaction = store.begin(1)
    transaction.stage_buffer(layout_of(first), written(layout_of(first), first))
    both = {**second, names[3]: new[names[3]] * 3}
    with pytest.raises(WeightUpdateError, match=f"'{names[3]}' was given twice"):
        transaction.stage_buffer(layout_of(both), written(layout_of(both), both))
    with pytest.raises(WeightUpdateError, match=f"'{names[3]}' was given twice"):
        transaction.stage(names[3], new[names[3]])
    assert store.complete is (staging == "shadow")
    with pytest.raises(WeightUpdateError, match=f"{len(second)} of {len(new)} tensors were never written"):
        transaction.prepare()
    for name, tensor in list(second.items())[:4]:
        transaction.stage(name, tensor)
    rest = dict(list(second.items())[4:])
    transaction.stage_buffer(layout_of(rest), written(layout_of(rest), rest))
    assert transaction.prepare(weights_checksum(new)).num_tensors == len(new)
    transaction.commit()


@BOTH_STAGINGS
@pytest.mark.parametrize("with_arenas", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_tied_tensors_come_under_either_name_or_both_if_equal(
    tied: Decoder, staging: Staging, with_arenas: bool, apart: bool
) -> None:
    store = arena_store(tied, staging) if with_arenas else WeightStore(tied, staging=staging)
    rest = changed(tied)
    embedding = rest.pop(EMBED)

    def stage(version: int, head: Tensor | None, embed: Tensor | None) -> None:
        parts: list[Tensors] = [{HEAD: head} if head is not None else {}, {EMBED: embed} if embed is not None else {}]
        buckets = [*parts, rest] if apart else [{**parts[0], **rest, **parts[1]}]
        transaction = store.begin(version)
        try:
            for bucket in buckets:
                if bucket:
                    layout = layout_of(bucket)
                    transaction.stage_buffer(layout, written(layout, bucket))
            transaction.prepare(weights_checksum({EMBED: embedding, **rest}))
            transaction.commit()
        finally:
            transaction.abort()

    stage(1, embedding, None)
    stage(2, None, embedding)
    stage(3, embedding, embedding)
    stage(4, embedding.float(), embedding)
    with pytest.raises(WeightUpdateError, match=f"'{EMBED}' differs from the one it is tied to"):
        stage(5, embedding, embedding * 2)
    # One bucket is refused before it is written; of two, the first one was.
    assert store.complete is (staging == "shadow" or not apart)
    assert store.version == 4


@BOTH_STAGINGS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [EMBED, NORM, "model.layers.1.self_attn.k_proj.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(
    model: Decoder, staging: Staging, value: float, name: str
) -> None:
    for store in (WeightStore(model, staging=staging), arena_store(model, staging)):
        new = {key: tensor.clone() for key, tensor in published_tensors(model).items()}
        new[name].view(-1)[-1] = value
        transaction = store.begin(1)
        layout = layout_of(new)
        transaction.stage_buffer(layout, written(layout, new))
        with pytest.raises(WeightUpdateError, match=f"'{name}' holds NaN or an infinity"):
            transaction.prepare()
        assert (store.version, store.complete) == (0, staging == "shadow")
        assert transaction.prepare(check_finite=False).num_tensors == len(new)
        transaction.abort()
        if staging == "in_place":
            published_tensors(model)[name].view(-1)[-1] = 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_weights_whose_sum_overflows_are_finite(tiny_model_dir: TinyModelDir, dtype: torch.dtype) -> None:
    model = load_model(tiny_model_dir("qwen3"), dtype)
    for store in (WeightStore(model), arena_store(model)):
        new = {name: torch.full_like(t, torch.finfo(dtype).max) for name, t in published_tensors(model).items()}
        layout = layout_of(new)
        transaction = store.begin(1)
        transaction.stage_buffer(layout, written(layout, new))
        assert transaction.prepare().checksum == weights_checksum(new)
        transaction.abort()


@BOTH_STAGINGS
def test_corrupted_bytes_are_caught_and_can_be_sent_again(model: Decoder, staging: Staging) -> None:
    store = arena_store(model, staging)
    old, new = weights_checksum(published_tensors(model)), changed(model)
    expected = weights_checksum(new)
    layout = store.layout.published
    memory = written(layout, new)
    memory[entry_of(store, NORM).offset + 1] ^= 1
    transaction = store.begin(1)
    transaction.stage_buffer(layout, memory)
    with pytest.raises(WeightUpdateError, match=f"differs from the sender's {expected[:16]}"):
        transaction.prepare(expected)
    transaction.abort()
    assert store.complete is (staging == "shadow")
    if staging == "shadow":
        assert store.weights_checksum() == old
    again = store.begin(1)
    again.stage_buffer(layout, written(layout, new))
    assert again.prepare(expected).checksum == expected
    assert again.commit().version == 1


def test_what_is_staged_after_a_preparation_ends_it(tied: Decoder) -> None:
    store = arena_store(tied)
    new = changed(tied)
    transaction = store.begin(1)
    layout = layout_of(new)
    transaction.stage_buffer(layout, written(layout, new))
    prepared = transaction.prepare()
    transaction.stage(HEAD, new[EMBED])
    commit = transaction.commit()
    assert len(prepared.checksum) == 32 and len(commit.checksum) == 64, "the preparation no longer counted"


@BOTH_STAGINGS
def test_commits_swap_two_arenas_and_say_which_is_live(model: Decoder, staging: Staging) -> None:
    store = arena_store(model, staging)
    for version in range(1, 6):
        new = changed(model, 1.0 + 0.1 * version)
        layout = store.layout.published
        transaction = store.begin(version)
        transaction.stage_buffer(layout, written(layout, new))
        transaction.prepare()
        assert transaction.commit().seconds.keys() == {"swap", "repack"}
        assert store.live_index == (version % 2 if staging == "shadow" else 0)
        assert store._arenas[store.live_index].holds(model)
        assert weights_checksum(store._arenas[store.live_index].published) == weights_checksum(new)
        if version == 3:
            store.begin(9).abort()
    assert store.live_index == (1 if staging == "shadow" else 0)


def test_a_book_of_layouts_forgets_the_oldest(model: Decoder) -> None:
    store = arena_store(model)
    book = LayoutBook(store.layout, max_entries=60)
    new = changed(model)
    whole = layout_of(new)
    first = book.register(whole)
    assert book.find(first) == whole
    second = book.register(BufferLayout(whole.entries, whole.num_bytes + 64))
    assert book.find(first) == whole, "25 tensors each: both have room"
    third = book.register(BufferLayout(whole.entries, whole.num_bytes + 128))
    assert book.find(first).layout_id == first and book.find(third).layout_id == third
    with pytest.raises(WeightUpdateError, match=f"unknown layout '{second}'; register it"):
        book.find(second)
    with pytest.raises(WeightUpdateError, match="has no place"):
        book.register(one("foreign", "bfloat16", (1,)))
