"""The control routes over a real engine process: what trainers send, held against the engine in this process."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file, save_file

from tests.conftest import TinyModelDir
from tests.weights.foreign_sender import bucket, serialised
from unison.config.schema import EngineConfig
from unison.config.serving import ServeConfig
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.models.loading import read_config
from unison.models.registry import read_spec
from unison.processes.shared_memory import Segment
from unison.server.app import create_app
from unison.server.connection import EngineConnection
from unison.server.front import Front
from unison.server.messages import Setup
from unison.server.routes import ROUTES
from unison.server.versions import Versions
from unison.text.tokenizer import Tokenizer
from unison.weights.arena import ArenaLayout
from unison.weights.group import join_group, listen
from unison.weights.manifest import pack_layout

Tensors = dict[str, torch.Tensor]
PROMPT = [5, 6, 7, 8]


@dataclass
class Server:
    """A front end in this process over an engine process."""

    front: Front
    link: EngineConnection
    http: httpx.AsyncClient
    folder: Path
    tensors: Tensors

    async def ok(self, path: str, /, **body: Any) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        return answer.json()

    async def refused(self, path: str, /, **body: Any) -> str:
        answer = await self.http.post(path, json=body)
        assert answer.status_code in (400, 409, 503), (path, answer.status_code, answer.text)
        return str(answer.json()["message"])

    async def get(self, path: str) -> Any:
        return (await self.http.get(path)).json()

    async def sample(self, num_tokens: int = 8, prompt: list[int] = PROMPT) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        return await self.ok("/generate", input_ids=prompt, sampling_params=sampling, return_logprob=True)


def changed(tensors: Mapping[str, torch.Tensor], factor: float) -> Tensors:
    """Other weights: every tensor is multiplied."""
    return {name: tensor * factor for name, tensor in tensors.items()}


def expected(folder: Path, tensors: Tensors, tmp: Path, num_tokens: int = 8) -> tuple[list[int], list[float]]:
    """Greedy ids and log-probs of an engine in this process that has loaded these weights from a folder."""
    other = write_folder(folder, tensors, tmp)
    engine = Engine.from_pretrained(other, dtype="float32", kv_tokens=2048)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)
    output = engine.generate([PROMPT], sampling)[0][0]
    return output.token_ids, output.logprobs


def write_folder(folder: Path, tensors: Tensors, made: Path) -> Path:
    made.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            (made / file.name).write_bytes(file.read_bytes())
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def serve(folder: Path, scenario: Callable[[Server], Awaitable[None]], **settings: Any) -> None:
    """Run a scenario over an engine process of its own."""
    config = ServeConfig(**settings)

    async def main() -> None:
        spec = read_spec(read_config(folder))
        num_bytes = ArenaLayout.of(spec, torch.float32).num_bytes
        segments = [Segment(num_bytes) for _ in range(2 * (config.staging == "shadow"))]
        setup = Setup(
            model=str(folder),
            dtype="float32",
            numerics="auto",
            engine=EngineConfig(kv_tokens=8192, max_running=16),
            staging=config.staging,
            threads=1,
            segments=tuple(segment.fd for segment in segments),
            segment_bytes=num_bytes if segments else 0,
            profile_dir=config.profile_dir,
        )
        link = EngineConnection(setup, start_s=60, hang_s=60)
        await link.start()
        front = Front(link, config, Tokenizer.from_folder(folder), Versions())
        transport = httpx.ASGITransport(create_app(front, ROUTES))
        tensors = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http:
            try:
                await asyncio.wait_for(scenario(Server(front, link, http, folder, tensors)), 60)
            finally:
                await link.close()
                for segment in segments:
                    segment.close()

    asyncio.run(main())


def buckets(tensors: Tensors, count: int) -> list[Tensors]:
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[i::count]} for i in range(count)]


async def stage_by_handle(server: Server, version: int, tensors: Tensors) -> list[Segment]:
    """The tensors in shared memory of this process, in one stage; the memory is to be closed by the caller."""
    layout = pack_layout((name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items())
    segment = Segment(layout.num_bytes)
    for entry in layout.entries:
        data = tensors[entry.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        segment.memory[entry.offset : entry.offset + entry.num_bytes] = data
    handle = msgspec.to_builtins(segment.handle)
    body = {"version": version, "transport": "handles", "handle": handle, "layout": msgspec.to_builtins(layout)}
    await server.ok("/weights/stage", **body)
    return [segment]


def log_probs(answer: Any) -> list[float]:
    return [row[0] for row in answer["meta_info"]["output_token_logprobs"]]


def test_an_update_in_pieces_while_requests_are_held_aborts_none_and_mixes_nothing(
    tiny_model_dir: TinyModelDir,
) -> None:
    async def scenario(server: Server) -> None:
        tasks = [asyncio.create_task(server.sample(200, [*PROMPT, i])) for i in range(12)]
        while server.link.beat.num_running < 12:
            await asyncio.sleep(0.01)
        await server.ok("/pause_generation", mode="in_place")
        while server.link.beat.pause_mode is None:
            await asyncio.sleep(0.01)
        before = server.link.beat.counters["num_sampled_tokens"]
        late = asyncio.create_task(server.sample(4, [9]))
        version = 1
        await server.ok("/weights/begin", version=version)
        held = [
            segment
            for piece in buckets(changed(server.tensors, 1.5), 3)
            for segment in await stage_by_handle(server, version, piece)
        ]
        await server.ok("/weights/prepare", version=version)
        await server.ok("/weights/commit", version=version)
        await server.ok("/update_weight_version", new_version="2")
        await asyncio.sleep(0.6)
        assert server.link.beat.counters["num_sampled_tokens"] == before
        assert not late.done()
        await server.ok("/continue_generation")
        answers = await asyncio.gather(*tasks)
        for answer in answers:
            info = answer["meta_info"]
            assert info["finish_reason"]["type"] == "length"
            assert len(answer["output_ids"]) == 200 == len(info["output_token_logprobs"])
            labels = [span["version"] if isinstance(span, dict) else span[0] for span in info["weight_versions"]]
            assert labels == ["default", "2"]
        assert (await late)["meta_info"]["weight_version"] == "2"
        for segment in held:
            segment.close()

    serve(tiny_model_dir(), scenario)


@pytest.mark.parametrize("flattened", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_slime_like_trainer_over_a_process_group(
    tiny_model_dir: TinyModelDir, tmp_path: Path, flattened: bool
) -> None:
    async def scenario(server: Server) -> None:
        new = changed(server.tensors, 1.25)
        wanted = expected(server.folder, new, tmp_path / "new")
        first = await server.sample()
        socket = listen("127.0.0.1")
        port = socket.getsockname()[1]
        ours = asyncio.create_task(asyncio.to_thread(join_group, "g", "127.0.0.1", port, 0, 2, "gloo", 30.0, socket))
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        await server.ok("/init_weights_update_group", **body, group_name="g", backend="gloo")
        group = await ours
        await server.ok("/pause_generation")
        assert (await server.http.get("/flush_cache")).status_code == 200
        await server.ok("/post_process_weights", restore_weights_before_load=True)
        pieces = buckets(new, 3)
        for i, piece in enumerate(pieces):
            more = {"weight_version": "7"} if i == len(pieces) - 1 else {}
            more |= {"load_format": "flattened_bucket"} if flattened else {}
            call = asyncio.create_task(
                server.ok(
                    "/update_weights_from_distributed",
                    names=list(piece),
                    dtypes=["float32"] * len(piece),
                    shapes=[list(tensor.shape) for tensor in piece.values()],
                    group_name="g",
                    flush_cache=False,
                    **more,
                )
            )
            flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in piece.values()])
            await asyncio.to_thread(group.send_bucket, flat if flattened else list(piece.values()))
            await call
        assert (await server.get("/get_weight_version")) == {"weight_version": "default"}
        await server.ok("/post_process_weights", post_process_quantization=True)
        await server.ok("/continue_generation")
        assert (await server.get("/model_info"))["weight_version"] == "7"
        answer = await server.sample()
        assert (answer["output_ids"], log_probs(answer)) == wanted
        assert answer["output_ids"] != first["output_ids"] or log_probs(answer) != log_probs(first)
        await server.ok("/destroy_weights_update_group", group_name="g")
        assert "g" in await server.refused("/destroy_weights_update_group", group_name="g")
        await asyncio.to_thread(group.leave)

    serve(tiny_model_dir(), scenario)


@pytest.mark.slow
def test_a_verl_like_trainer_over_a_folder_and_a_damaged_one(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        new = changed(server.tensors, 0.75)
        wanted = expected(server.folder, new, tmp_path / "new")
        before = await server.sample()
        lacking = dict(list(new.items())[:-1])
        folder = write_folder(server.folder, lacking, tmp_path / "lacking")
        message = await server.refused("/update_weights_from_disk", model_path=str(folder))
        assert list(new)[-1] in message
        assert "nowhere" in await server.refused("/update_weights_from_disk", model_path=str(tmp_path / "nowhere"))
        again = await server.sample()
        assert (again["output_ids"], log_probs(again)) == (before["output_ids"], log_probs(before))
        await server.ok("/update_weights_from_disk", model_path=str(tmp_path / "new"), weight_version="next")
        answer = await server.sample()
        assert (answer["output_ids"], log_probs(answer)) == wanted
        assert answer["meta_info"]["weight_version"] == "next"
        assert answer["meta_info"]["cached_tokens"] == 0
        payload = (await server.ok("/weights_checker", action="checksum"))["payload"]
        assert payload["checksum"] == (await server.get("/weights/status"))["checksum"]

    serve(tiny_model_dir(), scenario)


@pytest.mark.slow
def test_a_miles_like_trainer_retracts_and_every_request_ends_whole(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    async def scenario(server: Server) -> None:
        folder = write_folder(server.folder, changed(server.tensors, 1.5), tmp_path / "new")
        tasks = [asyncio.create_task(server.sample(60, [*PROMPT, i])) for i in range(4)]
        while server.link.beat.num_running < 4:
            await asyncio.sleep(0.01)
        await server.ok("/pause_generation", mode="retract")
        assert (await server.http.get("/flush_cache")).status_code == 200
        await server.ok("/update_weights_from_disk", model_path=str(folder))
        await server.ok("/update_weight_version", new_version="v2")
        await server.ok("/continue_generation")
        for answer in await asyncio.gather(*tasks):
            assert len(answer["output_ids"]) == 60
            assert answer["meta_info"]["finish_reason"]["type"] == "length"

    serve(tiny_model_dir(), scenario)


@pytest.mark.slow
def test_a_colocated_trainer_releases_trains_and_pushes(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        new = changed(server.tensors, 1.1)
        wanted = expected(server.folder, new, tmp_path / "new")
        freed = (await server.ok("/release_memory_occupation"))["freed_bytes"]
        assert set(freed) == {"weights", "kv_cache"} and all(freed.values())
        early = asyncio.create_task(server.sample())
        await server.ok("/resume_memory_occupation", tags=["weights"])
        await server.ok("/update_weights_from_disk", model_path=str(tmp_path / "new"), weight_version="1")
        await server.ok("/resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
        # What was asked while there was nothing to compute with has waited.
        for answer in (await early, await server.sample()):
            assert (answer["output_ids"], log_probs(answer)) == wanted
            assert answer["meta_info"]["weight_version"] == "1"

    serve(tiny_model_dir(), scenario)


@pytest.mark.slow
@pytest.mark.parametrize("staging", ["shadow", "in_place"])
def test_an_update_that_its_engine_dies_in_is_told_and_can_be_made_anew(
    tiny_model_dir: TinyModelDir, tmp_path: Path, staging: str
) -> None:
    async def scenario(server: Server) -> None:
        new = changed(server.tensors, 1.3)
        wanted = expected(server.folder, new, tmp_path / "new")
        await server.ok("/weights/begin", version=1)
        first, rest = buckets(new, 2)
        held = await stage_by_handle(server, 1, first)
        os.kill(server.link.info.pid, signal.SIGKILL)
        while not server.link.num_restarts:
            await asyncio.sleep(0.02)
        assert "engine process ended" in await server.refused("/weights/prepare", version=1)
        await server.ok("/weights/begin", version=1)
        for piece in (first, rest):
            held += await stage_by_handle(server, 1, piece)
        await server.ok("/weights/prepare", version=1)
        await server.ok("/weights/commit", version=1)
        answer = await server.sample()
        assert (answer["output_ids"], log_probs(answer)) == wanted
        for segment in held:
            segment.close()

    serve(tiny_model_dir(), scenario, staging=staging)


@pytest.mark.slow
def test_an_abort_that_waits_answers_after_the_requests(tiny_model_dir: TinyModelDir) -> None:
    async def scenario(server: Server) -> None:
        tasks = [asyncio.create_task(server.sample(200, [*PROMPT, i])) for i in range(6)]
        while server.link.beat.num_running < 6:
            await asyncio.sleep(0.01)
        assert (await server.ok("/abort_request", abort_all=True, wait=True))["num_aborted"] == 6
        for answer in await asyncio.gather(*tasks):
            info = answer["meta_info"]
            assert info["finish_reason"]["type"] == "abort"
            assert 0 < len(answer["output_ids"]) == len(info["output_token_logprobs"]) < 200
        await asyncio.sleep(0.6)
        assert (await server.get("/get_load"))[0]["num_reqs"] == 0

    serve(tiny_model_dir(), scenario)


@pytest.mark.slow
def test_values_metrics_and_a_profile_come_from_the_engine(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        name = next(name for name, tensor in server.tensors.items() if tensor.dim() == 1)
        values = await server.ok("/get_weights_by_name", name=name, truncate_size=5)
        assert values == server.tensors[name][:5].tolist()
        assert "nobody" in await server.refused("/get_weights_by_name", name="nobody")
        folder = Path((await server.ok("/start_profile", output_dir="run", activities=["CPU"]))["folder"])
        await server.sample()
        path = Path((await server.ok("/stop_profile"))["path"])
        assert path.parent == folder == tmp_path / "run" and path.stat().st_size > 1000
        await asyncio.sleep(0.6)
        text = (await server.http.get("/metrics")).text
        assert f'unison_weight_version{{model_name="{server.folder}"}} 0.0' in text
        info = await server.get("/server_info")
        assert info["numerics"] and info["internal_states"][0]["state"] == "running"

    serve(tiny_model_dir(), scenario, profile_dir=str(tmp_path))


@pytest.mark.slow
def test_serialised_buckets_reach_the_engine_from_shared_memory(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        new = changed(server.tensors, 0.9)
        wanted = expected(server.folder, new, tmp_path / "new")
        module = "sglang.srt.weight_sync.tensor_bucket"
        kept = []
        for i, piece in enumerate(buckets(new, 3)):
            kept.append(bucket(piece, module))
            dump = base64.b64encode(serialised(kept[-1])).decode()
            more = {"weight_version": "4"} if i == 2 else {}
            body = {"serialized_named_tensors": [dump], "load_format": "flattened_bucket", "flush_cache": False}
            answer = await server.ok("/update_weights_from_tensor", **body, **more)
            assert answer["committed"] is (i == 2)
        assert (await server.http.post("/flush_cache")).status_code == 200
        answer = await server.sample()
        assert (answer["output_ids"], log_probs(answer)) == wanted
        assert answer["meta_info"]["weight_version"] == "4"

    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        serve(tiny_model_dir(), scenario, allow_pickled_tensors=True)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
