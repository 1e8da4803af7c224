"""Weight updates: committed whole or not at all, under both stagings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.conftest import TinyModelDir
from unison.core.errors import WeightUpdateError
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.weights.checksum import tensors_digest
from unison.weights.push import push_weights
from unison.weights.transaction import Staging, WeightStore, WeightTransaction

Tensors = dict[str, Tensor]
BOTH_STAGINGS = pytest.mark.parametrize("staging", get_args(Staging))
NORM = "model.norm.weight"


@pytest.fixture
def model(tiny_model_dir: TinyModelDir) -> Decoder:
    return load_model(tiny_model_dir("qwen3"), torch.bfloat16)


def copied(model: Decoder) -> Tensors:
    return {name: tensor.clone() for name, tensor in published_tensors(model).items()}


def changed(tensors: Mapping[str, Tensor], factor: float = 2.0) -> Tensors:
    return {name: tensor * factor for name, tensor in tensors.items()}


def assert_same(model: Decoder, expected: Mapping[str, Tensor]) -> None:
    actual = published_tensors(model)
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


def stage_all(transaction: WeightTransaction, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        transaction.stage(name, tensor)


def without(tensors: Mapping[str, Tensor], name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


FAILURES = ("missing tensor", "wrong shape", "wrong checksum", "foreign name", "given twice", "integers")


def fail(transaction: WeightTransaction, new: Tensors, failure: str) -> None:
    """Stage all but the last norm, then meet the failure; the caller expects an error."""
    stage_all(transaction, without(new, NORM))
    if failure == "missing tensor":
        transaction.commit()
    elif failure == "wrong shape":
        transaction.stage(NORM, new[NORM][:-1])
    elif failure == "wrong checksum":
        transaction.stage(NORM, new[NORM])
        transaction.commit(expected_checksum="0" * 64)
    elif failure == "foreign name":
        transaction.stage("model.layers.7.input_layernorm.weight", new[NORM])
    elif failure == "given twice":
        transaction.stage("lm_head.weight", new["lm_head.weight"])
    elif failure == "integers":
        transaction.stage(NORM, new[NORM].to(torch.int64))


MESSAGES = {
    "missing tensor": "1 of 25 tensors were never written: model.norm.weight",
    "wrong shape": r"shape \[63\]; \[64\] is needed",
    "wrong checksum": "checksum .* differs from the sender's 0000000000000000",
    "foreign name": r"'model\.layers\.7\.input_layernorm\.weight' has no place",
    "given twice": "'lm_head.weight' was given twice",
    "integers": "dtype torch.int64",
}


@BOTH_STAGINGS
@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_failure_the_weights_are_what_the_staging_promises(
    model: Decoder, staging: Staging, failure: str
) -> None:
    store = WeightStore(model, version=3, staging=staging)
    old = copied(model)
    transaction = store.begin(4)
    with pytest.raises(WeightUpdateError, match=f"update to version 4: .*{MESSAGES[failure]}"):
        fail(transaction, changed(old), failure)
    for _ in range(2):
        assert store.version == 3
        assert store.complete is (staging == "shadow")
        if staging == "shadow":
            assert_same(model, old)
        transaction.abort()
    new = changed(old, 4.0)
    again = store.begin(4)
    stage_all(again, new)
    assert store.complete is (staging == "shadow"), "complete only by a commit"
    assert again.commit().version == store.version == 4
    assert store.complete
    assert_same(model, new)


@BOTH_STAGINGS
def test_a_refused_commit_can_be_completed_and_tried_again(model: Decoder, staging: Staging) -> None:
    store = WeightStore(model, staging=staging)
    new = changed(copied(model))
    transaction = store.begin(1)
    stage_all(transaction, without(new, NORM))
    with pytest.raises(WeightUpdateError, match="never written"):
        transaction.commit()
    transaction.stage(NORM, new[NORM])
    commit = transaction.commit(expected_checksum=tensors_digest(new))
    assert (commit.version, commit.num_tensors, commit.checksum) == (1, len(new), store.checksum())
    assert_same(model, new)


def test_a_first_tensor_that_is_refused_leaves_in_place_weights_complete(model: Decoder) -> None:
    store = WeightStore(model, staging="in_place")
    old = copied(model)
    transaction = store.begin(1)
    assert store.complete
    with pytest.raises(WeightUpdateError, match="no place"):
        transaction.stage("foreign", old[NORM])
    with pytest.raises(WeightUpdateError, match="not supported"):
        transaction.stage(NORM, old[NORM], target="draft")
    assert store.complete
    transaction.stage(NORM, old[NORM])
    assert not store.complete
    with pytest.raises(WeightUpdateError, match="no place"):
        transaction.stage("foreign", old[NORM])
    assert not store.complete, "a refusal does not make a mixture whole"
    transaction.abort()
    assert not store.complete


@BOTH_STAGINGS
def test_an_aborted_empty_update_changes_nothing(model: Decoder, staging: Staging) -> None:
    store = WeightStore(model, staging=staging)
    old = copied(model)
    store.begin(1).abort()
    assert (store.version, store.complete) == (0, True)
    assert_same(model, old)


@BOTH_STAGINGS
def test_only_one_update_is_open_at_a_time(model: Decoder, staging: Staging) -> None:
    store = WeightStore(model, staging=staging)
    first = store.begin(1)
    with pytest.raises(WeightUpdateError, match="version 1 is still open"):
        store.begin(2)
    with pytest.raises(WeightUpdateError, match="still open"):
        push_weights(store, copied(model), 2)
    stage_all(first, copied(model))
    assert first.commit().version == 1, "refusing another update must not close the first"


@pytest.mark.parametrize("version", [-1, 0, 4, 5])
def test_a_version_must_rise(model: Decoder, version: int) -> None:
    store = WeightStore(model, version=5)
    with pytest.raises(WeightUpdateError, match=f"version {version} is not above the present version 5"):
        store.begin(version)
    push_weights(store, copied(model), 8)
    with pytest.raises(WeightUpdateError, match="not above the present version 8"):
        store.begin(8)


@BOTH_STAGINGS
@pytest.mark.parametrize("ending", ["commit", "abort"])
def test_a_closed_update_takes_nothing_more(model: Decoder, staging: Staging, ending: str) -> None:
    store = WeightStore(model, staging=staging)
    new = changed(copied(model))
    transaction = store.begin(1)
    stage_all(transaction, new)
    getattr(transaction, ending)()
    version, complete = store.version, store.complete
    with pytest.raises(WeightUpdateError, match="closed"):
        transaction.stage(NORM, new[NORM])
    with pytest.raises(WeightUpdateError, match="closed"):
        transaction.commit()
    following = store.begin(9)
    transaction.abort()
    with pytest.raises(WeightUpdateError, match="still open"):
        store.begin(10)
    following.abort()
    assert (store.version, store.complete) == (version, complete)


@pytest.mark.parametrize("target", ["draft", "adapter", "", "Base"])
def test_a_target_that_is_not_the_model_is_refused(model: Decoder, target: str) -> None:
    transaction = WeightStore(model).begin(1)
    with pytest.raises(WeightUpdateError, match=f"target='{target}'"):
        transaction.stage(NORM, torch.ones(64), target=target)


def test_an_unknown_staging_is_refused(model: Decoder) -> None:
    staging: Any = "shadows"
    with pytest.raises(WeightUpdateError, match="'shadows' is unknown; use one of shadow, in_place"):
        WeightStore(model, staging=staging)


@BOTH_STAGINGS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_push_casts_by_one_rounding_and_compares_checksums(
    model: Decoder, staging: Staging, dtype: torch.dtype
) -> None:
    store = WeightStore(model, staging=staging)
    sent = {name: (tensor.float() * 1.2345).to(dtype) for name, tensor in copied(model).items()}
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in sent.items()}
    commit = push_weights(store, sent, 7)
    assert (commit.version, commit.num_tensors) == (7, len(sent))
    assert commit.checksum == store.checksum() == tensors_digest(expected)
    assert_same(model, expected)


class BrokenMapping(dict[str, Tensor]):
    """Breaks off in the middle, as a lost sender does."""

    def items(self) -> Any:
        def some() -> Iterator[tuple[str, Tensor]]:
            yield from list(super(BrokenMapping, self).items())[:3]
            raise ConnectionResetError("sender lost")

        return some()


@BOTH_STAGINGS
def test_a_push_that_fails_is_aborted(model: Decoder, staging: Staging) -> None:
    store = WeightStore(model, staging=staging)
    old = copied(model)
    new = changed(old)
    with pytest.raises(WeightUpdateError, match="never written"):
        push_weights(store, without(new, NORM), 1)
    with pytest.raises(ConnectionResetError):
        push_weights(store, BrokenMapping(new), 1)
    assert (store.version, store.complete) == (0, staging == "shadow")
    if staging == "shadow":
        assert_same(model, old)
    push_weights(store, new, 1)
    assert store.complete
    assert_same(model, new)


@BOTH_STAGINGS
def test_a_tied_model_takes_its_output_layer_under_either_name(tiny_model_dir: TinyModelDir, staging: Staging) -> None:
    model = load_model(tiny_model_dir("llama", tie_word_embeddings=True), torch.bfloat16)
    store = WeightStore(model, staging=staging)
    new = changed(copied(model))
    embedding = new["model.embed_tokens.weight"]
    checksum = push_weights(store, new, 1).checksum
    assert push_weights(store, {**new, "lm_head.weight": embedding.clone()}, 2).checksum == checksum
    renamed = {**without(new, "model.embed_tokens.weight"), "lm_head.weight": embedding}
    assert push_weights(store, renamed, 3).checksum == checksum
    with pytest.raises(WeightUpdateError, match="differs from the one it is tied to"):
        push_weights(store, {**new, "lm_head.weight": embedding * 2}, 4)


def test_repeated_updates_use_two_sets_of_memory(model: Decoder) -> None:
    store = WeightStore(model)
    old = copied(model)
    places = []
    for version in range(1, 11):
        push_weights(store, changed(old, float(version)), version)
        assert_same(model, changed(old, float(version)))
        places.append(tuple(parameter.data_ptr() for parameter in model.parameters()))
    assert len(set(places)) == 2
    assert places[0::2] == [places[0]] * 5
    assert places[1::2] == [places[1]] * 5


def test_updates_in_place_use_the_memory_of_the_model(model: Decoder) -> None:
    store = WeightStore(model, staging="in_place")
    before = [parameter.data_ptr() for parameter in model.parameters()]
    push_weights(store, changed(copied(model)), 1)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


class Copy:
    """Something derived from the weights: the last norm, as it was when the copy was made."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.made = 0
        self.norm: Tensor | None = None
        self.remake()

    def forget(self) -> None:
        self.norm = None

    def remake(self) -> None:
        self.made += 1
        self.norm = self.model.norm.weight.detach().clone()


@BOTH_STAGINGS
def test_what_is_derived_from_the_weights_never_outlives_them(model: Decoder, staging: Staging) -> None:
    copy = Copy(model)
    store = WeightStore(model, staging=staging, derived=copy)
    old = copied(model)
    transaction = store.begin(1)
    with pytest.raises(WeightUpdateError, match="no place"):
        transaction.stage("foreign", old[NORM])
    assert copy.norm is not None, "nothing was written"
    stage_all(transaction, without(changed(old), NORM))
    with pytest.raises(WeightUpdateError, match="never written"):
        transaction.commit()
    transaction.abort()
    assert (copy.norm is None) is (staging == "in_place")
    assert copy.made == 1
    push_weights(store, changed(old, 3.0), 2)
    assert copy.made == 2
    assert copy.norm is not None and torch.equal(copy.norm, changed(old, 3.0)[NORM])
