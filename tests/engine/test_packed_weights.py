"""The engine computes with packed copies of its weights: never with stale ones, never with other bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.conftest import TinyModelDir
from tests.engine.support import answer_of, assert_idle, assert_works, make_engine, naive_answer, request
from unison.config.schema import EngineConfig
from unison.core.errors import EngineStateError, WeightUpdateError
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.models.rollout_decoder import RolloutDecoder
from unison.ops import selftest
from unison.ops.packed import PackedWeight, can_pack
from unison.ops.padding import EXACT
from unison.weights.push import push_weights

pytestmark = pytest.mark.skipif(not can_pack(torch.bfloat16), reason="no kernel for packed bfloat16 weights here")

Staging = Literal["shadow", "in_place"]
BOTH_STAGINGS = pytest.mark.parametrize("staging", ["shadow", "in_place"])


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def bf16_model(request: pytest.FixtureRequest, tiny_model_dir: TinyModelDir) -> Decoder:
    return load_model(tiny_model_dir(request.param), torch.bfloat16)


@pytest.fixture
def own_model(tiny_model_dir: TinyModelDir) -> Decoder:
    return load_model(tiny_model_dir("qwen3", tie_word_embeddings=True), torch.bfloat16)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PackedWeight]]:
    """The packed weights used, in order."""
    used: list[PackedWeight] = []
    original = PackedWeight.linear

    def counted(self: PackedWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
        used.append(self)
        return original(self, x, bias)

    monkeypatch.setattr(PackedWeight, "linear", counted)
    yield used


def staged(model: Decoder, staging: Staging) -> Engine:
    return Engine(model, path=EXACT, config=EngineConfig(kv_tokens=1024), staging=staging)


def changed(model: Decoder, factor: float = 1.25) -> dict[str, Tensor]:
    return {name: tensor.clone() * factor for name, tensor in published_tensors(model).items()}


def answer(engine: Engine) -> tuple[list[int], list[float]]:
    engine.add_request(request("r"))
    (output,) = engine.run()
    return answer_of(output)


def test_answers_are_those_of_the_plain_model(bf16_model: Decoder, products: list[PackedWeight]) -> None:
    engine = make_engine(bf16_model, prefill_chunk=5)
    assert engine.notes == ()
    products.clear()  # those of the proof
    expected = [naive_answer(bf16_model, request("n", prompt=range(1, n), seed=n)) for n in (3, 9, 40)]
    assert products == [], "the oracle is the plain model"
    for n in (3, 9, 40):
        engine.add_request(request(str(n), prompt=range(1, n), seed=n))
    outputs = {output.request_id: answer_of(output) for output in engine.run()}
    assert [outputs[str(n)] for n in (3, 9, 40)] == expected
    # Four matrices in each layer, and the vocabulary projection.
    assert len(set(map(id, products))) == 4 * bf16_model.spec.num_layers + 1
    assert_works(engine)


def test_log_probs_of_a_prompt_come_from_the_packed_head_too(own_model: Decoder) -> None:
    wanted = request("r", prompt=range(1, 12), max_new_tokens=2, prompt_logprobs_from=0)
    packed, plain = make_engine(own_model), make_engine(own_model, prepack_linears=False)
    found = []
    for engine in (packed, plain):
        engine.add_request(wanted)
        (output,) = engine.run()
        found.append((output.prompt_logprobs, output.logprobs))
    assert found[0] == found[1]
    assert found[0][0]


@BOTH_STAGINGS
def test_after_an_update_the_new_weights_are_used(
    own_model: Decoder, staging: Staging, products: list[PackedWeight]
) -> None:
    engine = staged(own_model, staging)
    products.clear()
    old = answer(engine)
    assert old == naive_answer(own_model, request("n"))
    before = set(map(id, products))
    kept = list(products)  # held, so that no address comes back
    for version in (1, 2, 3):
        push_weights(engine.weights, changed(own_model), version)
        products.clear()
        new = answer(engine)
        assert new == naive_answer(own_model, request("n")) != old
        assert products and not before & set(map(id, products))
        before |= set(map(id, products))
        kept += products
    assert_idle(engine)


@BOTH_STAGINGS
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.self_attn.q_norm.weight", "model.embed_tokens.weight"]
)
def test_an_update_of_one_tensor_shows(own_model: Decoder, staging: Staging, name: str) -> None:
    engine = staged(own_model, staging)
    old = answer(engine)
    new = changed(own_model, 1.0)
    new[name] = (new[name].float() * torch.linspace(0.2, 3.0, new[name].shape[-1])).to(torch.bfloat16)
    push_weights(engine.weights, new, 1)
    assert answer(engine) == naive_answer(own_model, request("n")) != old


def test_an_aborted_shadow_update_leaves_the_old_copies(own_model: Decoder, products: list[PackedWeight]) -> None:
    engine = staged(own_model, "shadow")
    products.clear()
    old = answer(engine)
    products.clear()
    assert answer(engine) == old
    copies = set(map(id, products))
    update = engine.begin_update(1)
    for name, tensor in list(changed(own_model).items())[:-1]:
        update.stage(name, tensor)
        assert answer(engine) == old
    with pytest.raises(WeightUpdateError, match="never written"):
        engine.commit_update(update)
    update.abort()
    assert answer(engine) == old
    assert set(map(id, products)) == copies


def test_an_incomplete_in_place_update_drops_the_copies_and_stops_sampling(own_model: Decoder) -> None:
    engine = staged(own_model, "in_place")
    answer(engine)
    new = changed(own_model)
    update = engine.begin_update(1)
    with pytest.raises(WeightUpdateError, match="no place"):
        update.stage("foreign", new["model.norm.weight"])
    assert isinstance(engine.rollout_model.head_weight(), PackedWeight), "nothing was written"
    update.stage("model.norm.weight", new["model.norm.weight"])
    assert engine.rollout_model.head_weight() is own_model.embed
    update.abort()
    engine.add_request(request("r"))
    with pytest.raises(EngineStateError, match="incomplete"):
        engine.run()
    push_weights(engine.weights, new, 2)
    assert isinstance(engine.rollout_model.head_weight(), PackedWeight)
    (output,) = engine.run()
    assert answer_of(output) == naive_answer(own_model, request("n"))
    assert_works(engine)


def test_copies_that_cannot_be_made_leave_the_new_version_serving(
    own_model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = staged(own_model, "shadow")
    old = answer(engine)

    def no_memory(self: RolloutDecoder) -> None:
        self.forget()
        raise MemoryError("no room for the copies")

    with monkeypatch.context() as patch:
        patch.setattr(RolloutDecoder, "remake", no_memory)
        with pytest.raises(MemoryError):
            push_weights(engine.weights, changed(own_model), 1)
    assert engine.weights.version == 1
    assert answer(engine) == naive_answer(own_model, request("n")) != old
    push_weights(engine.weights, changed(own_model), 2)
    assert isinstance(engine.rollout_model.head_weight(), PackedWeight)


def test_without_the_option_nothing_is_packed(own_model: Decoder, products: list[PackedWeight]) -> None:
    engine = make_engine(own_model, prepack_linears=False)
    assert answer(engine) == naive_answer(own_model, request("n"))
    assert products == []
    assert engine.notes == ()


def test_float32_goes_on_without(tiny_model_dir: TinyModelDir, products: list[PackedWeight]) -> None:
    engine = make_engine(load_model(tiny_model_dir("qwen3"), torch.float32))
    assert_works(engine)
    assert products == []
    assert engine.notes == ()


def test_where_the_proof_fails_the_engine_says_so_and_goes_on(
    own_model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = naive_answer(own_model, request("n"))
    selftest._packing_failures.cache_clear()
    original = PackedWeight.linear
    with monkeypatch.context() as patch:
        patch.setattr(PackedWeight, "linear", lambda self, x, bias=None: original(self, x, bias) * 1.0078125)
        engine = make_engine(own_model)
        selftest._packing_failures.cache_clear()
        (note,) = engine.notes
        assert "prepack_linears has no effect" in note
        assert "linear 64x256: 8 of 8 rows differ (1 threads)" in note
        assert answer(engine) == expected
