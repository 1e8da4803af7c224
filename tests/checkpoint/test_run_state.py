from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from unison.checkpoint.run_state import RunState, decode_state, random_states, restore_random_states
from unison.core.errors import CheckpointError


def draws() -> list[Any]:
    return [
        [random.random(), random.gauss(), random.getrandbits(200), random.sample(range(1000), 5)],
        [np.random.rand(), np.random.randn(), np.random.randint(10**9), np.random.permutation(9).tolist()],
        [torch.rand(3).tolist(), torch.randn(1).item(), torch.randint(10**9, (2,)).tolist()],
    ]


@pytest.mark.parametrize("used", [0, 1, 3, 700])
def test_the_generators_go_on_where_they_were(used: int) -> None:
    for _ in range(used):
        # An odd number of Gaussian draws leaves a second one waiting in each of them.
        random.gauss(), np.random.randn(), torch.randn(1)
    states = json.loads(json.dumps(random_states()))
    expected = draws()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert draws() != expected
    restore_random_states(states)
    assert draws() == expected


def changed(name: str, value: Any) -> dict[str, Any]:
    return {**random_states(), name: value}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("python", None),
        ("python", [3, [1, 2], None]),
        ("python", [99, [0] * 625, None]),
        ("python", [3, [-1] * 625, None]),
        ("python", [3, ["x"] * 625, None]),
        ("python", "text"),
        ("numpy", ["MT19937", [1, 2], 0, 0, 0.0]),
        ("numpy", ["OTHER", [0] * 624, 0, 0, 0.0]),
        ("numpy", ["MT19937", [2**40] * 624, 0, 0, 0.0]),
        ("numpy", ["MT19937"]),
        ("torch", "not base64!"),
        ("torch", "AAAA"),
        ("torch", None),
        ("torch", 7),
    ],
)
def test_what_is_no_state_is_refused(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match="its random states cannot be restored"):
        restore_random_states(changed(name, value))


@pytest.mark.parametrize("states", [{}, [], "text", None])
def test_a_document_of_another_form_is_refused(states: Any) -> None:
    with pytest.raises(CheckpointError, match="its random states cannot be restored"):
        restore_random_states(states)


def state_document(**values: Any) -> dict[str, Any]:
    state = RunState(
        step=3,
        optimizer_steps=2,
        weights_version=3,
        weights_digest="w",
        base_digest="b",
        cursor={"epoch": 1, "place": 5},
        pending_draws=[4, 1],
        unlogged={"a": 0.1},
        evaluations={"0": {"eval/accuracy": 1 / 3}},
        numerics={"threads": 1},
    )
    document: dict[str, Any] = msgspec.to_builtins(state)
    return document | values


def test_a_state_comes_back_as_it_was() -> None:
    document = json.loads(json.dumps(state_document()))
    assert msgspec.to_builtins(decode_state(document)) == state_document()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (state_document(step="3"), "step"),
        (state_document(step=3.0), "step"),
        (state_document(further=1), "further"),
        ({"step": 3}, "missing"),
        (None, "cannot be read"),
        (state_document(format=2), "format 2; this version reads 1"),
        (state_document(pending_draws=["4"]), "pending_draws"),
    ],
)
def test_a_state_of_another_form_is_refused(document: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decode_state(document)
