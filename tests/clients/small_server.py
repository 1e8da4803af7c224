"""A small server of the contract over an engine in its own process: what the clients are held against.

As a program it takes the flags of ``unison serve`` that a fleet gives it. Tests make it misbehave through ``/faults``:
a list of names, each of which spoils the next call that it is about.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from unison.config.schema import EngineConfig
from unison.core.errors import RequestError, UnisonError
from unison.core.records import GenerationOutput, GenerationRequest, VersionRun
from unison.core.sampling import SamplingParams
from unison.engine.build import build_engine
from unison.engine.client import InProcessClient
from unison.engine.engine import Engine
from unison.engine.sampler import SAMPLER_NAME
from unison.models.names import published_tensors
from unison.processes.shared_memory import Handle, open_handle
from unison.text.detokenize import IncrementalDetokenizer
from unison.weights.checksum import weights_checksum
from unison.weights.manifest import DTYPES, BufferLayout
from unison.weights.push import push_weights


class SmallServer:
    def __init__(self, engine: Engine, *, key: str | None = None, staging: str = "shadow") -> None:
        self.engine = engine
        self.client = InProcessClient(engine)
        self.key = key
        self.staging = staging
        self.faults: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.commands: list[str] = []
        self.labels = {0: "default"}
        self.state = "running"
        self.checksum = weights_checksum(published_tensors(engine.model))
        self.layouts: dict[str, BufferLayout] = {}
        self.open: dict[str, Any] | None = None
        self.sent: dict[str, str] = {}

    def app(self) -> Starlette:
        routes = [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/faults", self.set_faults, methods=["POST"]),
            Route("/server_info", self.info),
            Route("/weights/status", self.status),
        ]
        for name in ("begin", "layout", "stage", "prepare", "commit", "abort"):
            routes.append(Route(f"/weights/{name}", self.weights, methods=["POST"]))
        for name in ("abort_request", "release_memory_occupation", "resume_memory_occupation"):
            routes.append(Route(f"/{name}", self.command, methods=["POST"]))
        return Starlette(routes=routes)

    def spoilt(self, name: str) -> bool:
        if name in self.faults:
            self.faults.remove(name)
            return True
        return False

    async def set_faults(self, request: Request) -> Response:
        self.faults += await request.json()
        return JSONResponse({"seen": self.requests, "commands": self.commands})

    def refused(self, request: Request) -> Response | None:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return error(401, "unauthorized", "show the admin key")
        return None

    # Requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        if (response := self.refused(request)) is not None:
            return response
        body = await request.json()
        self.requests.append(body)
        if self.spoilt("busy"):
            return error(503, "queue_full", "the queue is full")
        if self.spoilt("garbage"):
            return Response(b'{"text": 3}', media_type="application/json")
        if self.state == "weights_invalid":
            return error(503, "weights_invalid", "an update failed half-way")
        if self.spoilt("silence"):
            await asyncio.sleep(600)
        try:
            asked = request_of(body)
        except RequestError as wrong:
            return error(400, "invalid_request", str(wrong))
        dying = next((fault for fault in self.faults if fault.startswith("die after ")), None)
        if dying is not None:
            self.faults.remove(dying)
            return await self.die(asked, int(dying.split()[-1]), body)
        if body.get("stream"):
            return StreamingResponse(self.pieces(asked, body), media_type="text/event-stream")
        running = asyncio.ensure_future(self.client.generate(asked))
        gone = asyncio.ensure_future(self.until_gone(request))
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not running.done():
            running.cancel()
            return Response(status_code=499)
        try:
            return answer(self.body(running.result(), body, None))
        except RequestError as wrong:
            return error(400, "invalid_request", str(wrong))
        except UnisonError as wrong:
            return error(500, "internal", str(wrong))

    async def until_gone(self, request: Request) -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.05)

    async def die(self, asked: GenerationRequest, count: int, body: dict[str, Any]) -> Response:
        """Answer as an engine that dies after ``count`` more tokens."""
        most = len(asked.output_ids) + count
        cut = replace(asked, sampling=replace(asked.sampling, max_new_tokens=most))
        output = await self.client.generate(cut)
        if output.finish_reason == "stop" or most >= asked.sampling.max_new_tokens:
            return answer(self.body(output, body, None))
        return answer(self.body(replace(output, finish_reason="abort"), body, "EngineDied"))

    async def pieces(self, asked: GenerationRequest, body: dict[str, Any]) -> Any:
        so_far: dict[str, Any] = {"ids": [], "logprobs": [], "text": self.text_of(asked.output_ids), "versions": []}
        num_left = 3 if self.spoilt("break stream") else None
        async for delta in self.client.stream(asked):
            if delta.output is not None:
                yield f"data: {json.dumps(self.body(delta.output, body, None))}\n\n"
                break
            so_far["ids"] += delta.token_ids
            so_far["logprobs"] += delta.logprobs
            so_far["text"] += delta.text
            so_far["versions"] += [run.version for run in delta.weight_versions for _ in range(run.count)]
            meta = {
                "finish_reason": None,
                "output_token_logprobs": triples(so_far["logprobs"], so_far["ids"]),
                "weight_versions": self.spans([VersionRun(version, 1) for version in so_far["versions"]]),
            }
            chunk = {"text": so_far["text"], "output_ids": so_far["ids"], "meta_info": meta}
            yield f"data: {json.dumps(chunk)}\n\n"
            if num_left is not None:
                num_left -= 1
                if num_left == 0:
                    raise ConnectionError("the stream breaks off")
        yield "data: [DONE]\n\n"

    def text_of(self, ids: tuple[int, ...]) -> str:
        """As far as further tokens cannot change it."""
        if self.engine.tokenizer is None:
            return ""
        decoder = IncrementalDetokenizer(self.engine.tokenizer)
        return "".join(decoder.push(token) for token in ids)

    def body(self, output: GenerationOutput, asked: dict[str, Any], died: str | None) -> dict[str, Any]:
        start = asked.get("logprob_start_len", -1)
        finish: dict[str, Any] = {"type": output.finish_reason}
        if output.finish_reason == "stop":
            finish["matched"] = output.matched_stop
        if output.finish_reason == "abort":
            finish |= {"message": died or "aborted", "err_type": died, "status_code": None}
        meta: dict[str, Any] = {
            "id": asked.get("rid"),
            "finish_reason": finish,
            "weight_versions": self.spans(output.weight_versions),
            "kv_versions": self.spans(output.kv_versions),
            "output_token_logprobs": triples(output.logprobs, output.token_ids),
            "cached_tokens": output.num_cached_tokens,
            "seed": output.seed,
            "held_text": output.held_text,
        }
        if start >= 0:
            scores = [None, *output.prompt_logprobs] if start == 0 else output.prompt_logprobs
            meta["input_token_logprobs"] = [
                [x, i, None] for x, i in zip(scores, output.prompt_ids[start:], strict=False)
            ]
        if output.top_logprobs:
            meta["output_top_logprobs"] = [[[x.logprob, x.token_id, None] for x in row] for row in output.top_logprobs]
        if output.token_id_logprobs:
            ids = asked["token_ids_logprob"]
            meta["output_token_ids_logprobs"] = [triples(row, ids) for row in output.token_id_logprobs]
        return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}

    def spans(self, runs: list[VersionRun]) -> list[dict[str, Any]]:
        found, start = [], 0
        for run in runs:
            label = self.labels.get(run.version, str(run.version))
            if self.spoilt("foreign label"):
                label = "another trainer's"
            found.append({"version": label, "start": start, "end": start + run.count})
            start += run.count
        return found

    # Control -----------------------------------------------------------------------------------------------------

    async def command(self, request: Request) -> Response:
        if (response := self.refused(request)) is not None:
            return response
        name, body = request.url.path[1:], await request.json()
        self.commands.append(name)
        if name == "abort_request":
            self.client.abort(body["rid"])
        elif name == "release_memory_occupation":
            self.state = "released"
        elif "weights" in body["tags"] and self.staging == "in_place":
            self.state = "weights_invalid"
        else:
            self.state = "running"
        return JSONResponse({"success": True})

    async def info(self, request: Request) -> Response:
        spec = self.engine.model.spec
        return self.refused(request) or JSONResponse(
            {
                "dtype": str(self.engine.model.dtype).removeprefix("torch."),
                "numerics": self.engine.path.name,
                "sampler": SAMPLER_NAME,
                "torch": str(torch.__version__),
                "vocab_size": spec.vocab_size,
                "num_parameters": spec.num_parameters(),
                "staging": self.staging,
            }
        )

    async def status(self, request: Request) -> Response:
        version = self.engine.weights.version
        return self.refused(request) or JSONResponse(
            {
                "version": version,
                "label": self.labels.get(version, str(version)),
                "state": self.state,
                "staging": self.staging,
                "checksum": self.checksum,
                "open_update": None if self.open is None else self.open["version"],
                "num_restarts": 0,
                "pid": os.getpid(),
            }
        )

    async def weights(self, request: Request) -> Response:
        if (response := self.refused(request)) is not None:
            return response
        name, body = request.url.path.rpartition("/")[2], await request.json()
        self.commands.append(name)
        if self.spoilt(f"refuse {name}"):
            return failed(400, "update", f"{name} was refused")
        if self.spoilt(f"hang {name}"):
            await asyncio.sleep(600)
        if self.spoilt(f"exit {name}"):
            os._exit(3)
        try:
            return JSONResponse({"success": True, **getattr(self, f"on_{name}")(body)})
        except Refusal as refusal:
            return failed(409, "state", str(refusal))
        except (UnisonError, msgspec.ValidationError) as wrong:
            return failed(400, "update", str(wrong))

    def on_begin(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.open is not None:
            raise Refusal("an update is open")
        if body["version"] <= self.engine.weights.version:
            raise UnisonError(f"version {body['version']} is not above the present one")
        self.open = {"version": body["version"], "label": body["label"], "tensors": {}}
        return {"version": body["version"], "staging": self.staging}

    def on_layout(self, body: dict[str, Any]) -> dict[str, Any]:
        layout = msgspec.convert(body["layout"], BufferLayout)
        self.layouts[layout.layout_id] = layout
        return {"layout_id": layout.layout_id}

    def on_stage(self, body: dict[str, Any]) -> dict[str, Any]:
        layout = self.layouts.get(body["layout_id"])
        if layout is None:
            raise Refusal("unknown layout")
        update = self.current(body)
        if self.staging == "in_place":
            self.state = "weights_invalid"
        memory = torch.frombuffer(bytearray(open_handle(msgspec.convert(body["handle"], Handle))), dtype=torch.uint8)
        for entry in layout.entries:
            flat = memory[entry.offset : entry.offset + entry.num_bytes]
            update["tensors"][entry.name] = flat.view(DTYPES[entry.dtype]).reshape(entry.shape)
        return {"num_tensors": len(layout.entries)}

    def on_prepare(self, body: dict[str, Any]) -> dict[str, Any]:
        checksum = weights_checksum(self.current(body)["tensors"])
        if self.spoilt("spoil prepare") or checksum != body["checksum"]:
            raise UnisonError(f"the checksum is {checksum}, not {body['checksum']}")
        return {"checksum": checksum}

    def on_commit(self, body: dict[str, Any]) -> dict[str, Any]:
        update = self.current(body)
        push_weights(self.engine.weights, update["tensors"], update["version"])
        self.labels[update["version"]] = update["label"]
        self.checksum = weights_checksum(published_tensors(self.engine.model))
        self.open, self.state = None, "running"
        return {"checksum": self.checksum, "label": update["label"]}

    def on_abort(self, body: dict[str, Any]) -> dict[str, Any]:
        self.open = None
        return {}

    def current(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.open is None or self.open["version"] != body["version"]:
            raise Refusal("no such update is open")
        return self.open


class Refusal(Exception):
    pass


def error(status: int, kind: str, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None}}, status)


def failed(status: int, kind: str, message: str) -> Response:
    return JSONResponse({"success": False, "message": message, "kind": kind}, status)


def answer(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def triples(values: list[float], ids: list[int]) -> list[list[Any]]:
    return [[value, token, None] for value, token in zip(values, ids, strict=True)]


def request_of(body: dict[str, Any]) -> GenerationRequest:
    given = dict(body["sampling_params"])
    given["seed"] = given.pop("sampling_seed")
    given["logit_bias"] = {int(key): value for key, value in given.get("logit_bias", {}).items()}
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "forbidden_token_ids", "forced_ids"):
        if given.get(name) is not None:
            given[name] = tuple(given[name])
    start = body.get("logprob_start_len", -1)
    sampling = SamplingParams(
        **given,
        logprobs=body["logprob_mode"],
        top_logprobs=body.get("top_logprobs_num", 0),
        logprob_token_ids=tuple(body.get("token_ids_logprob", ())),
        prompt_logprobs_from=None if start < 0 else start,
    )
    return GenerationRequest(
        request_id=body["rid"],
        prompt_ids=tuple(body["input_ids"]),
        output_ids=tuple(body.get("output_ids", ())),
        sampling=sampling,
    )


class Running:
    """A server in a thread of this process; a context."""

    def __init__(self, server: SmallServer) -> None:
        config = uvicorn.Config(
            server.app(), host="127.0.0.1", port=0, log_level="critical", timeout_graceful_shutdown=1
        )
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run, daemon=True)
        self.url = ""

    def __enter__(self) -> Running:
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.01)
        port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *exception: object) -> None:
        self._uvicorn.force_exit = self._uvicorn.should_exit = True
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "dtype", "numerics", "host", "port", "staging", "threads", "cores", "ready-fd", "update-s"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--admin-key-env")
    parser.add_argument("--end-with-parent", action="store_true")
    options, rest = parser.parse_known_args()
    torch.set_num_threads(1)
    settings = {rest[i].removeprefix("--engine."): json.loads(rest[i + 1]) for i in range(0, len(rest), 2)}
    engine = build_engine(
        options.model, dtype=options.dtype, numerics=options.numerics, config=msgspec.convert(settings, EngineConfig)
    )
    server = SmallServer(engine, key=os.environ[options.admin_key_env], staging=options.staging)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    with Running(server) as running:
        os.write(int(options.ready_fd), json.dumps({"url": running.url, "pid": os.getpid()}).encode() + b"\n")
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(0)


if __name__ == "__main__":
    main()
