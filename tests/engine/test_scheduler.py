"""The scheduler as a state machine, driven without a model: every chunk is taken as computed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.support import request
from tests.engine.test_kv_pool import SPEC
from unison.config.schema import EngineConfig
from unison.core.errors import CapacityError, RequestError
from unison.engine.kv_pool import KvPool
from unison.engine.prefix_cache import PrefixCache
from unison.engine.scheduler import Chunk, Scheduler
from unison.engine.sequence import Sequence


@dataclass(frozen=True)
class Job:
    num_prompt: int
    num_new: int
    num_prior: int = 0
    arrives_at: int = 0
    aborted_at: int | None = None


def make_scheduler(**config: int) -> Scheduler:
    chosen = EngineConfig(**({"kv_tokens": 1024} | config))  # type: ignore[arg-type]
    return Scheduler(chosen, KvPool(SPEC, chosen.kv_tokens, chosen.page_size, torch.float32))


def make_sequence(name: str, job: Job) -> Sequence:
    wanted = request(name, prompt=[1] * job.num_prompt, output=[2] * job.num_prior, max_new_tokens=job.num_new)
    return Sequence(wanted, seed=0, max_new_tokens=job.num_new, end_ids=frozenset(), detokenizer=None)


def compute(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    """What the model, the sampler and the engine would do."""
    for chunk in chunks:
        samples = chunk.samples
        chunk.sequence.record_cached(chunk.count, version=0)
        if samples:
            if len(chunk.sequence.token_ids) == chunk.sequence.num_prior:
                scheduler.cache_tokens(chunk.sequence, 0)
            chunk.sequence.append(7, -1.0, 0)


def check_step(scheduler: Scheduler, chunks: list[Chunk], config: EngineConfig) -> None:
    assert sum(chunk.count for chunk in chunks) <= config.max_batch_tokens
    assert len(scheduler.running) <= config.max_running
    assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
    for chunk in chunks:
        assert chunk.sequence in scheduler.running
        assert chunk.start == chunk.sequence.num_cached
        assert 1 <= chunk.count <= min(chunk.sequence.num_uncached, config.prefill_chunk)
    scheduled = {id(chunk.sequence) for chunk in chunks}
    assert all(id(s) in scheduled for s in scheduler.running if s.num_uncached == 1), "a decoding sequence was left out"
    check_places(scheduler, chunks)


def check_places(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    """Decoding comes first; each sequence has the pages of its tokens, and none is written by two."""
    pool, cache = scheduler._pool, scheduler._cache
    pool.check(cache.check() if cache is not None else 0, [s.pages for s in scheduler.running])
    counts = [chunk.count for chunk in chunks]
    assert all(count == 1 for count in counts[: counts.count(1)])
    written: list[int] = []
    for chunk in chunks:
        pages, end = chunk.sequence.pages, chunk.start + chunk.count
        assert len(pages) == pool.pages_for(len(chunk.sequence.token_ids))
        written += pages[chunk.start // pool.page_size : pool.pages_for(end)]
    assert len(set(written)) == len(written)
    others = [page for s in scheduler.running for page in s.pages]
    assert all(others.count(page) == 1 for page in written), "a page that others read is written"


jobs = st.lists(
    st.builds(
        Job,
        num_prompt=st.one_of(st.integers(1, 200), st.sampled_from([63, 64, 65, 128, 129])),
        num_new=st.integers(0, 80),
        num_prior=st.integers(0, 4),
        arrives_at=st.integers(0, 40),
        aborted_at=st.one_of(st.none(), st.integers(0, 60)),
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None, max_examples=100)
@given(
    work=jobs,
    max_running=st.integers(1, 12),
    max_batch_tokens=st.integers(8, 80),
    prefill_chunk=st.sampled_from([3, 16, 512]),
    page_size=st.sampled_from([64, 128, 192, 4096]),
    kv_tokens=st.integers(320, 900),
    new_token_ratio=st.sampled_from([0.01, 0.7, 1.0]),
    is_cached=st.booleans(),
)
def test_every_request_is_answered_once_within_all_limits(
    work: list[Job],
    max_running: int,
    max_batch_tokens: int,
    prefill_chunk: int,
    page_size: int,
    kv_tokens: int,
    new_token_ratio: float,
    is_cached: bool,
) -> None:
    config = EngineConfig(
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        prefill_chunk=prefill_chunk,
        page_size=page_size,
        kv_tokens=kv_tokens,
        new_token_ratio=new_token_ratio,
    )
    pool = KvPool(SPEC, config.kv_tokens, config.page_size, torch.float32)
    cache = PrefixCache(pool, page_size) if is_cached else None
    scheduler = Scheduler(config, pool, cache)
    sequences = {f"r{i}": make_sequence(f"r{i}", job) for i, job in enumerate(work)}
    arrivals = sorted(sequences, key=lambda name: work[int(name[1:])].arrives_at)
    finished: list[Sequence] = []
    admitted: list[str] = []
    num_tokens = sum(job.num_prompt + job.num_new + job.num_prior for job in work)
    # Each step computes a token of something; what is pushed back is computed again.
    for step in range(41 + num_tokens * (1 if new_token_ratio == 1 else 5)):
        while arrivals and work[int(arrivals[0][1:])].arrives_at <= step:
            scheduler.add(sequences[arrivals.pop(0)])
        for i, job in enumerate(work):
            sequence = sequences[f"r{i}"]
            if job.aborted_at == step and f"r{i}" not in arrivals and sequence.finish_reason is None:
                sequence.finish("abort")
        finished += scheduler.remove_finished()
        had_work = scheduler.has_work
        chunks = scheduler.schedule()
        assert bool(chunks) == had_work, "there is work, and nothing of it is done"
        check_step(scheduler, chunks, config)
        admitted += [s.request_id for s in scheduler.running if s.request_id not in admitted]
        compute(scheduler, chunks)
        finished += scheduler.remove_finished()
        if not arrivals and not scheduler.has_work:
            break
    assert sorted(s.request_id for s in finished) == sorted(sequences)
    assert all(s.pages == [] for s in finished)
    if cache is not None:
        cache.clear()
    assert pool.num_free_pages == pool.num_pages
    assert new_token_ratio < 1 or scheduler.num_retractions == 0
    for sequence, job in zip(sequences.values(), work, strict=True):
        if sequence.finish_reason == "length":
            assert sequence.num_output == max(job.num_new, job.num_prior)
    arrived = sorted(admitted, key=lambda name: work[int(name[1:])].arrives_at)
    # With a cache some wait for their own prompt, which an earlier one is computing.
    assert admitted == arrived or is_cached, "admission is first come, first served"


def test_decoding_goes_first_and_prompts_take_the_rest_in_order() -> None:
    scheduler = make_scheduler(max_batch_tokens=8, prefill_chunk=6, kv_tokens=512)
    sequences = [make_sequence(f"r{i}", Job(length, 9)) for i, length in enumerate((1, 10, 10))]
    for sequence in sequences:
        scheduler.add(sequence)
    counts = []
    for _ in range(4):
        chunks = scheduler.schedule()
        counts.append({chunk.sequence.request_id: (chunk.start, chunk.count) for chunk in chunks})
        compute(scheduler, chunks)
    assert counts == [
        {"r0": (0, 1), "r1": (0, 6), "r2": (0, 1)},
        {"r0": (1, 1), "r1": (6, 4), "r2": (1, 3)},
        {"r0": (2, 1), "r1": (10, 1), "r2": (4, 6)},
        {"r0": (3, 1), "r1": (11, 1), "r2": (10, 1)},
    ]


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    scheduler = make_scheduler(kv_tokens=128, page_size=64, max_batch_tokens=64)
    running, large, small = (make_sequence(name, Job(n, 2)) for name, n in (("a", 20), ("b", 127), ("c", 1)))
    for sequence in (running, large, small):
        scheduler.add(sequence)
    assert [chunk.sequence for chunk in scheduler.schedule()] == [running]
    assert [s.request_id for s in scheduler.waiting] == ["b", "c"]
    running.finish("abort")
    assert scheduler.remove_finished() == [running]
    assert [chunk.sequence for chunk in scheduler.schedule()] == [large]


@pytest.mark.parametrize("page_size", [64, 128])
def test_a_sequence_grows_page_by_page(page_size: int) -> None:
    scheduler = make_scheduler(page_size=page_size)
    sequence = make_sequence("r", Job(num_prompt=70, num_new=2 * page_size))
    assert sequence.max_tokens == 69 + 2 * page_size, "the last token is sampled and never read"
    scheduler.add(sequence)
    tables = []
    while not sequence.finish_reason:
        compute(scheduler, scheduler.schedule())
        tables.append(list(sequence.pages))
        assert len(tables[-1]) == scheduler._pool.pages_for(sequence.num_cached)
    assert [len(table) for table in tables] == sorted(len(table) for table in tables)
    assert all(tables[-1][: len(table)] == table for table in tables), "what it has stays where it is"
    assert len(tables[-1]) == scheduler._pool.pages_for(sequence.max_tokens)


def test_admission_counts_the_pages_that_answers_will_probably_fill() -> None:
    scheduler = make_scheduler(kv_tokens=4 * 64)
    first = make_sequence("a", Job(num_prompt=60, num_new=100))
    assert scheduler.expected_pages(first) == 3, "60 and 0.7 of 100 tokens"
    for sequence in (first, make_sequence("b", Job(60, 8)), make_sequence("c", Job(1, 1))):
        scheduler.add(sequence)
    assert [chunk.sequence.request_id for chunk in scheduler.schedule()] == ["a"]
    assert [s.request_id for s in scheduler.waiting] == ["b", "c"], "three of the four pages are promised"


def test_what_never_fits_is_refused_when_it_is_queued() -> None:
    scheduler = make_scheduler(kv_tokens=128)
    with pytest.raises(CapacityError, match=r"129 tokens .* 3 pages of 64; the pool has 2"):
        scheduler.add(make_sequence("r", Job(num_prompt=90, num_new=40)))
    assert not scheduler.has_work
    scheduler.add(make_sequence("r", Job(num_prompt=90, num_new=39)))
    assert len(scheduler.schedule()) == 1


def test_a_full_queue_refuses_more() -> None:
    scheduler = make_scheduler(max_waiting=2, max_running=1)
    for name in ("a", "b"):
        scheduler.add(make_sequence(name, Job(4, 4)))
    with pytest.raises(RequestError, match="2 requests are waiting already"):
        scheduler.add(make_sequence("c", Job(4, 4)))
    scheduler.schedule()
    scheduler.add(make_sequence("c", Job(4, 4)))
    assert [s.request_id for s in scheduler.waiting] == ["b", "c"]
