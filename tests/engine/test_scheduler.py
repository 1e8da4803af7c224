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
from unison.engine.scheduler import Chunk, Scheduler
from unison.engine.sequence import Sequence
from unison.ops.padding import EXACT, FAST, NumericsPath


@dataclass(frozen=True)
class Job:
    num_prompt: int
    num_new: int
    num_prior: int = 0
    arrives_at: int = 0
    aborted_at: int | None = None


def make_scheduler(path: NumericsPath = EXACT, **config: int) -> Scheduler:
    settings = {"kv_tokens": 256, "page_size": 8} | config
    chosen = EngineConfig(**settings)  # type: ignore[arg-type]
    return Scheduler(chosen, KvPool(SPEC, chosen.kv_tokens, chosen.page_size, torch.float32), path)


def make_sequence(name: str, job: Job) -> Sequence:
    wanted = request(name, prompt=[1] * job.num_prompt, output=[2] * job.num_prior, max_new_tokens=job.num_new)
    return Sequence(wanted, seed=0, max_new_tokens=job.num_new, end_ids=frozenset(), detokenizer=None)


def compute(chunks: list[Chunk]) -> None:
    """What the model and the sampler would do."""
    for chunk in chunks:
        samples = chunk.samples
        chunk.sequence.record_cached(chunk.count, version=0)
        if samples:
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
    """Chunks come in the order of the pool, and each reads inside its own extent only."""
    scheduler._pool.check()
    starts = []
    for chunk in chunks:
        extent = chunk.sequence.extent
        assert extent is not None
        starts.append(extent.start)
        assert EXACT.pad_keys(chunk.start + chunk.count) <= extent.capacity
    assert starts == sorted(starts)


jobs = st.lists(
    st.builds(
        Job,
        num_prompt=st.integers(1, 60),
        num_new=st.integers(0, 30),
        num_prior=st.integers(0, 4),
        arrives_at=st.integers(0, 40),
        aborted_at=st.one_of(st.none(), st.integers(0, 60)),
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None, max_examples=150)
@given(
    work=jobs,
    max_running=st.integers(1, 12),
    max_batch_tokens=st.integers(8, 40),
    prefill_chunk=st.sampled_from([1, 3, 16, 512]),
    page_size=st.sampled_from([1, 7, 16, 4096]),
    kv_tokens=st.integers(96, 400),
)
def test_every_request_is_answered_once_within_all_limits(
    work: list[Job], max_running: int, max_batch_tokens: int, prefill_chunk: int, page_size: int, kv_tokens: int
) -> None:
    config = EngineConfig(
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        prefill_chunk=prefill_chunk,
        page_size=page_size,
        kv_tokens=kv_tokens,
    )
    pool = KvPool(SPEC, config.kv_tokens, config.page_size, torch.float32)
    scheduler = Scheduler(config, pool, EXACT)
    sequences = {f"r{i}": make_sequence(f"r{i}", job) for i, job in enumerate(work)}
    arrivals = sorted(sequences, key=lambda name: work[int(name[1:])].arrives_at)
    finished: list[Sequence] = []
    admitted: list[str] = []
    # Each step computes a token of something, so work ends within the number of tokens there are.
    for step in range(41 + sum(job.num_prompt + job.num_new + job.num_prior for job in work)):
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
        compute(chunks)
        finished += scheduler.remove_finished()
        if not arrivals and not scheduler.has_work:
            break
    assert sorted(s.request_id for s in finished) == sorted(sequences)
    assert all(s.extent is None for s in finished)
    assert pool.num_free_pages == pool.num_pages
    for sequence, job in zip(sequences.values(), work, strict=True):
        if sequence.finish_reason == "length":
            assert sequence.num_output == max(job.num_new, job.num_prior)
    arrived = sorted(admitted, key=lambda name: work[int(name[1:])].arrives_at)
    assert admitted == arrived, "admission is first come, first served"


def test_decoding_goes_first_and_prompts_take_the_rest_in_order() -> None:
    scheduler = make_scheduler(max_batch_tokens=8, prefill_chunk=6, kv_tokens=512)
    sequences = [make_sequence(f"r{i}", Job(length, 9)) for i, length in enumerate((1, 10, 10))]
    for sequence in sequences:
        scheduler.add(sequence)
    counts = []
    for _ in range(4):
        chunks = scheduler.schedule()
        counts.append({chunk.sequence.request_id: (chunk.start, chunk.count) for chunk in chunks})
        compute(chunks)
    assert counts == [
        {"r0": (0, 1), "r1": (0, 6), "r2": (0, 1)},
        {"r0": (1, 1), "r1": (6, 4), "r2": (1, 3)},
        {"r0": (2, 1), "r1": (10, 1), "r2": (4, 6)},
        {"r0": (3, 1), "r1": (11, 1), "r2": (10, 1)},
    ]


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    scheduler = make_scheduler(kv_tokens=128, page_size=16, max_batch_tokens=64)
    running, large, small = (make_sequence(name, Job(n, 2)) for name, n in (("a", 20), ("b", 127), ("c", 1)))
    for sequence in (running, large, small):
        scheduler.add(sequence)
    assert [chunk.sequence for chunk in scheduler.schedule()] == [running]
    assert [s.request_id for s in scheduler.waiting] == ["b", "c"]
    running.finish("abort")
    assert scheduler.remove_finished() == [running]
    assert [chunk.sequence for chunk in scheduler.schedule()] == [large]


def test_extents_hold_the_padded_keys_of_the_longest_answer() -> None:
    exact, fast = make_scheduler(EXACT), make_scheduler(FAST)
    sequence = make_sequence("r", Job(num_prompt=30, num_new=4))
    assert sequence.max_tokens == 33, "the last token is sampled and never read"
    assert exact.extent_tokens(sequence) == 64
    assert fast.extent_tokens(sequence) == 33


def test_what_never_fits_is_refused_when_it_is_queued() -> None:
    scheduler = make_scheduler(kv_tokens=96, page_size=16)
    with pytest.raises(CapacityError, match="128 tokens"):
        scheduler.add(make_sequence("r", Job(num_prompt=90, num_new=8)))
    assert not scheduler.has_work
    scheduler.add(make_sequence("r", Job(num_prompt=90, num_new=7)))
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
