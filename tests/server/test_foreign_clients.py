"""Rollout clients as slime, verl and miles write them, against a real server: what they read is there, and true."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import TinyModelDir
from tests.server.serving import Served, serving
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine

PROMPT = [72, 101, 108, 108, 111]
LONG = 400


@pytest.fixture(scope="module")
def model(tiny_model_dir: TinyModelDir) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with serving(model) as served:
        yield served


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine.from_pretrained(model)


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class Rollout:
    """A sample as slime keeps it: built from ``output_token_logprobs`` alone."""

    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    status: Status = Status.PENDING
    versions: list[str] = field(default_factory=list)
    text: str = ""

    def take(self, output: dict[str, Any]) -> None:
        info = output["meta_info"]
        self.tokens = self.tokens + [entry[1] for entry in info["output_token_logprobs"]]
        self.logprobs = self.logprobs + [entry[0] for entry in info["output_token_logprobs"]]
        self.text += output["text"]
        self.versions.append(info["weight_version"])
        known = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}
        self.status = known[info["finish_reason"]["type"]]


def slime_body(tokens: list[int], max_new_tokens: int, seed: int) -> dict[str, Any]:
    return {
        "input_ids": tokens,
        "return_logprob": True,
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": max_new_tokens,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "sampling_seed": seed,
        },
    }


def undisturbed(engine: Engine, seed: int, max_new_tokens: int) -> tuple[list[int], list[float]]:
    (output,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=max_new_tokens, seed=seed))[0]
    return output.token_ids, output.logprobs


def test_a_slime_like_rollout_rebuilds_the_sample_from_its_log_probs(server: Served, engine: Engine) -> None:
    sample = Rollout(list(PROMPT))
    response = server.client.post(
        "/generate", json=slime_body(PROMPT, 24, 3), headers={"X-SMG-Routing-Key": "session-1"}
    )
    output = response.json()
    sample.take(output)
    ids, logprobs = undisturbed(engine, 3, 24)
    assert (sample.tokens[len(PROMPT) :], sample.logprobs) == (ids, logprobs)
    assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
    assert sample.text == engine.tokenizer.decode(ids, skip_special=False)  # type: ignore[union-attr]
    assert output["meta_info"]["ignored_fields"] == ["sampling_params.spaces_between_special_tokens"]
    assert len(ids) == output["meta_info"]["completion_tokens"] == len(output["output_ids"])


def test_a_slime_like_partial_rollout_is_aborted_by_all_and_goes_on(server: Served, engine: Engine) -> None:
    """Its loop: abort everything every moment until nothing is left, keep what came back, send it again."""

    async def rollout() -> list[Rollout]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            samples = [Rollout(list(PROMPT)) for _ in range(8)]

            async def draw(k: int) -> None:
                left = LONG - (len(samples[k].tokens) - len(PROMPT))
                body = slime_body(samples[k].tokens, left, k)
                body["sampling_params"]["ignore_eos"] = True
                samples[k].take((await http.post("/generate", json=body)).json())

            tasks = [asyncio.create_task(draw(k)) for k in range(8)]
            await asyncio.sleep(0.2)
            while True:
                assert (await http.post("/abort_request", json={"abort_all": True})).status_code == 200
                load = (await http.get("/v1/loads?include=core")).json()["loads"][0]
                if not load["num_running_reqs"] + load["num_waiting_reqs"]:
                    break
                await asyncio.sleep(0.05)
            await asyncio.gather(*tasks)
            assert {sample.status for sample in samples} == {Status.ABORTED}
            assert all(len(sample.logprobs) == len(sample.tokens) - len(PROMPT) for sample in samples)
            await asyncio.gather(*(draw(k) for k in range(8)))
            return samples

    samples = asyncio.run(rollout())
    for sample in samples:
        assert sample.status is Status.TRUNCATED
        assert len(sample.logprobs) == len(sample.tokens) - len(PROMPT) == LONG
    # The first part is that of an undisturbed request. The second one was sent as a prompt, which this contract
    # cannot tell from output; noise goes by position, so it is the same all the same.
    for k, sample in list(enumerate(samples))[:2]:
        settings = SamplingParams(max_new_tokens=LONG, seed=k, ignore_eos=True)
        (output,) = engine.generate([PROMPT], settings)[0]
        assert sample.tokens[len(PROMPT) :] == output.token_ids
        assert sample.logprobs == output.logprobs


def test_a_slime_like_stream_is_left_and_its_request_ends(server: Served) -> None:
    body = slime_body(PROMPT, 1900, 5) | {"stream": True}
    body["sampling_params"]["ignore_eos"] = True
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert not chunk["meta_info"]["finish_reason"]
                if len(chunk["output_ids"]) > 3:
                    break
    for _ in range(200):
        if not server.get("/get_load")[1][0]["num_reqs"]:
            break
    assert server.get("/get_load")[1][0]["num_reqs"] == 0


def test_a_verl_like_rollout_unpacks_exactly_three(server: Served, engine: Engine) -> None:
    body = {
        "rid": "verl-1",
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 16, "sampling_seed": 9},
        "return_logprob": True,
        "image_data": None,
    }
    output = server.ask("/generate", **body)
    logprobs, ids = zip(*[(p, i) for p, i, _ in output["meta_info"]["output_token_logprobs"]], strict=True)
    assert (list(ids), list(logprobs)) == undisturbed(engine, 9, 16)
    assert output["meta_info"]["id"] == "verl-1"
    # Its own abort names a request that may have ended: no error.
    assert server.post("/abort_request", rid="verl-1")[0] == 200


def test_a_miles_like_scorer_reads_the_tail_of_the_prompt(server: Served, engine: Engine) -> None:
    ids, _ = undisturbed(engine, 4, 12)
    body = {
        "input_ids": PROMPT + ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": len(PROMPT) - 1,
    }
    output = server.ask("/generate", **body)
    entries = output["meta_info"]["input_token_logprobs"][-len(ids) :]
    assert [entry[1] for entry in entries] == ids
    settings = SamplingParams(max_new_tokens=0, temperature=0, prompt_logprobs_from=len(PROMPT))
    (scored,) = engine.generate([PROMPT + ids], settings)[0]
    assert [entry[0] for entry in entries] == scored.prompt_logprobs
    assert output["output_ids"] == []
    assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_a_slime_like_monitor_finds_what_it_looks_for(server: Served) -> None:
    assert server.get("/health_generate")[0] == 200
    assert server.get("/get_weight_version")[1]["weight_version"] == "default"
    assert server.get("/model_info")[1]["weight_version"] == "default"
    info = server.get("/server_info")[1]
    assert {"model_path", "tp_size", "internal_states", "version"} <= set(info)
    assert server.post("/destroy_weights_update_group", group_name="slime-pp_0")[0] == 400
    for _ in range(60):
        if server.get("/flush_cache")[0] == 200:
            break
    assert server.get("/flush_cache")[0] == 200
    assert "sglang:num_running_reqs" in server.get("/metrics")[1]


@pytest.mark.parametrize("transport", ["handles", "group", "disk"])
def test_the_example_pushes_weights_by_every_transport(server: Served, model: Path, transport: str) -> None:
    before = server.get("/weights/status")[1]["version"]
    script = Path(__file__).parents[2] / "examples" / "push_weights.py"
    command = [sys.executable, str(script), "--url", server.url, "--model", str(model), "--transport", transport]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    status = server.get("/weights/status")[1]
    assert status["version"] == before + 1
    assert f"version {before + 1} is live, checksum {status['checksum']}" in done.stdout
