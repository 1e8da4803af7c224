from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unison.core.errors import WorkerError
from unison.processes import pool as pool_module
from unison.processes.pool import Failed, WorkerPool

TARGET = "tests.processes.hostile:open_hostile"
HANGS = ["sleep_with_signals_blocked", "endless_loop", "catastrophic_regex", "nested_powers", "long_number"]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(TARGET, size=2, memory_mb=512) as opened:
        yield opened


def ask(pool: WorkerPool, name: str, timeout_s: float = 20.0, seed: int = 0) -> bytes | Failed:
    return pool.submit(name.encode(), timeout_s=timeout_s, seed=seed).result(60)


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pids: list[int]) -> list[int]:
    until = time.monotonic() + 5
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < until:
        time.sleep(0.01)
    return left


@pytest.mark.parametrize("name", HANGS)
def test_a_call_that_hangs_ends_at_its_deadline_and_the_next_one_is_answered(pool: WorkerPool, name: str) -> None:
    started = time.monotonic()
    outcome = ask(pool, name, timeout_s=0.3)
    assert outcome == Failed("timeout", "ran past its limit of 0.3 s")
    assert 0.3 <= time.monotonic() - started < 2
    assert ask(pool, "ping") == b"ping"


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("segfault", "crash", "SIGSEGV"),
        ("exit_now", "crash", "exit status 3"),
        ("memory_hog", "memory", "out of memory: MemoryError"),
        ("recursion", "error", "RecursionError"),
        ("raises", "error", r"ValueError: no number here \(at hostile.py:\d+\)"),
        ("wrong_type", "error", "TypeError"),
        ("sys_exit", "error", "SystemExit: enough"),
        ("closes_descriptors", "crash", "exit status"),
        ("writes_into_the_channel", "crash", "it wrote"),
        ("huge_answer", "error", "answered 17825792 bytes"),
    ],
)
def test_what_goes_wrong_in_a_call_is_its_outcome(pool: WorkerPool, name: str, kind: str, told: str) -> None:
    outcome = ask(pool, name)
    assert isinstance(outcome, Failed) and outcome.kind == kind, outcome
    pytest.raises(AssertionError, match=told).matches(AssertionError(outcome.reason))
    assert ask(pool, "ping") == b"ping"


def test_what_the_code_prints_and_reads_stays_off_the_channel(pool: WorkerPool) -> None:
    assert ask(pool, "print_a_lot") == b"printed"
    assert ask(pool, "reads_stdin") == b"''"
    assert ask(pool, "ping") == b"ping"


def test_a_child_that_comes_back_from_a_fork_answers_nothing(pool: WorkerPool) -> None:
    assert [ask(pool, "fork_and_return") for _ in range(4)] == [b"parent"] * 4
    assert ask(pool, "ping") == b"ping"


def test_a_worker_is_bounded_and_by_itself(pool: WorkerPool) -> None:
    outcome = ask(pool, "limits")
    assert isinstance(outcome, bytes)
    core, leads_session, hash_of_a = outcome.split()
    assert (core, leads_session) == (b"0", b"True")
    assert {ask(pool, "limits") for _ in range(8)} == {outcome}, "the hash seed differs between workers"
    assert int(hash_of_a) != hash("a") or os.environ.get("PYTHONHASHSEED") == "0"
    assert ask(pool, "loaded") == b""


def test_random_numbers_are_those_of_the_seed_whoever_draws_them(pool: WorkerPool) -> None:
    drawn = [ask(pool, "draw", seed=seed) for seed in (7, 8, 7, 8, 7)]
    assert drawn == [str(random.Random(seed).random()).encode() for seed in (7, 8, 7, 8, 7)]


def test_a_worker_killed_from_outside_loses_its_call_alone(pool: WorkerPool) -> None:
    before = pool.num_restarts
    futures = [pool.submit(b"sleep 0.5", timeout_s=20) for _ in range(2)]
    time.sleep(0.15)
    victim, *_ = pool.pids
    os.kill(victim, signal.SIGKILL)
    outcomes = [future.result(30) for future in futures]
    lost = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    if lost:  # it may have been a spare one
        assert [(one.kind, "killed from outside" in one.reason) for one in lost] == [("crash", True)]
        assert pool.num_restarts == before + 1
    assert ask(pool, "ping") == b"ping"


def test_one_killed_while_idle_is_replaced_before_the_next_call() -> None:
    with WorkerPool(TARGET, size=1) as single:
        victim = single.pids[0]
        os.kill(victim, signal.SIGKILL)
        assert not wait_until_dead([victim])
        assert ask(single, "ping") == b"ping"
        assert single.num_restarts == 1


def test_twenty_hangs_among_two_hundred_calls_cost_only_themselves() -> None:
    limit_s, work_s = 0.4, 0.02
    hangs = {i: HANGS[i % len(HANGS)].encode() for i in range(0, 200, 10)}
    calls = [hangs.get(i, b"sleep %f" % work_s) for i in range(200)]

    async def run(pool: WorkerPool) -> tuple[list[bytes | Failed], float, float]:
        lag_s = 0.0

        async def watch() -> None:
            nonlocal lag_s
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.005)
                lag_s = max(lag_s, time.monotonic() - before - 0.005)

        watcher = asyncio.create_task(watch())
        started = time.monotonic()
        found = await asyncio.gather(*(pool.call(call, timeout_s=limit_s) for call in calls))
        spent_s = time.monotonic() - started
        watcher.cancel()
        return list(found), spent_s, lag_s

    with WorkerPool(TARGET, size=2) as pool:
        started = time.monotonic()
        for future in [pool.submit(call, timeout_s=20) for i, call in enumerate(calls) if i not in hangs]:
            future.result()
        without_s = time.monotonic() - started
        found, spent_s, lag_s = asyncio.run(run(pool))
        assert [isinstance(outcome, Failed) for outcome in found] == [i in hangs for i in range(200)]
        assert pool.num_restarts == 20
        assert ask(pool, "ping") == b"ping"
    assert spent_s < 1.3 * without_s + 20 * limit_s / 2
    assert lag_s < 0.1


def test_processes_that_a_call_leaves_behind_end_with_its_worker() -> None:
    with WorkerPool(TARGET, size=1) as single:
        outcome = ask(single, "leave_children")
        assert isinstance(outcome, bytes)
        left = [int(pid) for pid in outcome.split()]
        assert all(map(alive, left))
        assert isinstance(ask(single, "endless_loop", timeout_s=0.2), Failed)
        assert not wait_until_dead(left)
        outcome = ask(single, "leave_children")
        assert isinstance(outcome, bytes)
        left = [int(pid) for pid in outcome.split()] + single.pids
    assert not wait_until_dead(left)


def test_a_thousand_calls_leave_no_process_thread_or_descriptor() -> None:
    def state() -> tuple[int, int, set[int]]:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return threading.active_count(), len(os.listdir("/proc/self/fd")), {int(pid) for pid in children}

    before = state()
    with WorkerPool(TARGET, size=2) as pool:
        futures = [pool.submit(b"%d" % i, timeout_s=20) for i in range(1000)]
        futures += [pool.submit(name, timeout_s=0.2) for name in (b"segfault", b"endless_loop", b"raises") * 2]
        assert [future.result() for future in futures[:1000]] == [b"%d" % i for i in range(1000)]
        assert all(isinstance(future.result(), Failed) for future in futures[1000:])
    assert state() == before


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        (b"raises", r"RuntimeError: no licence \(at hostile.py:\d+\)"),
        (b"dies", "exit status 7"),
        (b"hangs", "was not ready 0.5 s after its start"),
    ],
)
def test_a_service_that_cannot_be_opened_says_why(argument: bytes, told: str) -> None:
    with pytest.raises(WorkerError, match=told):
        WorkerPool(TARGET, argument, size=2, start_timeout_s=0.5 if argument == b"hangs" else 60)


def test_too_little_memory_to_start_is_said() -> None:
    with pytest.raises(WorkerError, match=r"MemoryError|could not start"):
        WorkerPool("unison.rewards.service:open_service", size=1, memory_mb=10)


def test_workers_that_can_no_longer_be_started_end_the_calls_with_the_reason(tmp_path: Path) -> None:
    with WorkerPool(TARGET, b"once " + bytes(tmp_path / "seen"), size=1) as single:
        assert isinstance(ask(single, "endless_loop", timeout_s=0.1), Failed)
        with pytest.raises(WorkerError, match="not again"):
            ask(single, "ping")


def test_a_deadline_counts_from_the_begin_of_the_call_not_from_its_place_in_the_queue() -> None:
    with WorkerPool(TARGET, size=1) as single:
        futures = [single.submit(b"sleep 0.2", timeout_s=0.6) for _ in range(5)]
        assert [future.result() for future in futures] == [b"sleep 0.2"] * 5


def test_a_wait_without_end_is_an_error_that_names_the_workers() -> None:
    with WorkerPool(TARGET, size=1, max_wait_s=0.1) as single:
        first = single.submit(b"sleep 0.3", timeout_s=20)
        second = single.submit(b"ping", timeout_s=20)
        assert first.result() == b"sleep 0.3"
        with pytest.raises(WorkerError, match=rf"waited 0 s for one of 1 workers \(processes {single.pids[0]}\)"):
            second.result()


def test_closing_ends_calls_under_way_and_waiting_ones_at_once() -> None:
    pool = WorkerPool(TARGET, size=1)
    futures = [pool.submit(b"endless_loop", timeout_s=100) for _ in range(3)]
    time.sleep(0.1)
    started = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - started < 2
    for future in futures:
        with pytest.raises(WorkerError, match="closed"):
            future.result(0)
    with pytest.raises(WorkerError, match="closed"):
        pool.submit(b"ping", timeout_s=1)


def test_a_cancelled_call_is_not_made() -> None:
    with WorkerPool(TARGET, size=1) as single:
        first = single.submit(b"sleep 0.2", timeout_s=20)
        second = single.submit(b"exit_now", timeout_s=20)
        assert second.cancel()
        assert first.result() == b"sleep 0.2"
        assert ask(single, "ping") == b"ping"
        assert single.num_restarts == 0


def test_a_pool_that_nobody_holds_any_more_closes_itself() -> None:
    pool = WorkerPool(TARGET, size=1)
    pids = pool.pids
    del pool
    assert not wait_until_dead(pids)


PARENT = """
import os, sys, time
from unison.processes.pool import WorkerPool
pool = WorkerPool("tests.processes.hostile:open_hostile", size=2)
left = pool.submit(b"leave_children", timeout_s=20).result()
group_member, away = left.split()
hanging = pool.submit(b"endless_loop", timeout_s=1000)
time.sleep(0.2)
print(*pool.pids, group_member.decode(), away.decode(), flush=True)
hanging.result()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_parent_that_is_killed_leaves_nothing(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 4
    process.send_signal(number)
    process.wait(20)
    *ended, away = pids
    assert not wait_until_dead(ended)
    if alive(away):  # one that moved to a session of its own outlives a parent that had no time to look for it
        assert number is signal.SIGKILL
        os.kill(away, signal.SIGKILL)
    process.stdout.close()


def test_a_call_too_large_for_the_channel_is_refused_and_the_worker_stays(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_MAX_PAYLOAD_BYTES", 1000)
    before = pool.num_restarts
    outcome = pool.submit(bytes(1001), timeout_s=5).result()
    assert isinstance(outcome, Failed) and outcome.kind == "error" and "1001 bytes" in outcome.reason
    assert pool.submit(b"next", timeout_s=5).result() == b"next"
    assert pool.num_restarts == before
