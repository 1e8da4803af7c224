from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.support import answer_of, make_engine, naive_answer, request
from unison.engine.engine import Engine
from unison.engine.policy import MAX_PASSED_OVER, admission_order
from unison.engine.sequence import Sequence
from unison.models.decoder import Decoder


def waiting(name: str, *, priority: int = 0, passed_over: int = 0, pushed_back: bool = False) -> Sequence:
    one = replace(request(name), priority=priority)
    sequence = Sequence(one, seed=0, max_new_tokens=8, end_ids=frozenset(), detokenizer=None)
    sequence.num_passed_over = passed_over
    sequence.num_retractions = int(pushed_back)
    return sequence


def names(sequences: list[Sequence]) -> str:
    return "".join(sequence.request_id for sequence in sequences)


def test_each_policy_orders_as_it_says() -> None:
    queue = [waiting("a"), waiting("b", priority=2), waiting("c", priority=-1), waiting("d", priority=2)]
    cached = {"a": 3, "b": 0, "c": 9, "d": 3}
    found = {
        policy: names(admission_order(queue, policy, lambda s: cached[s.request_id]))  # type: ignore[arg-type]
        for policy in ("fcfs", "priority", "longest_prefix")
    }
    assert found == {"fcfs": "abcd", "priority": "bdac", "longest_prefix": "cadb"}


def test_pushed_back_and_long_waiting_sequences_come_first() -> None:
    queue = [
        waiting("a", priority=9),
        waiting("b", passed_over=MAX_PASSED_OVER),
        waiting("c", pushed_back=True),
        waiting("d", passed_over=MAX_PASSED_OVER - 1),
    ]
    assert names(admission_order(queue, "priority", lambda s: 0)) == "cbad"


def order_of_ends(engine: Engine, priorities: list[int]) -> list[str]:
    for i, priority in enumerate(priorities):
        engine.add_request(replace(request(f"r{i}", (i + 1, 2, 3), seed=i), priority=priority))
    return [output.request_id for output in engine.run()]


def test_the_engine_serves_by_priority_and_changes_no_answer(model: Decoder) -> None:
    engine = make_engine(model, max_running=1, policy="priority")
    assert order_of_ends(engine, [0, 5, 1, 5]) == ["r1", "r3", "r2", "r0"]
    engine.add_request(request("again", (1, 2, 3), seed=0))
    (output,) = engine.run()
    assert answer_of(output) == naive_answer(model, request("again", (1, 2, 3), seed=0))


def test_a_low_priority_request_is_served_though_higher_ones_keep_coming(model: Decoder) -> None:
    engine = make_engine(model, max_running=1, policy="priority")
    engine.add_request(request("low", max_new_tokens=1))
    ended: list[str] = []
    for i in range(4 * MAX_PASSED_OVER):
        engine.add_request(replace(request(f"high{i}", max_new_tokens=1), priority=1))
        ended += [output.request_id for output in engine.step()]
        if "low" in ended:
            break
    assert "low" in ended
    assert len(ended) <= MAX_PASSED_OVER + 2


@pytest.mark.parametrize("policy", ["fcfs", "longest_prefix", "priority"])
def test_a_thousand_requests_of_mixed_length_with_aborts_are_each_answered_once(model: Decoder, policy: str) -> None:
    engine = make_engine(model, kv_tokens=512, max_running=16, policy=policy, new_token_ratio=0.05)
    for i in range(1000):
        prompt = tuple((i * 7 + k) % 500 for k in range(1 + i % 23))
        engine.add_request(replace(request(f"r{i}", prompt, max_new_tokens=1 + i % 5, seed=i), priority=i % 3))
    answered: dict[str, str] = {}
    step = 0
    while engine.has_work:
        if step < 40:
            victim = f"r{(step * 37) % 1000}"
            if victim in engine._sequences:
                engine.abort(victim)
        for output in engine.step():
            assert output.request_id not in answered
            answered[output.request_id] = output.finish_reason
        step += 1
        assert step < 5000
    engine.check()
    assert len(answered) == 1000
    assert set(answered.values()) == {"length", "abort"}
