from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unison.core.errors import CapacityError, RequestError
from unison.engine.kv_pool import Extent, KvPool
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


def make_pool(num_tokens: int, page_size: int = 4, poison: bool = False) -> KvPool:
    return KvPool(SPEC, num_tokens, page_size, torch.float32, poison_freed=poison)


def first_fit(owned: bytearray, num_pages: int) -> int | None:
    """The oracle: the first place where num_pages neighbouring pages are all free."""
    return next((i for i in range(len(owned) - num_pages + 1) if not any(owned[i : i + num_pages])), None)


def tokens_of(pool: KvPool, extent: Extent) -> torch.Tensor:
    return torch.stack([part[:, extent.start : extent.start + extent.capacity] for kv in pool.layers for part in kv])


@settings(deadline=None, max_examples=150)
@given(
    page_size=st.sampled_from([1, 3, 7, 16]),
    num_tokens=st.integers(1, 200),
    moves=st.lists(st.tuples(st.booleans(), st.integers(1, 60), st.integers(0, 1000)), max_size=60),
)
def test_allocation_is_first_fit_by_page(page_size: int, num_tokens: int, moves: list[tuple[bool, int, int]]) -> None:
    pool = make_pool(num_tokens, page_size)
    owned = bytearray(pool.num_pages)
    held: list[Extent] = []
    for is_free, size, pick in moves:
        if is_free and held:
            extent = held.pop(pick % len(held))
            pool.free(extent)
            owned[extent.first_page : extent.first_page + extent.num_pages] = bytes(extent.num_pages)
        elif -(-size // page_size) > pool.num_pages:
            with pytest.raises(CapacityError):
                pool.allocate(size)
        else:
            extent_or_none = pool.allocate(size)
            count = -(-size // page_size)
            place = first_fit(owned, count)
            assert (extent_or_none is None) == (place is None)
            if extent_or_none is not None and place is not None:
                assert extent_or_none == Extent(place, count, page_size)
                held.append(extent_or_none)
                owned[place : place + count] = b"\x01" * count
        pool.check()
        assert pool.num_free_pages == owned.count(0)
    for extent in held:
        pool.free(extent)
    pool.check()
    assert pool.allocate(pool.num_tokens) is not None


def test_an_extent_names_its_pages_and_tokens() -> None:
    extent = Extent(first_page=3, num_pages=2, page_size=16)
    assert (extent.start, extent.capacity, list(extent.page_table)) == (48, 32, [3, 4])


def test_the_pool_rounds_up_to_whole_pages() -> None:
    pool = make_pool(9, page_size=4)
    assert (pool.num_pages, pool.num_tokens) == (3, 12)


def test_a_fresh_extent_holds_zeros_whatever_lay_there_before() -> None:
    pool = make_pool(32)
    for keys, values in pool.layers:
        keys.fill_(torch.nan)
        values.fill_(torch.inf)
    extent = pool.allocate(10)
    assert extent is not None
    assert tokens_of(pool, extent).count_nonzero() == 0
    rest = torch.stack([kv[0][:, extent.capacity :] for kv in pool.layers])
    assert rest.isnan().all()


@pytest.mark.parametrize("poison", [True, False])
def test_freed_pages_are_poisoned_where_asked_for_and_zeroed_when_reused(poison: bool) -> None:
    pool = make_pool(32, poison=poison)
    first, second = pool.allocate(8), pool.allocate(8)
    assert first is not None and second is not None
    tokens_of(pool, second)
    pool.layers[0][0][:, second.start] = 3.0
    pool.free(first)
    assert bool(tokens_of(pool, first).isnan().all()) == poison
    assert pool.layers[0][0][0, second.start, 0] == 3.0
    again = pool.allocate(8)
    assert again == first
    assert tokens_of(pool, again).count_nonzero() == 0


def test_what_can_never_fit_is_refused_with_the_arithmetic() -> None:
    pool = make_pool(100, page_size=16)
    assert pool.check_fits(112) == 7
    with pytest.raises(CapacityError, match=r"113 tokens .* 8 pages of 16; the pool has 7") as failure:
        pool.check_fits(113)
    assert "engine.kv_tokens" in str(failure.value)
    assert isinstance(failure.value, RequestError)
    with pytest.raises(CapacityError):
        pool.allocate(1000)
    pool.check()


@pytest.mark.parametrize("num_tokens", [0, -3])
def test_an_extent_without_tokens_is_refused(num_tokens: int) -> None:
    pool = make_pool(16)
    with pytest.raises(ValueError, match="at least one"):
        pool.allocate(num_tokens)
    pool.check()


def test_fragmentation_makes_a_request_wait_until_neighbours_join() -> None:
    pool = make_pool(24, page_size=4)
    extents = [pool.allocate(8) for _ in range(3)]
    assert pool.allocate(1) is None
    first, middle, last = (extent for extent in extents if extent is not None)
    pool.free(first)
    pool.free(last)
    assert pool.num_free_pages == 4
    assert pool.allocate(16) is None, "four pages are free, but no four of them are neighbours"
    pool.free(middle)
    whole = pool.allocate(24)
    assert whole == Extent(0, 6, 4)


def test_a_page_is_freed_once_and_by_its_owner() -> None:
    pool = make_pool(32)
    extent = pool.allocate(8)
    assert extent is not None
    with pytest.raises(ValueError, match="is not allocated"):
        pool.free(Extent(extent.first_page, extent.num_pages + 1, extent.page_size))
    with pytest.raises(ValueError, match="is not allocated"):
        pool.free(Extent(extent.first_page + 1, 1, extent.page_size))
    pool.free(extent)
    with pytest.raises(ValueError, match="is not allocated"):
        pool.free(extent)
    pool.check()
    assert pool.num_free_pages == pool.num_pages


def test_the_integrity_check_sees_lost_and_doubly_owned_pages() -> None:
    pool = make_pool(32)
    extent = pool.allocate(8)
    assert extent is not None
    del pool._owned[extent.first_page]
    with pytest.raises(RuntimeError, match="2 page references beside the owners', 0 known"):
        pool.check(0)
    pool._owned = {4: Extent(4, 2, 4), 5: Extent(5, 2, 4)}
    with pytest.raises(RuntimeError, match="page 5 has two owners"):
        pool.check()
