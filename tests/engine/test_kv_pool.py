from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unison.core.errors import CapacityError, RequestError
from unison.engine.kv_pool import KvPool
from unison.models.spec import DecoderSpec, RopeSpec

SPEC = DecoderSpec(
    family="llama",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_positions=64,
    norm_epsilon=1e-5,
    rope=RopeSpec(theta=1e4),
    tied_embeddings=False,
)
PAGE_SIZES = pytest.mark.parametrize("page_size", [64, 128, 192])


def make_pool(num_pages: int, page_size: int = 64, poison: bool = False) -> KvPool:
    return KvPool(SPEC, num_pages * page_size, page_size, torch.float32, poison_freed=poison)


def page_of(pool: KvPool, page: int) -> Tensor:
    """A copy of everything a page holds: [layers * 2, tokens, heads * D]."""
    blocks = pool.blocks_of([page])
    held = torch.stack([part[blocks] for layer in pool.layers for part in layer])
    return held.transpose(2, 3).reshape(len(held), pool.page_size, -1)


def fill(pool: KvPool, page: int, value: float) -> None:
    for layer in pool.layers:
        for part in layer:
            part[pool.blocks_of([page])] = value


@dataclass
class Model:
    """The oracle: who holds each page, and what was last written to each of its tokens."""

    num_pages: int
    page_size: int
    sequences: list[list[int]] = field(default_factory=list)
    cached: Counter[int] = field(default_factory=Counter)
    contents: dict[int, list[float]] = field(default_factory=dict)

    def used(self) -> set[int]:
        return {page for pages in self.sequences for page in pages} | set(+self.cached)

    def free(self) -> list[int]:
        return [page for page in range(self.num_pages) if page not in self.used()]

    def forget_freed(self, pool: KvPool) -> None:
        for page in set(self.contents) - self.used():
            del self.contents[page]
            assert bool(page_of(pool, page).isnan().all()), "a freed page is not poisoned"


def do_one(pool: KvPool, model: Model, move: str, size: int, pick: int) -> None:
    """One move on the pool and on the oracle."""
    sequences = model.sequences
    one = sequences[pick % len(sequences)] if sequences else []
    if move == "allocate":
        expected = model.free()[:size] if len(model.free()) >= size else None
        assert pool.allocate(size) == expected
        if expected is not None:
            sequences.append(expected)
            model.contents |= {page: [0.0] * model.page_size for page in expected}
    elif move == "share" and one:
        shared = one[:size]
        pool.share(shared if pick % 2 else tuple(shared))
        sequences.append(list(shared))
    elif move == "free" and sequences:
        pool.free(sequences.pop(pick % len(sequences)))
    elif move == "retain" and one:
        pool.retain(one[:size])
        model.cached.update(one[:size])
    elif move == "release" and +model.cached:
        page = sorted(+model.cached)[pick % len(+model.cached)]
        model.cached[page] -= 1
        assert pool.release([page]) == (page not in model.used())
    elif move == "copy" and len(model.contents) > 1:
        pages = sorted(model.contents)
        source, target = pages[pick % len(pages)], pages[(pick + 1) % len(pages)]
        count = size * 37 % (model.page_size + 1)
        pool.copy(source, target, count)
        model.contents[target][:count] = model.contents[source][:count]
    elif move == "write" and model.contents:
        page = sorted(model.contents)[pick % len(model.contents)]
        fill(pool, page, float(pick))
        model.contents[page] = [float(pick)] * model.page_size
    model.forget_freed(pool)


MOVES = st.tuples(
    st.sampled_from(["allocate", "allocate", "share", "free", "retain", "release", "copy", "write", "write"]),
    st.integers(1, 6),
    st.integers(0, 1000),
)


@settings(deadline=None, max_examples=120)
@given(page_size=st.sampled_from([64, 128, 192]), num_pages=st.integers(1, 14), moves=st.lists(MOVES, max_size=50))
def test_any_moves_leave_the_pool_as_the_books_say(
    page_size: int, num_pages: int, moves: list[tuple[str, int, int]]
) -> None:
    pool, model = make_pool(num_pages, page_size, poison=True), Model(num_pages, page_size)
    for move, size, pick in moves:
        do_one(pool, model, move, size, pick)
        pool.check(model.cached.total(), model.sequences)
        owned = {page for pages in model.sequences for page in pages}
        assert pool.num_free_pages == len(model.free())
        assert pool.num_cached_pages == len(model.used() - owned)
        assert pool.num_only_cached(sorted(model.used())) == len(model.used() - owned)
        for page, tokens in model.contents.items():
            held = page_of(pool, page)
            assert torch.equal(held, torch.tensor(tokens)[None, :, None].expand_as(held))
    for pages in model.sequences:
        pool.free(pages)
    for page, count in model.cached.items():
        for _ in range(count):
            pool.release([page])
    pool.check(0, [])
    assert pool.allocate(num_pages) == list(range(num_pages))


@PAGE_SIZES
def test_a_page_is_made_of_the_attention_blocks_of_its_place(page_size: int) -> None:
    pool, per_page = make_pool(5, page_size), page_size // 64
    assert pool.layers[0][0].shape == (5 * per_page, SPEC.num_kv_heads, 64, SPEC.head_dim)
    assert pool.blocks_of([3, 0]) == [*range(3 * per_page, 4 * per_page), *range(per_page)]
    assert pool.blocks_of([]) == []


def test_the_pool_rounds_up_to_whole_pages() -> None:
    pool = KvPool(SPEC, 257, 128, torch.float32)
    assert (pool.num_pages, pool.num_tokens) == (3, 384)
    assert [pool.pages_for(count) for count in (0, 1, 127, 128, 129)] == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("page_size", [0, -64, 1, 16, 63, 65, 100])
def test_pages_are_whole_attention_blocks(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size={page_size} is no multiple of 64"):
        KvPool(SPEC, 1024, page_size, torch.float32)


def test_fresh_pages_hold_zeros_whatever_lay_there_before() -> None:
    pool = make_pool(4)
    for keys, values in pool.layers:
        keys.fill_(torch.nan)
        values.fill_(torch.inf)
    pages = pool.allocate(3)
    assert pages == [0, 1, 2]
    assert all(page_of(pool, page).count_nonzero() == 0 for page in pages)
    assert not page_of(pool, 3).isfinite().any()


@PAGE_SIZES
@pytest.mark.parametrize("poison", [True, False])
def test_freed_pages_are_poisoned_where_asked_for_and_zeroed_when_reused(page_size: int, poison: bool) -> None:
    pool = make_pool(4, page_size, poison=poison)
    first, second = pool.allocate(2), pool.allocate(1)
    assert first == [0, 1] and second == [2]
    for page in range(3):
        fill(pool, page, 3.0)
    pool.share([1])
    pool.free(first)
    assert bool(page_of(pool, 0).isnan().all()) == poison
    assert bool((page_of(pool, 1) == 3).all()) and bool((page_of(pool, 2) == 3).all()), "others are left alone"
    assert pool.allocate(2) == [0, 3]
    assert page_of(pool, 0).count_nonzero() == 0


@PAGE_SIZES
def test_a_copy_brings_the_tokens_asked_for_and_no_more(page_size: int) -> None:
    pool = make_pool(3, page_size)
    pool.allocate(3)
    source = torch.randn(page_of(pool, 1).shape)
    for i, part in enumerate(part for layer in pool.layers for part in layer):
        part[pool.blocks_of([1])] = source[i].view(-1, 64, 1, SPEC.head_dim).transpose(1, 2)
    assert torch.equal(page_of(pool, 1), source)
    for count in (0, 1, 63, 64, page_size - 1, page_size):
        fill(pool, 2, 9.0)
        pool.copy(1, 2, count)
        assert torch.equal(page_of(pool, 2)[:, :count], source[:, :count])
        assert bool((page_of(pool, 2)[:, count:] == 9).all())
        assert torch.equal(page_of(pool, 1), source)
        assert page_of(pool, 0).count_nonzero() == 0


def test_what_can_never_fit_is_refused_with_the_arithmetic() -> None:
    pool = make_pool(7)
    assert pool.check_fits(7 * 64) == 7
    with pytest.raises(CapacityError, match=r"449 tokens .* 8 pages of 64; the pool has 7") as failure:
        pool.check_fits(449)
    assert "engine.kv_tokens" in str(failure.value)
    assert isinstance(failure.value, RequestError)
    assert pool.allocate(8) is None
    pool.check(0, [])


@pytest.mark.parametrize("count", [0, -3])
def test_no_pages_cannot_be_allocated(count: int) -> None:
    pool = make_pool(2)
    with pytest.raises(ValueError, match="at least one"):
        pool.allocate(count)
    pool.check(0, [])


def test_pages_need_not_be_neighbours() -> None:
    pool = make_pool(6)
    for page in range(6):
        assert pool.allocate(1) == [page]
    pool.free([1])
    pool.free([4])
    pool.free([2])
    assert pool.allocate(4) is None
    assert pool.allocate(3) == [1, 2, 4]


def test_a_page_is_given_back_once_for_each_time_it_was_taken() -> None:
    pool = make_pool(4)
    pages = pool.allocate(2)
    assert pages is not None
    with pytest.raises(ValueError, match="not all a sequence's"):
        pool.free([*pages, 2])
    with pytest.raises(ValueError, match="not all in use"):
        pool.share([3])
    with pytest.raises(ValueError, match="not all in use"):
        pool.retain([0, 3])
    pool.retain(pages)
    pool.free(pages)
    with pytest.raises(ValueError, match="not all a sequence's"):
        pool.free(pages)
    pool.check(2, [])
    assert pool.release(pages) == 2
    with pytest.raises(ValueError, match="not all in use"):
        pool.release(pages)
    pool.check(0, [])
    assert pool.num_free_pages == pool.num_pages


def test_the_integrity_check_sees_pages_lost_and_pages_held_twice() -> None:
    pool = make_pool(4)
    pages = pool.allocate(2)
    assert pages == [0, 1]
    pool.check(0, [pages])
    with pytest.raises(RuntimeError, match="page 0 has 0 owners and is counted as having 1"):
        pool.check(0, [])
    with pytest.raises(RuntimeError, match="page 1 has 2 owners and is counted as having 1"):
        pool.check(0, [pages, [1]])
    with pytest.raises(RuntimeError, match="holds a page twice"):
        pool.check(0, [[0, 1, 1]])
    pool.retain([1])
    with pytest.raises(RuntimeError, match="1 page references beside the owners', 0 known"):
        pool.check(0, [pages])
    pool._references[0] = 0
    with pytest.raises(RuntimeError, match="page 0 is owned but counted as free"):
        pool.check(1, [pages])
