from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.test_summary import make_sample
from unison.core.errors import DataError
from unison.core.records import SampleStatus
from unison.rollout.ledger import GroupAccount, LedgerEntry, audit, group_accounts, read_ledger

TRAINED = GroupAccount("trained", {"completed": 4}, reward_mean=0.5)
DISCARDED = GroupAccount("discarded", {"truncated": 4}, "all truncated", 0.25)


def entry(step: int, draws: list[int], groups: dict[str, GroupAccount], filtered: list[str]) -> LedgerEntry:
    return LedgerEntry(
        step=step,
        draws=draws,
        groups=groups,
        filtered=filtered,
        reward_sum=1.0,
        loss=0.5,
        grad_norm=2.0,
        optimizer_steps=step,
        weights_version=step,
        weights_digest=f"w{step}",
        base_digest="b",
        samples_sha256=None,
    )


@st.composite
def ledgers(draw: st.DrawFn, min_steps: int = 0) -> tuple[list[LedgerEntry], list[str]]:
    """A right ledger and the pending keys after it."""
    first = draw(st.integers(1, 5))
    keys = iter(range(10_000))
    entries = []
    for step in range(first, first + draw(st.integers(min_steps, 5))):
        draws = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        accounts = {f"row{next(keys)}@0": draw(st.sampled_from([TRAINED, DISCARDED])) for _ in range(sum(draws))}
        filtered = [key for key, account in accounts.items() if account is DISCARDED and draw(st.booleans())]
        entries.append(entry(step, draws, accounts, filtered))
    return entries, [f"row{next(keys)}@0" for _ in range(draw(st.integers(0, 3)))]


def order_of(entries: list[LedgerEntry], pending: list[str]) -> list[str]:
    return [key for one in entries for key in one.groups] + pending


@given(ledgers())
def test_nothing_is_wrong_with_a_right_ledger(ledger: tuple[list[LedgerEntry], list[str]]) -> None:
    entries, pending = ledger
    assert audit(entries, pending=pending) == []
    assert audit(entries, pending=pending, drawn=iter([*order_of(entries, pending), "later@0"])) == []


def replaced(entries: list[LedgerEntry], place: int, **values: Any) -> list[LedgerEntry]:
    return [*entries[:place], msgspec.structs.replace(entries[place], **values), *entries[place + 1 :]]


def without_a_step(entries: list[LedgerEntry], place: int) -> list[LedgerEntry]:
    return entries[:place] + entries[place + 1 :]


def twice_the_step(entries: list[LedgerEntry], place: int) -> list[LedgerEntry]:
    return [*entries[: place + 1], *entries[place:]]


def two_swapped(entries: list[LedgerEntry], place: int) -> list[LedgerEntry]:
    return [*entries[: place - 1], entries[place], entries[place - 1], *entries[place + 1 :]]


def a_key_twice(entries: list[LedgerEntry], place: int) -> list[LedgerEntry]:
    key = next(iter(entries[place - 1].groups))
    groups = {key if i == 0 else other: account for i, (other, account) in enumerate(entries[place].groups.items())}
    return replaced(entries, place, groups=groups, filtered=[])


def no_reason(entries: list[LedgerEntry], place: int) -> list[LedgerEntry]:
    groups = dict(entries[place].groups)
    groups[next(iter(groups))] = GroupAccount("discarded", {"truncated": 4})
    return replaced(entries, place, groups=groups, filtered=[])


def a_draw_too_many(entries: list[LedgerEntry], place: int) -> list[LedgerEntry]:
    return replaced(entries, place, draws=[*entries[place].draws, 1])


def filtered_and_trained(entries: list[LedgerEntry], place: int) -> list[LedgerEntry]:
    groups = dict(entries[place].groups)
    key = next(iter(groups))
    return replaced(entries, place, groups={**groups, key: TRAINED}, filtered=[key])


def filtered_and_absent(entries: list[LedgerEntry], place: int) -> list[LedgerEntry]:
    return replaced(entries, place, filtered=["absent@0"])


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (without_a_step, "stands where step"),
        (twice_the_step, "stands where step"),
        (two_swapped, "stands where step"),
        (a_key_twice, "is accounted for 2 times"),
        (no_reason, "was discarded without a reason"),
        (a_draw_too_many, "prompts and accounts for"),
        (filtered_and_trained, "left out by the filter, and is not accounted for as discarded"),
        (filtered_and_absent, "prompt absent@0 was left out by the filter"),
    ],
)
@given(data=st.data())
def test_each_kind_of_mistake_is_found_wherever_it_is(
    mistake: Callable[..., Any], message: str, data: st.DataObject
) -> None:
    entries, pending = data.draw(ledgers(min_steps=3))
    place = data.draw(st.integers(1, len(entries) - 2))
    problems = audit(mistake(entries, place), pending=pending)
    assert any(message in problem for problem in problems), problems


@given(ledgers(min_steps=1), st.data())
def test_a_pending_prompt_that_was_trained_is_found(
    ledger: tuple[list[LedgerEntry], list[str]], data: st.DataObject
) -> None:
    entries, pending = ledger
    key = data.draw(st.sampled_from(order_of(entries, [])))
    assert audit(entries, pending=[*pending, key]) == [f"prompt {key} is accounted for 2 times"]


@given(ledgers(min_steps=1), st.data())
def test_an_order_other_than_the_datas_is_found_at_its_first_prompt(
    ledger: tuple[list[LedgerEntry], list[str]], data: st.DataObject
) -> None:
    entries, pending = ledger
    order = order_of(entries, pending)
    place = data.draw(st.integers(0, len(order) - 1))
    (lost,) = audit(entries, pending=pending, drawn=[*order[:place], "lost@0", *order[place:]])
    assert lost == f"prompt number {place + 1} is {order[place]}, but the data gives out lost@0"
    (ended,) = audit(entries, pending=pending, drawn=order[:place])
    assert ended == f"prompt number {place + 1} is {order[place]}, but the data gives out None"


def test_groups_are_accounted_for_by_what_their_samples_came_to() -> None:
    samples = [
        make_sample("trained", 2, 1.0),
        make_sample("trained", 2, None, SampleStatus.UNSCORABLE),
        make_sample("cut", 2, 0.5, SampleStatus.TRUNCATED),
        make_sample("cut", 2, 1.0, SampleStatus.TRUNCATED),
        make_sample("mixed", 2, None, SampleStatus.FAILED),
        make_sample("mixed", 2, None, SampleStatus.ABORTED),
        make_sample("filtered", 2, 1.0),
    ]
    for i, sample in enumerate(samples):
        sample.sample_id = f"s{i}"
    assert group_accounts(samples, {"s0"}, {"filtered": "too easy"}) == {
        "trained": GroupAccount("trained", {"completed": 1, "unscorable": 1}, None, 1.0),
        "cut": GroupAccount("discarded", {"truncated": 2}, "all truncated", 0.75),
        "mixed": GroupAccount("discarded", {"aborted": 1, "failed": 1}, "no sample left to train: 1 aborted, 1 failed"),
        "filtered": GroupAccount("discarded", {"completed": 1}, "too easy", 1.0),
    }


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"step": 1}', b"\xff\xfe", b"null", b'{"step": "1"}'])
def test_a_line_that_is_no_entry_is_named_by_file_and_number(tmp_path: Path, line: bytes) -> None:
    good = msgspec.json.encode(entry(1, [1], {"a@0": TRAINED}, []))
    (tmp_path / "ledger.jsonl").write_bytes(good + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=r"ledger\.jsonl:2: no entry of a ledger"):
        read_ledger(tmp_path / "ledger.jsonl")


@given(ledgers())
def test_a_ledger_is_read_as_it_was_written(ledger: tuple[list[LedgerEntry], list[str]]) -> None:
    lines = [msgspec.json.encode(one) for one in ledger[0]]
    assert [msgspec.json.decode(line, type=LedgerEntry) for line in lines] == ledger[0]
