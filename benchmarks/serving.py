"""Tokens per second through a server, beside the same engine in process: what HTTP costs.

usage: serving.py --workload FILE [--model M] [--threads N] [--rounds N] [--only VARIANT ...]

Every variant answers the same requests with the same seeds, log-probs included. One request per sample, all sent at
once. The engine of a served variant is a process of its own; front end and client share what cores are left.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import Measured, Meter, compare, emit
from rollout import turns_of

VARIANTS = ("http", "http-incremental", "http-cumulative", "in-process")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=VARIANTS, nargs="+", default=VARIANTS, help="variants to compare")
    parser.add_argument("--variant", choices=VARIANTS, help="run one variant here (used by the script itself)")
    options = parser.parse_args()
    if options.variant is None:
        arguments = ["--workload", options.workload, "--model", options.model, "--threads", str(options.threads)]
        compare(__file__, options.only, arguments, options.rounds, "tokens")
        return
    bodies = requests(json.loads(Path(options.workload).read_text()))
    if options.variant == "in-process":
        emit(in_process(options.model, options.threads, bodies))
    else:
        emit(served(options.model, options.threads, bodies, options.variant))


def requests(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Bodies of ``/generate``, one for each sample of the workload's first turns."""
    return [
        {
            "rid": f"{i}-{k}",
            "input_ids": ids,
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "sampling_seed": 1000 * i + k,
                "ignore_eos": True,
            },
        }
        for i, ids, max_new_tokens, copies in turns_of(workload)[0]
        for k in range(copies)
    ]


def in_process(model: str, threads: int, bodies: list[dict[str, Any]]) -> Measured:
    import torch

    from unison import Engine, SamplingParams
    from unison.core.records import GenerationRequest

    torch.set_num_threads(threads)
    engine = Engine.from_pretrained(model)
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
    with Meter() as meter:
        for body in bodies:
            asked = body["sampling_params"]
            sampling = SamplingParams(
                max_new_tokens=asked["max_new_tokens"], seed=asked["sampling_seed"], ignore_eos=True
            )
            engine.add_request(
                GenerationRequest(request_id=body["rid"], prompt_ids=tuple(body["input_ids"]), sampling=sampling)
            )
        outputs = {output.request_id: output.token_ids for output in engine.run()}
    return meter.result(sum(map(len, outputs.values())), digest=digest(outputs))


def served(model: str, threads: int, bodies: list[dict[str, Any]], variant: str) -> Measured:
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "unison.cli.main", "serve", "--model", model, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--threads", str(threads), "--ready-fd", str(write_fd), "--end-with-parent"], pass_fds=(write_fd,)
    )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as pipe:
            url = json.loads(pipe.readline())["url"]
        return asyncio.run(ask_all(url, bodies, variant))
    finally:
        process.terminate()
        process.wait()


async def ask_all(url: str, bodies: list[dict[str, Any]], variant: str) -> Measured:
    import httpx

    if variant != "http":
        more = {"stream": True, "stream_incremental": variant == "http-incremental"}
        bodies = [{**body, **more} for body in bodies]
    limits = httpx.Limits(max_connections=len(bodies) + 1)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        warm = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
        await asyncio.gather(*(client.post("/generate", json=warm) for _ in range(4)))
        await client.post("/flush_cache")
        started = time.perf_counter()
        with Meter() as meter:
            answers = await asyncio.gather(*(ask(client, body) for body in bodies))
    outputs = dict(answers)
    return meter.result(
        sum(map(len, outputs.values())), digest=digest(outputs), seconds=round(time.perf_counter() - started, 2)
    )


async def ask(client: Any, body: dict[str, Any]) -> tuple[str, list[int]]:
    if not body.get("stream"):
        response = await client.post("/generate", json=body)
        response.raise_for_status()
        return body["rid"], response.json()["output_ids"]
    ids: list[int] = []
    async with client.stream("POST", "/generate", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])["output_ids"]
                ids = ids + chunk if body["stream_incremental"] else chunk
    return body["rid"], ids


def digest(outputs: dict[str, list[int]]) -> str:
    """Equal for equal answers: all variants must make the same tokens."""
    return hashlib.sha256(json.dumps(sorted(outputs.items())).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
