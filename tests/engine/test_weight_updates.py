from __future__ import annotations

import threading
from dataclasses import replace
from typing import Literal

import pytest
from torch import Tensor

from tests.engine.support import answer_of, assert_idle, assert_works, make_engine, naive_answer, request
from unison.config.schema import EngineConfig
from unison.core.errors import EngineStateError, WeightUpdateError
from unison.core.records import VersionRun
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.models.names import published_tensors
from unison.ops.padding import EXACT
from unison.weights.push import push_weights


def changed_weights(model: Decoder, factor: float = 1.25) -> dict[str, Tensor]:
    return {name: tensor.clone() * factor for name, tensor in published_tensors(model).items()}


def staged_engine(model: Decoder, staging: Literal["shadow", "in_place"]) -> Engine:
    return Engine(
        model, path=EXACT, config=EngineConfig(kv_tokens=1024, poison_freed_pages=True), staging=staging, version=4
    )


@pytest.mark.parametrize("staging", ["shadow", "in_place"])
def test_answers_tell_which_version_sampled_each_token_and_wrote_each_key(
    own_model: Decoder, staging: Literal["shadow", "in_place"]
) -> None:
    engine = staged_engine(own_model, staging)
    for name, length in (("early", 2), ("across", 6)):
        engine.add_request(request(name, prompt=[1, 2, 3], max_new_tokens=length, seed=1))
    assert engine.step() == []
    (early,) = engine.step()
    push_weights(engine.weights, changed_weights(own_model), 9)
    engine.add_request(request("late", prompt=[1, 2, 3], max_new_tokens=6, seed=1))
    across, late = engine.run()
    assert (early.request_id, across.request_id, late.request_id) == ("early", "across", "late")
    assert early.weight_versions == [VersionRun(4, 2)]
    assert across.weight_versions == [VersionRun(4, 2), VersionRun(9, 4)]
    assert across.kv_versions == [VersionRun(4, 4), VersionRun(9, 4)]
    assert late.weight_versions == [VersionRun(9, 6)]
    assert late.kv_versions == [VersionRun(9, 8)]
    # own_model holds the new weights by now: what began after the update knows nothing of the old ones.
    assert answer_of(late) == naive_answer(own_model, request("n", max_new_tokens=6, seed=1))
    assert across.logprobs[:2] == early.logprobs != late.logprobs[:2]
    assert_idle(engine)


def test_an_open_shadow_update_changes_nothing_until_it_is_committed(own_model: Decoder) -> None:
    engine = make_engine(own_model)
    old = naive_answer(own_model, request("n"))
    new = changed_weights(own_model)
    update = engine.begin_update(1)
    for name, tensor in new.items():
        update.stage(name, tensor)
        engine.add_request(request("r"))
        assert answer_of(engine.run()[0]) == old
    engine.commit_update(update)
    engine.add_request(request("r"))
    (output,) = engine.run()
    assert output.weight_versions == [VersionRun(1, 8)]
    assert answer_of(output) == naive_answer(own_model, request("n")) != old


def test_an_aborted_shadow_update_leaves_the_old_version_serving(own_model: Decoder) -> None:
    engine = make_engine(own_model)
    update = engine.begin_update(1)
    name, tensor = next(iter(changed_weights(own_model).items()))
    update.stage(name, tensor)
    with pytest.raises(WeightUpdateError):
        engine.commit_update(update)
    update.abort()
    assert engine.weights.version == 0
    assert_works(engine)


def test_an_incomplete_in_place_update_stops_sampling_and_loses_nothing(own_model: Decoder) -> None:
    engine = staged_engine(own_model, "in_place")
    wanted = request("r", max_new_tokens=6)
    expected = naive_answer(own_model, wanted)
    old = {name: tensor.clone() for name, tensor in published_tensors(own_model).items()}
    engine.add_request(wanted)
    engine.add_request(replace(wanted, request_id="aborted"))
    engine.step()
    engine.step()
    update = engine.begin_update(5)
    name = next(iter(old))
    update.stage(name, old[name] * 2)
    for _ in range(2):
        with pytest.raises(EngineStateError, match="weights are incomplete"):
            engine.step()
    update.abort()
    engine.abort("aborted")
    # An answer that is there needs no weights.
    (partial,) = engine.step()
    assert (partial.finish_reason, answer_of(partial)) == ("abort", (expected[0][:2], expected[1][:2]))
    with pytest.raises(EngineStateError, match="weights are incomplete"):
        engine.step()
    with pytest.raises(EngineStateError, match="while other requests run"):
        engine.generate([[1]])
    # A complete set makes it whole again; here with the old values, so the answer is the plain one.
    push_weights(engine.weights, old, 6)
    (output,) = engine.run()
    assert answer_of(output) == expected
    assert output.weight_versions == [VersionRun(4, 2), VersionRun(6, 4)]
    assert_works(engine)


def test_generate_over_incomplete_weights_leaves_nothing_behind(own_model: Decoder) -> None:
    engine = staged_engine(own_model, "in_place")
    old = {name: tensor.clone() for name, tensor in published_tensors(own_model).items()}
    update = engine.begin_update(5)
    update.stage("model.norm.weight", old["model.norm.weight"])
    with pytest.raises(EngineStateError, match="weights are incomplete"):
        engine.generate([[1], [2]])
    assert_idle(engine)
    assert engine.step() == [], "with nothing to compute nothing is wrong"
    update.abort()
    push_weights(engine.weights, old, 6)
    assert_works(engine)


@pytest.mark.parametrize("staging", ["shadow", "in_place"])
def test_an_update_from_another_thread_never_lands_inside_a_step(own_model: Decoder, staging: str) -> None:
    engine = Engine(own_model, path=EXACT, config=EngineConfig(kv_tokens=2048), staging=staging)  # type: ignore[arg-type]
    for i in range(4):
        engine.add_request(request(f"r{i}", max_new_tokens=60, seed=i))
    seen: list[tuple[int, int]] = []
    compute = engine._runner.run

    def watched(*arguments: object) -> object:
        before = engine.weights.version
        logits = compute(*arguments)  # type: ignore[arg-type]
        seen.append((before, engine.weights.version))
        return logits

    engine._runner.run = watched  # type: ignore[assignment,method-assign]
    weights = {name: tensor.clone() for name, tensor in published_tensors(own_model).items()}

    def update() -> None:
        for version in range(1, 20):
            push_weights(engine.weights, weights, version)

    pushing = threading.Thread(target=update)
    pushing.start()
    outputs = []
    while engine.has_work:
        try:
            outputs += engine.step()
        except EngineStateError:
            assert staging == "in_place"  # half of an update is in place: nothing is sampled meanwhile
    pushing.join()
    assert len(outputs) == 4
    assert all(before == after for before, after in seen)
