"""Memory that is really given back, and taken again only where it is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.engine.support import answer_of, assert_works, make_engine, naive_answer, request
from unison.core.errors import EngineStateError, RequestError, WeightUpdateError
from unison.core.records import VersionRun
from unison.engine import lifecycle
from unison.engine.lifecycle import MemoryTag
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.ops.packed import can_pack
from unison.weights.push import push_weights

MB = 1 << 20


def resident_bytes() -> int:
    """Anonymous memory of this process: tensors, not files that happen to be mapped."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def values_of(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in published_tensors(model).items()}


def test_the_memory_of_the_pool_really_goes(model: Decoder) -> None:
    engine = make_engine(model, kv_tokens=1 << 17)
    size = engine.pool.num_bytes
    assert size > 64 * MB
    engine.pool._held.fill_(0.0)  # touch every page of it
    assert answer_of(engine.generate([[1, 2, 3]])[0][0])[0]
    before = resident_bytes()
    assert engine.release_memory(["kv_cache"]) == {"kv_cache": size}
    assert before - resident_bytes() > 0.95 * size
    assert (engine.state, engine.released) == ("released", ("kv_cache",))
    assert engine.cache is not None and engine.cache.num_tokens == 0
    engine.check()
    assert engine.resume_memory(["kv_cache"]) == {"kv_cache": size}
    assert engine.state == "running"
    assert_works(engine)


@pytest.mark.parametrize("staging", ["shadow", "in_place"])
def test_the_memory_of_the_weights_really_goes_and_they_are_invalid_until_an_update(
    tiny_model_dir: Callable[..., Path], staging: Literal["shadow", "in_place"]
) -> None:
    model = load_model(tiny_model_dir("qwen3", vocab_size=300_000), torch.float32)
    size = sum(tensor.numel() * 4 for tensor in model.parameters())
    assert size > 64 * MB
    engine = make_engine(model, staging=staging)
    old = values_of(model)
    push_weights(engine.weights, old, 3)
    copies = 2 if staging == "shadow" else 1
    before = resident_bytes()
    assert engine.release_memory(["weights"]) == {"weights": copies * size}
    assert before - resident_bytes() > 0.95 * copies * size
    assert engine.state == "released"
    with pytest.raises(EngineStateError, match="memory of the weights is released; resume it before"):
        engine.begin_update(4)
    assert engine.resume_memory() == {"weights": size, "kv_cache": 0}
    assert engine.state == "weights_invalid"
    engine.add_request(request("r"))
    with pytest.raises(EngineStateError, match="incomplete: their memory was released; commit a complete update"):
        engine.step()
    # All but one tensor are not enough.
    update = engine.begin_update(4)
    for name in list(old)[1:]:
        update.stage(name, old[name])
    with pytest.raises(WeightUpdateError):
        engine.commit_update(update)
    update.abort()
    assert engine.state == "weights_invalid"
    push_weights(engine.weights, old, 5)
    (output,) = engine.run()
    assert answer_of(output) == naive_answer(model, request("n"))
    assert output.weight_versions == [VersionRun(5, 8)]
    assert_works(engine)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this machine has no packed kernel")
def test_packed_copies_are_counted_and_go_with_the_weights(tiny_model_dir: Callable[..., Path]) -> None:
    model = load_model(tiny_model_dir("qwen3"), torch.bfloat16)
    engine = make_engine(model)
    sizes = {name: parameter.numel() * 2 for name, parameter in model.named_parameters()}
    packed = sum(size for name, size in sizes.items() if name == "embed" or (".weight" in name and "norm" not in name))
    assert engine.rollout_model.kept_bytes == packed
    assert engine.release_memory(["weights"]) == {"weights": sum(sizes.values()) + packed}
    assert engine.rollout_model.kept_bytes == 0


def test_memory_is_not_released_under_requests_that_hold_keys(model: Decoder) -> None:
    engine = make_engine(model)
    for i in range(2):
        engine.add_request(request(f"r{i}", [i + 1, 2], seed=i))
    engine.step()
    engine.pause("in_place")
    for tags in (["kv_cache"], ["weights"], ["weights", "kv_cache"]):
        with pytest.raises(EngineStateError, match=r"2 requests hold keys and values \(2 pages\)"):
            engine.release_memory(tags)  # type: ignore[arg-type]
        assert engine.released == ()
    engine.pause("retract")
    engine.release_memory(["kv_cache"])
    engine.add_request(request("late", [9]))
    engine.abort("r1")
    assert [output.request_id for output in engine.step()] == ["r1"]
    engine.resume()
    assert (engine.state, engine.can_step, engine.step()) == ("released", False, [])
    with pytest.raises(EngineStateError, match="kv_cache of the engine is released and 2 requests wait"):
        engine.run()
    engine.resume_memory()
    outputs = {output.request_id: output for output in engine.run()}
    assert answer_of(outputs["r0"]) == naive_answer(model, request("n", [1, 2], seed=0))
    assert answer_of(outputs["late"]) == naive_answer(model, request("n", [9]))
    assert_works(engine)


def test_memory_is_taken_again_only_where_it_is_there(own_model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(own_model)
    old = values_of(own_model)
    freed = engine.release_memory()
    needed = sum(freed.values())
    monkeypatch.setattr(lifecycle, "available_memory_bytes", lambda: needed - 1)
    with pytest.raises(EngineStateError, match=f"takes {needed} bytes .* and {needed - 1} are available"):
        engine.resume_memory()
    assert engine.released == ("weights", "kv_cache")
    # One of the two fits.
    assert engine.resume_memory(["weights"]) == {"weights": freed["weights"]}
    assert (engine.state, engine.released) == ("released", ("kv_cache",))
    push_weights(engine.weights, old, 1)
    assert engine.state == "released"
    assert engine.resume_memory(["kv_cache"]) == {"kv_cache": freed["kv_cache"]}
    assert_works(engine)


def test_releasing_and_resuming_twice_changes_nothing(own_model: Decoder) -> None:
    engine = make_engine(own_model)
    old = values_of(own_model)
    assert engine.resume_memory() == {"weights": 0, "kv_cache": 0}
    assert all(engine.release_memory().values())
    assert engine.release_memory() == {"weights": 0, "kv_cache": 0}
    assert all(engine.resume_memory().values())
    assert engine.resume_memory() == {"weights": 0, "kv_cache": 0}
    push_weights(engine.weights, old, 1)
    assert_works(engine)


def test_unknown_tags_are_refused_before_anything_is_released(model: Decoder) -> None:
    engine = make_engine(model)
    tags: list[MemoryTag] = ["kv_cache", "cuda_graph"]  # type: ignore[list-item]
    for call in (engine.release_memory, engine.resume_memory):
        with pytest.raises(RequestError, match="memory tag 'cuda_graph' is unknown; use weights or kv_cache"):
            call(tags)
    assert engine.released == ()
    assert_works(engine)


def test_weights_under_an_open_update_are_not_released(own_model: Decoder) -> None:
    engine = make_engine(own_model)
    update = engine.begin_update(1)
    with pytest.raises(WeightUpdateError, match="update to version 1 is open"):
        engine.release_memory()
    assert engine.released == ()
    update.abort()
    assert_works(engine)


def test_rope_tables_outlive_the_weights(own_model: Decoder) -> None:
    engine = make_engine(own_model)
    old = values_of(own_model)
    engine.generate([[1, 2, 3]])
    table = own_model._rope._cos.clone()
    engine.release_memory()
    engine.resume_memory()
    push_weights(engine.weights, old, 1)
    assert torch.equal(own_model._rope._cos, table)
    assert_works(engine)


def test_many_cycles_leave_no_memory_behind(own_model: Decoder) -> None:
    engine = make_engine(own_model, kv_tokens=1 << 15)
    old = values_of(own_model)
    levels = []
    for cycle in range(1, 31):
        engine.release_memory()
        levels.append(resident_bytes())
        engine.resume_memory()
        push_weights(engine.weights, old, cycle)
        engine.pool._held.fill_(0.0)
        assert_works(engine)
    assert levels[-1] - levels[4] < 4 * MB
