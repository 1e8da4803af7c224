from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.support import answer_of, assert_idle, make_engine, naive_answer, request
from unison.core.records import GenerationOutput, GenerationRequest
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.engine.prefix_cache import Match, PrefixCache
from unison.models.decoder import Decoder
from unison.models.names import published_tensors
from unison.weights.push import push_weights

Written = tuple[int, tuple[int, ...]]
"""A namespace, and the tokens up to and with the one whose keys were computed."""


class Pages:
    """References per page, and what sequences wrote to each page's tokens; freed pages hold nothing."""

    def __init__(self, page_size: int = 4) -> None:
        self.page_size = page_size
        self.references: Counter[int] = Counter()
        self.owners: Counter[int] = Counter()
        self.written: dict[int, list[Written | None]] = {}

    def retain(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert page in self.written, "a free page is taken into the cache"
        self.references.update(pages)

    def release(self, pages: Sequence[int]) -> int:
        freed = 0
        for page in pages:
            self.references[page] -= 1
            assert self.references[page] >= 0
            freed += self._forget(page)
        return freed

    def num_only_cached(self, pages: Iterable[int]) -> int:
        return sum(self.owners[page] == 0 for page in pages)

    def own(self, shared: Sequence[int], count: int) -> list[int]:
        """Pages of a sequence: some of others, and new ones until there are ``count``."""
        first = max(self.written, default=-1) + 1
        pages = [*shared, *range(first, first + count - len(shared))]
        for page in pages[len(shared) :]:
            self.written[page] = [None] * self.page_size
        self.owners.update(pages)
        return pages

    def write(self, pages: Sequence[int], namespace: int, tokens: tuple[int, ...], start: int) -> None:
        for i in range(start, len(tokens)):
            self.written[pages[i // self.page_size]][i % self.page_size] = (namespace, tokens[: i + 1])

    def free(self, pages: Sequence[int]) -> None:
        self.owners.subtract(pages)
        for page in pages:
            self._forget(page)

    def _forget(self, page: int) -> bool:
        if self.references[page] == 0 and self.owners[page] == 0:
            return self.written.pop(page, None) is not None
        return False


def pages_for(count: int, page_size: int) -> int:
    return -(-count // page_size)


def insert(cache: PrefixCache, pages: Pages, tokens: tuple[int, ...], namespace: int = 0) -> int:
    """What a sequence leaves behind that computed all its tokens itself; how many of them were new."""
    own = pages.own([], pages_for(len(tokens), pages.page_size))
    pages.write(own, namespace, tokens, 0)
    new = cache.insert(namespace, tokens, own)
    pages.free(own)
    return new


def longest_known(held: list[tuple[int, ...]], tokens: tuple[int, ...]) -> int:
    best = 0
    for other in held:
        count = 0
        while count < min(len(other), len(tokens)) and other[count] == tokens[count]:
            count += 1
        best = max(best, count)
    return best


def assert_holds(pages: Pages, match: Match, namespace: int, tokens: tuple[int, ...]) -> None:
    """Each token of a match lies in its page, computed after exactly this prefix under this namespace."""
    assert len(match.pages) == pages_for(match.num_tokens, pages.page_size)
    for i in range(match.num_tokens):
        assert pages.written[match.pages[i // pages.page_size]][i % pages.page_size] == (namespace, tokens[: i + 1])


@dataclass
class Visit:
    """A sequence: what it asks for, how much of a hit it uses, how it goes on, when it lets go of its pages."""

    namespace: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    uses_hits: bool
    stays: bool
    num_to_evict: int


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)
VISITS = st.builds(
    Visit,
    namespace=st.integers(0, 1),
    prompt=TOKENS,
    answer=st.lists(st.integers(0, 2), max_size=6).map(tuple),
    uses_hits=st.booleans(),
    stays=st.booleans(),
    num_to_evict=st.sampled_from([0, 0, 0, 1, 3]),
)


def serve_visit(cache: PrefixCache, pages: Pages, visit: Visit, held: list[tuple[int, ...]]) -> list[int]:
    """As the scheduler does it: share whole pages, copy the rest of the hit, write on, insert twice."""
    size, name, prompt = pages.page_size, visit.namespace, visit.prompt
    match = cache.match(name, prompt, limit=len(prompt) - 1)
    assert_holds(pages, match, name, prompt)
    num_hits = match.num_tokens if visit.uses_hits else 0
    whole, rest = divmod(num_hits, size)
    own = pages.own(match.pages[:whole], pages_for(len(prompt) + len(visit.answer), size))
    if rest:
        pages.written[own[whole]][:rest] = pages.written[match.pages[whole]][:rest]
    start = num_hits
    for tokens in (prompt, prompt + visit.answer):
        pages.write(own, name, tokens, start)
        start = len(tokens)
        known = longest_known(held, tokens)
        assert cache.insert(name, tokens, own) == len(tokens) - known
        held.append(tokens)
    return own


@settings(max_examples=300, deadline=None)
@given(visits=st.lists(VISITS, max_size=20), page_size=st.sampled_from([1, 3, 4, 8]))
def test_the_pages_of_a_match_hold_its_tokens(visits: list[Visit], page_size: int) -> None:
    pages = Pages(page_size)
    cache = PrefixCache(pages, page_size)
    held: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}
    staying: list[list[int]] = []
    for visit in visits:
        own = serve_visit(cache, pages, visit, held[visit.namespace])
        if visit.stays:
            staying.append(own)
        else:
            pages.free(own)
        if visit.num_to_evict:
            num_before = len(pages.written)
            assert cache.evict(visit.num_to_evict) == num_before - len(pages.written)
            # What is left is known by asking for all that was ever there.
            for name, known in held.items():
                held[name] = [tokens[: cache.match(name, tokens).num_tokens] for tokens in known]
        assert cache.check() == pages.references.total()
        for name, known in held.items():
            for probe in (visit.prompt, (*visit.prompt, 1), (2, 2, 2), *known[-2:]):
                match = cache.match(name, probe)
                assert match.num_tokens == longest_known(known, probe)
                assert_holds(pages, match, name, probe)
    for own in staying:
        pages.free(own)
    cache.evict(10_000)
    assert (cache.num_tokens, pages.written) == (0, {})


@settings(max_examples=100, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=15), st.sampled_from([1, 3, 4]), st.randoms(use_true_random=False))
def test_eviction_leaves_locked_nodes_and_frees_all_pages_in_the_end(
    inserts: list[tuple[int, ...]], page_size: int, noise: random.Random
) -> None:
    pages = Pages(page_size)
    cache = PrefixCache(pages, page_size)
    for tokens in inserts:
        insert(cache, pages, tokens)
    locked = noise.choice(inserts)
    match = cache.match(0, locked)
    cache.lock(match)
    while cache.evict(1):
        cache.check()
        assert cache.match(0, locked).num_tokens == len(locked)
    assert_holds(pages, cache.match(0, locked), 0, locked)
    cache.unlock(match)
    cache.evict(10_000)
    assert (cache.num_tokens, pages.written) == (0, {})


def test_eviction_skips_leaves_whose_pages_sequences_hold() -> None:
    pages = Pages(4)
    cache = PrefixCache(pages, 4)
    running = pages.own([], 2)
    pages.write(running, 0, (1, 1, 1, 1, 1, 1), 0)
    cache.insert(0, (1, 1, 1, 1, 1, 1), running)
    insert(cache, pages, (2, 2, 2, 2))
    assert cache.evict(5) == 1, "the younger leaf alone gives a page"
    assert cache.match(0, (1,) * 6).num_tokens == 6
    assert cache.evict(5) == 0
    pages.free(running)
    assert cache.evict(1) == 2
    assert pages.written == {}


def test_a_page_with_two_prefixes_in_it_stays_until_both_are_gone() -> None:
    pages = Pages(4)
    cache = PrefixCache(pages, 4)
    insert(cache, pages, (1, 2, 3, 4, 5, 6, 7))
    assert cache.match(0, (1, 2, 3, 4, 5, 9)).pages == (0, 1)
    insert(cache, pages, (1, 2, 3, 4, 5, 9))
    first, second = cache.match(0, (1, 2, 3, 4, 5, 6, 7)), cache.match(0, (1, 2, 3, 4, 5, 9))
    assert first.pages[0] == second.pages[0] == 0 and first.pages[1] != second.pages[1]
    assert cache.evict(1) == 1, "of two leaves the older shares its page with their parent: the younger's is freed"
    assert cache.match(0, (1, 2, 3, 4, 5, 6, 7)).num_tokens == 5
    assert cache.evict(1) == 2
    assert pages.written == {}


def test_the_least_recently_used_leaf_goes_first() -> None:
    pages = Pages(4)
    cache = PrefixCache(pages, 4)
    for i in range(5):
        insert(cache, pages, (i, i, i, i))
    cache.match(0, (0, 0))
    assert cache.evict(1) == 1
    assert cache.match(0, (1,)).num_tokens == 0
    assert cache.match(0, (0, 0, 0, 0)).num_tokens == 4


def test_a_limit_cuts_a_match_inside_a_node() -> None:
    pages = Pages(4)
    cache = PrefixCache(pages, 4)
    insert(cache, pages, tuple(range(10)))
    found = [cache.match(0, tuple(range(10)), limit=limit) for limit in (0, 3, 4, 5, 9)]
    assert [(match.num_tokens, match.pages) for match in found] == [
        (0, ()), (3, (0,)), (4, (0,)), (5, (0, 1)), (9, (0, 1, 2))
    ]  # fmt: skip


@pytest.mark.parametrize("page_size", [64, 128, 192])
@pytest.mark.parametrize("num_prompt", [57, 63, 64, 65, 128, 129, 200])
def test_a_group_prefills_its_prompt_once_and_stores_its_whole_pages_once(
    model: Decoder, page_size: int, num_prompt: int
) -> None:
    engine = make_engine(model, page_size=page_size, kv_tokens=8192)
    prompt = tuple(range(3, 3 + num_prompt))
    group = [request(f"r{k}", prompt, seed=k) for k in range(8)]
    for one in group:
        engine.add_request(one)
    outputs = {output.request_id: output for _ in range(3) for output in engine.step()}
    whole = (num_prompt - 1) // page_size
    running = engine.scheduler.running
    assert len(running) == 8 and not outputs
    own = sum(engine.pool.pages_for(sequence.num_cached) - whole for sequence in running)
    assert engine.pool.num_pages - engine.pool.num_free_pages == whole + own
    outputs |= {output.request_id: output for output in engine.run()}
    # One whole prompt; each of the others computes only the last token, whose logits it needs.
    assert engine.stats.num_prefill_tokens == num_prompt + 7
    assert sorted(output.num_cached_tokens for output in outputs.values()) == [0] + [num_prompt - 1] * 7
    for one in group[::3]:
        assert answer_of(outputs[one.request_id]) == naive_answer(model, one)
    assert_idle(engine)


def test_samples_that_come_one_by_one_share_the_prompt_as_well(model: Decoder) -> None:
    engine = make_engine(model, page_size=64, kv_tokens=4096)
    prompt = tuple(range(3, 203))
    group = [request(f"r{k}", prompt, seed=k, max_new_tokens=30) for k in range(5)]
    for one in group:
        engine.add_request(one)
        for _ in range(4):
            assert engine.step() == []
    tables = [sequence.pages for sequence in engine.scheduler.running]
    assert len({tuple(pages[:3]) for pages in tables}) == 1, "the three whole pages of the prompt"
    assert len({page for pages in tables for page in pages[3:]}) == 5
    assert engine.pool.num_pages - engine.pool.num_free_pages == 3 + 5
    assert engine.stats.num_prefill_tokens == 200 + 4
    outputs = {output.request_id: output for output in engine.run()}
    # And one that comes when the others have ended.
    last = request("last", (*prompt, 9, 9), seed=9)
    outputs["last"] = _answer(engine, last)
    assert outputs["last"].num_cached_tokens == 200
    for one in (*group[::2], last):
        assert answer_of(outputs[one.request_id]) == naive_answer(model, one)
    assert_idle(engine)


@pytest.mark.parametrize("common", [30, 63, 64, 65, 100, 128, 150])
def test_prompts_that_part_inside_a_page_keep_their_own_keys(model: Decoder, common: int) -> None:
    engine = make_engine(model, page_size=64, kv_tokens=4096)
    prompts = [(*range(3, 3 + common), *range(start, start + 70)) for start in (300, 310, 320)]
    for round_ in range(2):
        for i, prompt in enumerate(prompts):
            one = request(f"{round_}/{i}", prompt, seed=i)
            output = _answer(engine, one)
            assert output.num_cached_tokens == (len(prompt) - 1 if round_ else common if i else 0)
            assert answer_of(output) == naive_answer(model, one)
            engine.check()
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
    engine = make_engine(model, kv_tokens=128, page_size=64)
    prompt = tuple(range(5, 75))
    _answer(engine, request("a", prompt, max_new_tokens=4))
    # Needs both pages of the pool: one for a copy of the other, in which the end of its own prefix lies cached.
    long = request("b", prompt, max_new_tokens=50)
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
