"""Unison's own weight routes: a transaction with a lease, seen from the front end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from tests.server.fake_link import Client, run
from unison.processes.shared_memory import MemfdHandle, ShmHandle
from unison.server.messages import StageDisk, StageGroup, StageHandle
from unison.server.updates import Sender
from unison.weights.manifest import BufferLayout, pack_layout

LAYOUT = pack_layout([("embed", "float32", (4, 2)), ("layer", "float32", (2,)), ("norm", "bfloat16", (2,))])


def plain(layout: BufferLayout) -> dict[str, Any]:
    made: dict[str, Any] = msgspec.to_builtins(layout)
    return made


def by_handle(version: int = 1, **more: Any) -> dict[str, Any]:
    handle = {"type": "memfd", "pid": 1, "fd": 3, "num_bytes": LAYOUT.num_bytes}
    return {"version": version, "transport": "handles", "handle": handle, "layout": plain(LAYOUT), **more}


def test_an_update_from_begin_to_commit() -> None:
    async def scenario(client: Client) -> None:
        assert await client.ok("/weights/begin", version=5, label="step-5") == {
            "success": True,
            "version": 5,
            "staging": "shadow",
        }
        assert (await client.ok("/weights/layout", layout=plain(LAYOUT)))["layout_id"] == LAYOUT.layout_id
        staged = await client.ok("/weights/stage", **by_handle(5))
        assert staged["num_tensors"] == 3 and staged["seconds"] == {"all": 0.1}
        assert (await client.get("/weights/status")).json()["open_update"] == 5
        prepared = await client.ok("/weights/prepare", version=5, checksum="a" * 32)
        assert prepared["checksum"] == f"{5:032x}"
        committed = await client.ok("/weights/commit", version=5)
        assert committed["version"] == 5 and committed["label"] == "step-5"
        assert committed["seconds"] == {"swap": 0.1, "repack": 0.2}
        assert (await client.get("/weights/status")).json() == {
            "version": 5,
            "label": "step-5",
            "state": "running",
            "staging": "shadow",
            "checksum": f"{5:032x}",
            "open_update": None,
            "num_restarts": 0,
            "pid": 4242,
        }
        assert (
            b'unison_weight_updates_total{model_name="/models/tiny",outcome="committed"} 1.0'
            in client.front.metrics.text()
        )

    run(scenario)


def test_each_transport_reaches_the_engine_as_it_was_sent() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/weights/begin", version=1)
        shm = {"type": "shm", "name": "u1", "num_bytes": 192}
        await client.ok("/weights/stage", **by_handle(handle=shm, checksum="b" * 32))
        await client.ok("/weights/stage", **by_handle())
        await client.ok("/weights/stage", version=1, transport="disk", path="/models/next")
        group = {"group": "g", "layout": plain(LAYOUT), "flattened": True, "timeout_s": 7.5}
        await client.ok("/weights/stage", version=1, transport="group", **group)
        assert client.link.actions[1:] == [
            StageHandle(1, ShmHandle("u1", 192), "", LAYOUT, "b" * 32),
            StageHandle(1, MemfdHandle(1, 3, LAYOUT.num_bytes), "", LAYOUT, None),
            StageDisk(1, "/models/next"),
            StageGroup(1, "g", LAYOUT, "", True, 7.5),
        ]

    run(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"version": -1, "transport": "disk", "path": "/m"}, "version"),
        ({"version": True, "transport": "disk", "path": "/m"}, "version"),
        ({"transport": "disk", "path": "/m"}, "version"),
        ({"version": 1, "transport": "pigeon"}, "transport"),
        ({"version": 1, "transport": "disk"}, "path"),
        ({"version": 1, "transport": "group", "layout_id": "a"}, "group"),
        ({"version": 1, "transport": "handles", "layout_id": "a"}, "handle"),
        (by_handle(layout=None), "layout_id"),
        (by_handle(layout_id="a"), "layout_id"),
        (by_handle(checksum="xyz"), "checksum"),
        (by_handle(handle={"type": "file", "name": "a", "num_bytes": 3}), "handle.type"),
        (by_handle(layout={"entries": [{"name": "a"}], "num_bytes": 3}), "layout.entries[0]"),
    ],
)
def test_a_stage_with_a_wrong_field_is_refused_by_its_name_and_harms_nothing(body: dict[str, Any], param: str) -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/weights/begin", version=1)
        answer = await client.post("/weights/stage", **body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["kind"] == "request"
        assert param in (answer.json()["param"], answer.json()["message"])
        await client.ok("/weights/stage", **by_handle())
        await client.ok("/weights/commit", version=1)

    run(scenario)


def test_a_layout_the_engine_has_forgotten_can_be_sent_again() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/weights/begin", version=1)
        answer = await client.post("/weights/stage", **by_handle(layout=None, layout_id="gone"))
        assert answer.status_code == 409
        assert answer.json()["kind"] == "state" and "unknown layout" in answer.json()["message"]
        await client.ok("/weights/stage", **by_handle())
        await client.ok("/weights/commit", version=1)

    run(scenario)


def test_a_second_begin_is_refused_and_an_old_version_too() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/weights/begin", version=3)
        assert (await client.post("/weights/begin", version=4)).status_code == 409
        assert (await client.post("/begin_weight_update")).status_code == 409
        answer = await client.post("/update_weights_from_disk", model_path="/m")
        assert answer.status_code == 409 and answer.json()["kind"] == "state"
        assert (await client.post("/update_weight_version", new_version="x")).status_code == 409
        assert (await client.post("/end_weight_update")).status_code == 409
        await client.ok("/weights/stage", **by_handle(3))
        await client.ok("/weights/commit", version=3)
        old = await client.post("/weights/begin", version=3)
        assert old.status_code == 400
        assert "not above the present one, 3" in old.json()["message"]

    run(scenario)


def test_of_many_begins_at_once_one_is_taken() -> None:
    async def scenario(client: Client) -> None:
        answers = await asyncio.gather(*(client.post("/weights/begin", version=i + 1) for i in range(16)))
        assert sorted(answer.status_code for answer in answers) == [200] + [409] * 15

    run(scenario)


def test_continue_and_flush_leave_an_update_of_ours_alone() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/weights/begin", version=1)
        await client.ok("/weights/stage", **by_handle())
        await client.ok("/continue_generation")
        assert (await client.get("/flush_cache")).status_code == 200
        assert client.link.version == 0
        await client.ok("/weights/commit", version=1)

    run(scenario)


def test_what_the_engine_refuses_for_its_content_gives_the_update_up() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/weights/begin", version=1)
        client.link.fail["PrepareUpdate"] = ("update", "checksum differs")
        answer = await client.post("/weights/prepare", version=1, checksum="c" * 32)
        assert answer.status_code == 400 and answer.json()["kind"] == "update"
        answer = await client.post("/weights/commit", version=1)
        assert answer.status_code == 409
        assert "checksum differs" in answer.json()["message"]
        assert client.link.open_version is None
        await client.ok("/weights/begin", version=1)

    run(scenario)


def test_aborting_is_never_an_error() -> None:
    async def scenario(client: Client) -> None:
        assert "no such update" in (await client.ok("/weights/abort", version=None, reason="x"))["message"]
        await client.ok("/weights/begin", version=2)
        assert "no such update" in (await client.ok("/weights/abort", version=1))["message"]
        assert client.link.open_version == 2
        assert await client.ok("/weights/abort", version=2, reason="the trainer stops") == {"success": True}
        assert client.link.open_version is None
        answer = await client.post("/weights/stage", **by_handle(2))
        assert answer.status_code == 409
        assert "the trainer stops" in answer.json()["message"]
        await client.ok("/weights/begin", version=2)

    run(scenario)


def test_an_update_is_given_up_when_its_sender_is_gone() -> None:
    async def scenario(client: Client) -> None:
        process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        try:
            await client.ok("/weights/begin", version=1, sender={"pid": process.pid}, timeout_s=60)
            await client.ok("/weights/stage", **by_handle())
            process.kill()
            # Not waited for: one that is no more than an entry in the table of processes is gone too.
            while "AbortUpdate" not in client.link.names:
                await asyncio.sleep(0.02)
            answer = await client.post("/weights/commit", version=1)
        finally:
            process.kill()
            process.communicate()
        assert answer.status_code == 409
        assert f"process {process.pid}, is gone" in answer.json()["message"]
        assert client.link.version == 0

    run(scenario)


def test_a_sender_that_does_not_exist_is_refused() -> None:
    async def scenario(client: Client) -> None:
        answer = await client.post("/weights/begin", version=1, sender={"pid": 2**22 + 1})
        assert answer.status_code == 400 and answer.json()["param"] == "sender"
        assert client.link.actions == []

    run(scenario)


def test_another_process_under_the_same_number_is_not_the_sender() -> None:
    import os

    sender = Sender.find(os.getpid())
    assert sender is not None and not sender.is_gone
    assert Sender(os.getpid(), "1").is_gone


def test_the_lease_runs_from_the_last_word_on() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/weights/begin", version=1, timeout_s=0.4)
        for _ in range(4):
            await asyncio.sleep(0.2)
            await client.ok("/weights/stage", **by_handle())
        while "AbortUpdate" not in client.link.names:
            await asyncio.sleep(0.02)
        answer = await client.post("/weights/prepare", version=1)
        assert answer.status_code == 409
        assert "nobody spoke of it for 0.4 s" in answer.json()["message"]

    run(scenario)


def test_a_stage_under_way_is_no_silence() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/weights/begin", version=1, timeout_s=0.2)
        client.link.hold["StageHandle"] = asyncio.Event()
        call = asyncio.create_task(client.post("/weights/stage", **by_handle()))
        await asyncio.sleep(0.6)
        client.link.hold.pop("StageHandle").set()
        assert (await call).status_code == 200
        await client.ok("/weights/commit", version=1)

    run(scenario)


def test_an_update_ends_with_the_engine_process_it_was_begun_with() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/weights/begin", version=1)
        client.link.dead = True
        answer = await client.post("/weights/stage", **by_handle())
        assert answer.status_code == 409
        assert "engine process ended" in answer.json()["message"]
        assert (await client.post("/weights/begin", version=1)).status_code == 503
        client.link.dead = False
        client.link.die()
        await client.ok("/weights/begin", version=1)

    run(scenario)


def test_an_unknown_field_is_listed_and_under_strict_refused() -> None:
    async def scenario(client: Client) -> None:
        answer = await client.ok("/weights/begin", version=1, colour="red")
        assert answer["ignored_fields"] == ["colour"]

    async def strict(client: Client) -> None:
        answer = await client.post("/weights/begin", version=1, colour="red")
        assert answer.status_code == 400 and answer.json()["param"] == "colour"
        assert client.link.actions == []

    run(scenario)
    run(strict, strict=True)


@pytest.mark.parametrize("body", [b"{", b"[1]", b"null", b'{"version": NaN}', b"\xff\xfe", b'{"a":' + b"[" * 50_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    async def scenario(client: Client) -> None:
        answer = await client.http.post("/weights/begin", content=body)
        assert answer.status_code == 400
        assert answer.json()["success"] is False

    run(scenario)
