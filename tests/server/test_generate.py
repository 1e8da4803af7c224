"""What /generate answers is what the engine samples."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.conftest import MakeFront
from unison.core.sampling import SamplingParams
from unison.server.app import create_app
from unison.server.front import Front
from unison.server.routes import ROUTES


def post(front: Front, body: Any, path: str = "/generate", **options: Any) -> httpx.Response:
    import asyncio

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(front, ROUTES))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            if isinstance(body, bytes):
                return await client.post(path, content=body, **options)
            return await client.post(path, json=body, **options)

    return asyncio.run(go())


def test_ids_and_logprobs_are_those_of_the_engine_to_the_bit(make_front: MakeFront) -> None:
    front = make_front()
    body = {
        "text": "Hello there",
        "sampling_params": {"max_new_tokens": 12, "sampling_seed": 7, "temperature": 0.9},
        "return_logprob": True,
    }
    answer = post(front, body).json()
    engine = front.link.engine  # type: ignore[attr-defined]
    ((expected,),) = engine.generate(["Hello there"], SamplingParams(max_new_tokens=12, seed=7, temperature=0.9))
    assert answer["output_ids"] == expected.token_ids
    assert [triple[0] for triple in answer["meta_info"]["output_token_logprobs"]] == expected.logprobs
    assert answer["text"] == expected.text
    assert answer["meta_info"]["completion_tokens"] == 12


@pytest.mark.parametrize("body", [b"[1,2", {}, {"text": 5}, {"text": ["a", 5]}])
def test_bad_bodies_are_typed_errors(make_front: MakeFront, body: Any) -> None:
    response = post(make_front(), body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request"
