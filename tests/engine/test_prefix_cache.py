from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.support import answer_of, assert_idle, make_engine, naive_answer, request
from unison.core.records import GenerationOutput, GenerationRequest
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.engine.prefix_cache import PrefixCache
from unison.models.decoder import Decoder
from unison.models.names import published_tensors
from unison.weights.push import push_weights

PAGE = 4


class CountingHolder:
    """References per page; remembers which slots hold whose tokens."""

    def __init__(self) -> None:
        self.references: Counter[int] = Counter()

    def _pages(self, slot: int, count: int) -> range:
        return range(slot // PAGE, -(-(slot + count) // PAGE))

    def retain(self, slot: int, num_tokens: int) -> None:
        self.references.update(self._pages(slot, num_tokens))

    def release(self, slot: int, num_tokens: int) -> int:
        freed = 0
        for page in self._pages(slot, num_tokens):
            self.references[page] -= 1
            assert self.references[page] >= 0
            freed += self.references[page] == 0
        return freed


def longest_known(held: list[tuple[int, ...]], tokens: tuple[int, ...]) -> int:
    best = 0
    for other in held:
        count = 0
        while count < min(len(other), len(tokens)) and other[count] == tokens[count]:
            count += 1
        best = max(best, count)
    return best


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), sequences), max_size=25), st.randoms(use_true_random=False))
def test_a_match_is_the_longest_prefix_ever_inserted_and_points_at_its_keys(
    inserts: list[tuple[int, tuple[int, ...]]], noise: random.Random
) -> None:
    holder = CountingHolder()
    cache = PrefixCache(holder)
    held: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}
    written: dict[int, tuple[int, tuple[int, ...]]] = {}
    next_slot = 0
    for namespace, tokens in inserts:
        slot = next_slot
        next_slot += len(tokens) + noise.randint(0, 5)
        for i in range(len(tokens)):
            written[slot + i] = (namespace, tokens[: i + 1])
        new = cache.insert(namespace, tokens, slot)
        assert new == len(tokens) - longest_known(held[namespace], tokens)
        held[namespace].append(tokens)
        references = cache.check(PAGE)
        assert references == sum(holder.references.values())
        for probe in (tokens, (*tokens, 1), tokens[:-1], (2, 2, 2)):
            if not probe:
                continue
            match = cache.match(namespace, probe)
            assert match.num_tokens == longest_known(held[namespace], probe)
            at = 0
            for run in match.runs:
                for i in range(run.count):
                    # Each slot holds keys computed after exactly this prefix, under this namespace.
                    assert written[run.slot + i] == (namespace, probe[: at + 1])
                    at += 1


@settings(max_examples=100, deadline=None)
@given(st.lists(sequences, min_size=1, max_size=15), st.randoms(use_true_random=False))
def test_eviction_takes_unlocked_leaves_oldest_first_and_frees_all_pages_in_the_end(
    inserts: list[tuple[int, ...]], noise: random.Random
) -> None:
    holder = CountingHolder()
    cache = PrefixCache(holder)
    slot = 0
    for tokens in inserts:
        cache.insert("v", tokens, slot)
        slot += len(tokens)
    locked = noise.choice(inserts)
    match = cache.match("v", locked)
    cache.lock(match)
    while cache.evict(1):
        cache.check(PAGE)
        assert cache.match("v", locked).num_tokens == len(locked)
    assert cache.num_tokens >= len(locked)
    cache.unlock(match)
    cache.evict(10_000)
    assert cache.num_tokens == 0
    assert sum(holder.references.values()) == 0


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = PrefixCache(CountingHolder())
    for i in range(5):
        cache.insert("v", (i, i, i, i), 4 * i)
    cache.match("v", (0, 0))
    assert cache.evict(1) == 1
    assert cache.match("v", (1,)).num_tokens == 0
    assert cache.match("v", (0, 0, 0, 0)).num_tokens == 4


def test_a_limit_cuts_a_match_inside_a_node() -> None:
    cache = PrefixCache(CountingHolder())
    cache.insert("v", tuple(range(10)), 30)
    match = cache.match("v", tuple(range(10)), limit=7)
    assert [(run.slot, run.count) for run in match.runs] == [(30, 7)]


@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_a_group_prefills_its_prompt_once(model: Decoder, page_size: int) -> None:
    engine = make_engine(model, page_size=page_size, kv_tokens=4096)
    prompt = tuple(range(3, 60))
    group = [request(f"r{k}", prompt, seed=k) for k in range(8)]
    for one in group:
        engine.add_request(one)
    outputs = {output.request_id: output for output in engine.run()}
    # One whole prompt; each of the others computes only the last token, whose logits it needs.
    assert engine.stats.num_prefill_tokens == len(prompt) + 7
    assert sorted(output.num_cached_tokens for output in outputs.values()) == [0] + [len(prompt) - 1] * 7
    for one in group:
        assert answer_of(outputs[one.request_id]) == naive_answer(model, one)
    assert_idle(engine)


def test_decoded_tokens_are_found_again_by_the_next_turn(model: Decoder) -> None:
    engine = make_engine(model, kv_tokens=4096)
    first = request("a", tuple(range(5, 30)))
    engine.add_request(first)
    (answer,) = engine.run()
    turn = (*first.prompt_ids, *answer.token_ids, 7, 8, 9)
    second = request("b", turn)
    engine.add_request(second)
    (output,) = engine.run()
    # All but the last answer token, whose keys nobody needed before.
    assert output.num_cached_tokens == len(first.prompt_ids) + len(answer.token_ids) - 1
    assert answer_of(output) == naive_answer(model, second)


def test_nothing_computed_by_other_weights_is_ever_hit(own_model: Decoder) -> None:
    engine = make_engine(own_model, kv_tokens=4096)
    one = request("a", tuple(range(5, 80)))
    before = _answer(engine, one)
    changed = {name: tensor.clone() for name, tensor in published_tensors(own_model).items()}
    changed["model.layers.0.self_attn.v_proj.weight"].neg_()
    push_weights(engine.weights, changed, 1)
    after = _answer(engine, one)
    assert after.num_cached_tokens == 0
    assert after.logprobs != before.logprobs
    assert answer_of(after) == naive_answer(engine.model, one)
    assert _answer(engine, one).num_cached_tokens == len(one.prompt_ids) - 1


def test_a_request_that_saw_two_versions_leaves_nothing_in_the_cache(own_model: Decoder) -> None:
    engine = make_engine(own_model, kv_tokens=4096)
    one = request("a", tuple(range(5, 40)))
    engine.add_request(one)
    engine.step()
    push_weights(engine.weights, {n: t.clone() for n, t in published_tensors(own_model).items()}, 1)
    engine.run()
    assert engine.cache is not None and engine.cache.num_tokens == 0
    assert_idle(engine)


def test_cached_prefixes_make_room_for_running_requests(model: Decoder) -> None:
    engine = make_engine(model, kv_tokens=256, max_running=4)
    noise = random.Random(3)
    for i in range(12):
        one = request(f"r{i}", [noise.randrange(500) for _ in range(noise.randint(20, 80))])
        assert answer_of(_answer(engine, one)) == naive_answer(model, one)
        engine.check()
    assert engine.cache is not None and engine.cache.num_evicted_tokens > 0
    assert_idle(engine)


def test_a_prefix_that_stands_in_the_way_of_its_own_request_is_given_up(model: Decoder) -> None:
    engine = make_engine(model, kv_tokens=128, page_size=8)
    prompt = tuple(range(5, 60))
    _answer(engine, request("a", prompt, max_new_tokens=4))
    # Needs the whole pool in one piece, while its own prefix lies cached in the middle of it.
    long = request("b", prompt, max_new_tokens=60)
    engine.add_request(long)
    outputs = [output for _ in range(80) for output in engine.step()]
    assert [answer_of(output) for output in outputs] == [naive_answer(model, long)]
    assert_idle(engine)


def test_without_a_cache_nothing_is_shared(model: Decoder) -> None:
    engine = make_engine(model, prefix_cache=False)
    one = request("a", tuple(range(5, 40)))
    assert _answer(engine, one).num_cached_tokens == _answer(engine, one).num_cached_tokens == 0
    assert engine.pool.num_free_pages == engine.pool.num_pages


def _answer(engine: Engine, one: GenerationRequest) -> GenerationOutput:
    engine.add_request(one)
    (output,) = engine.run()
    return output


def test_nothing_dead_is_held_on_to(model: Decoder) -> None:
    engine = make_engine(model, kv_tokens=8192)
    assert engine.cache is not None
    for round_ in range(40):
        engine.generate([[round_, i, 3, 4, 5, 6, 7, 8, 9] for i in range(4)], SamplingParams(n=3, max_new_tokens=3))
        if round_ % 2:
            engine.flush_cache()
            assert len(engine.cache._leaves) == 0
    engine.generate([[1, 2, 3]] * 200, SamplingParams(max_new_tokens=2))
    assert len(engine.cache._leaves) <= 2 * engine.cache._num_nodes + 65
    engine.check()
