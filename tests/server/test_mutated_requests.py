"""A thousand bodies with something wrong in them: each is answered, and typed, and the server goes on."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.server.conftest import MakeFront
from tests.server.http_support import call_all, generated, link_of

VALID: list[dict[str, Any]] = [
    {"text": "Hello", "sampling_params": {"max_new_tokens": 3, "temperature": 0.5, "stop": ["x"], "n": 2}},
    {"input_ids": [1, 2, 3], "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 2}},
    {"input_ids": [[1], [2, 3]], "rid": "r", "stream": True, "sampling_params": [{"seed": 1}, {"top_k": 5}]},
    {"text": ["a", "b"], "top_logprobs_num": 2, "return_logprob": True, "token_ids_logprob": [1, 2]},
    {"text": "a", "sampling_params": {"logit_bias": {"5": 1.0}, "stop_token_ids": [3], "min_new_tokens": 1}},
]
ODD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**63,
    10**30,
    1e308,
    -0.0,
    "",
    "x",
    "\x00",
    [],
    {},
    [[]],
    [None],
    {"": 0},
]


def mutated(random_: random.Random) -> bytes:
    """A valid body with something wrong in its values, its structure or its bytes."""
    body = json.loads(json.dumps(random_.choice(VALID)))
    for _ in range(random_.randint(1, 3)):
        table = body
        if random_.random() < 0.5 and isinstance(body.get("sampling_params"), dict):
            table = body["sampling_params"]
        if not table:
            continue
        name = random_.choice(sorted(table))
        change = random_.randrange(4)
        if change == 0:
            table[name] = random_.choice(ODD_VALUES)
        elif change == 1:
            del table[name]
        elif change == 2:
            table[name] = [table[name]] * random_.choice([0, 1, 2, 70])
        else:
            table[name + "x"] = table[name]
    body.setdefault("sampling_params", {"max_new_tokens": 2})
    data = bytearray(json.dumps(body).encode())
    if random_.random() < 0.4:
        for _ in range(random_.randint(1, 4)):
            place = random_.randrange(len(data))
            data[place : place + random_.randint(0, 2)] = random_.randbytes(random_.randint(0, 2))
    return bytes(data)


def test_a_thousand_mutated_bodies_get_a_typed_answer_each(make_front: MakeFront) -> None:
    front = make_front(model={"max_position_embeddings": 24})
    random_ = random.Random(0)
    statuses: dict[int, int] = {}
    for _ in range(20):
        requests = [{"method": "POST", "url": "/generate", "content": mutated(random_)} for _ in range(50)]
        for request, response in zip(requests, call_all(front, requests), strict=True):
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            assert response.status_code in (200, 400), (request["content"], response.text)
            if response.status_code == 400:
                assert response.json()["error"]["type"] == "invalid_request", request["content"]
    assert sum(statuses.values()) == 1000 and min(statuses.values()) > 100, statuses
    assert generated(front, text="a", sampling_params={"max_new_tokens": 3})["output_ids"]
    assert link_of(front).num_open == 0
    link_of(front).engine.check()
