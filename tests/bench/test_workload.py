from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.workloads import load, multiturn, requests
from tests.hygiene.tree import REPO
from unison.bench.workload import read_workload
from unison.core.errors import DataError

WORKLOADS = sorted((REPO / "benchmarks" / "workloads").glob("*.json"))


def test_requests_are_conversations_of_one_turn(tmp_path: Path) -> None:
    work = load(tmp_path, requests({"n": 3, "temperature": 0.5, "id": "a"}, {"prompt_ids": [9]}))
    first, second = work.conversations
    assert (first.name, first.sampling.n, first.sampling.temperature) == ("a", 3, 0.5)
    assert (second.name, second.turns[0].new_ids) == ("requests[1]", (9,))
    assert (work.num_answers, work.max_output_tokens, work.num_prompt_tokens) == (4, 16, 4)


def test_a_conversation_begins_with_its_system_prompt(tmp_path: Path) -> None:
    work = load(tmp_path, multiturn())
    assert [turn.new_ids for turn in work.conversations[1].turns] == [(7, 1, 10, 11), (12,)]
    assert (work.num_answers, work.max_output_tokens, work.num_prompt_tokens) == (4, 10, 10)


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_our_own_workloads_are_read(path: Path) -> None:
    work = read_workload(path)
    assert work.name == path.stem and work.num_answers > 0
    assert all(one.sampling.ignore_eos for one in work.conversations)


def changed(document: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**document, **fields}


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        (changed(requests({}), kind="request"), "kind is 'request'; it must be one of requests, multiturn"),
        (changed(requests({}), requests=[]), "requests: Expected `array` of length >= 1"),
        (changed(requests({}), request=1), "request is unknown; did you mean requests?"),
        (requests({}, {"max_new_tokens": 0}), "requests[1].max_new_tokens: Expected `int` >= 1"),
        (requests({"prompt_ids": [1, "2"]}), "requests[0].prompt_ids[1]: Expected `int`, got `str`"),
        (requests({"prompt_ids": [-1]}), "requests[0].prompt_ids[0]: Expected `int` >= 0"),
        (requests({"stop": "x"}), "requests[0].stop is unknown"),
        (requests({"top_p": 0.0}), "requests[0]: top_p=0.0 is outside"),
        (requests({"n": 100_000}), "requests[0]: n=100000 is outside"),
        (changed(requests({}), requests=[5]), "requests[0]: Expected `object`, got `int`"),
        (changed(multiturn(), conversations=[{"turns": [{}]}]), "conversations[0].turns[0]: Object missing required"),
        (changed(multiturn(), temperature=-1.0), "conversations[0]: temperature=-1.0 is outside"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_field(tmp_path: Path, document: Any, complaint: str) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, document)
    assert complaint in str(caught.value) and "workload.json" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.json cannot be read: No such file"):
        read_workload(tmp_path / "nowhere.json")
