"""Pause, abort, cache, memory, information, operations."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.server.fake_link import Client, make_front, run
from unison.server.control import CONTROL_ROUTES
from unison.server.control_body import Refused
from unison.server.messages import Pause, ReleaseMemory, ResumeMemory, StartProfile
from unison.server.profile import profile_folder

CHANGES = (
    "weight", "update", "pause", "continue", "flush", "abort", "memory", "profile", "state", "gc", "slow", "logging",
    "session", "lora",
)  # fmt: skip
REVEALS_NOTHING = ("/get_weight_version", "/weight_version")


def test_what_changes_or_reveals_weights_needs_the_admin_key() -> None:
    assert len({route.path for route in CONTROL_ROUTES}) == len(CONTROL_ROUTES)
    for route in CONTROL_ROUTES:
        is_control = any(word in route.path for word in CHANGES) and route.path not in REVEALS_NOTHING
        assert route.level == ("admin" if is_control else "user"), route.path


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_each_mode_of_pausing_reaches_the_engine(mode: Any) -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/pause_generation", mode=mode)
        assert client.link.actions == [Pause(mode)]

    run(scenario)


def test_a_pause_without_a_body_aborts() -> None:
    async def scenario(client: Client) -> None:
        assert (await client.http.post("/pause_generation")).json()["status"] == "ok"
        assert client.link.actions == [Pause("abort")]
        assert (await client.post("/pause_generation", mode="gently")).json()["param"] == "mode"

    run(scenario)


def test_a_busy_cache_is_400_in_text_and_can_be_waited_for() -> None:
    async def scenario(client: Client) -> None:
        client.link.num_running = 1
        answer = await client.get("/flush_cache")
        assert answer.status_code == 400
        assert answer.headers["content-type"].startswith("text/plain")
        asyncio.get_running_loop().call_later(0.2, lambda: setattr(client.link, "num_running", 0))
        assert (await client.get("/flush_cache", timeout_s=5)).status_code == 200
        client.link.num_running = 1
        assert (await client.post("/flush_cache", timeout_s=0.1)).status_code == 400
        assert (await client.get("/flush_cache", timeout_s="soon")).json()["param"] == "timeout_s"

    run(scenario)


def test_an_abort_names_a_request_whole_unless_told_otherwise() -> None:
    async def scenario(client: Client) -> None:
        client.link.num_running = 9
        live = client.front.live
        with live.under_way({"a": ["a"]}), live.under_way({"ab": ["ab_0", "ab_1"]}):
            assert (await client.ok("/abort_request", rid="a"))["num_aborted"] == 1
            assert client.link.aborted == ["a"]
            client.link.aborted.clear()
            assert (await client.ok("/abort_request", rid="ab"))["num_aborted"] == 2
            assert sorted(map(str, client.link.aborted)) == ["ab_0", "ab_1"]
            client.link.aborted.clear()
            assert (await client.ok("/abort_request", rid="a", prefix=True))["num_aborted"] == 3
            client.link.aborted.clear()
            await client.ok("/abort_request", rid="ab_1")
            assert client.link.aborted == ["ab_1"]
            client.link.aborted.clear()
            assert (await client.ok("/abort_request", abort_all=True))["num_aborted"] == 9
            assert client.link.aborted == [None]

    run(scenario)


def test_an_unknown_id_is_no_error_and_none_at_all_is_one() -> None:
    async def scenario(client: Client) -> None:
        assert await client.ok("/abort_request", rid="gone") == {"success": True, "num_aborted": 0}
        answer = await client.post("/abort_request")
        assert answer.status_code == 400 and answer.json()["param"] == "rid"

    run(scenario)


def test_an_abort_may_wait_for_the_end() -> None:
    async def scenario(client: Client) -> None:
        client.link.num_running = 1
        block = client.front.live.under_way({"a": ["a"]})
        block.__enter__()
        late = await client.post("/abort_request", rid="a", wait=True, timeout_s=0.1)
        assert late.status_code == 503 and "1 aborted requests" in late.json()["message"]
        ended: list[str] = []

        def end() -> None:
            ended.append("a")
            block.__exit__(None, None, None)

        asyncio.get_running_loop().call_later(0.2, end)
        await client.ok("/abort_request", abort_all=True, wait=True)
        assert ended == ["a"]

    run(scenario)


@pytest.mark.parametrize(
    ("tags", "sent", "note"),
    [
        (None, ("weights", "kv_cache"), None),
        (["kv_cache"], ("kv_cache",), None),
        (["kv_cache", "weights", "weights"], ("weights", "kv_cache"), None),
        (["kv_cache", "cuda_graph"], ("kv_cache",), ["cuda_graph"]),
        (["cuda_graph"], None, ["cuda_graph"]),
        ([], None, None),
    ],
)
def test_memory_is_released_by_tags(tags: Any, sent: Any, note: Any) -> None:
    async def scenario(client: Client) -> None:
        answer = await client.ok("/release_memory_occupation", tags=tags)
        assert answer["success"] is True
        assert answer.get("nothing_to_do") == note
        assert client.link.actions == ([] if sent is None else [ReleaseMemory(sent)])
        assert answer.get("freed_bytes") == (None if sent is None else {tag: 4000 for tag in sent})
        await client.ok("/resume_memory_occupation", tags=tags)
        assert client.link.actions[1:] == ([] if sent is None else [ResumeMemory(sent)])

    run(scenario)


def test_memory_of_another_name_and_a_busy_engine_are_refused() -> None:
    async def scenario(client: Client) -> None:
        answer = await client.post("/release_memory_occupation", tags=["weights", "kv"])
        assert answer.status_code == 400 and answer.json()["param"] == "tags[1]"
        client.link.fail["ReleaseMemory"] = ("state", "2 requests run")
        assert (await client.post("/release_memory_occupation")).status_code == 409

    run(scenario)


def test_information_names_model_and_version_and_keeps_secrets() -> None:
    async def scenario(client: Client) -> None:
        for path in ("/model_info", "/get_model_info"):
            info = (await client.get(path)).json()
            assert info["model_path"] == "/models/tiny" and info["weight_version"] == "default"
            assert info["is_generation"] is True
        for path in ("/server_info", "/get_server_info"):
            answer = await client.get(path)
            info = answer.json()
            assert "s3cret" not in answer.text and "t0psecret" not in answer.text
            assert info["numerics"] == "native" and info["staging"] == "in_place" and info["port"] == 30000
            assert info["limits_body_bytes"] == 32 << 20
            assert info["internal_states"][0]["state"] == "running"
            assert info["checksum"] == "0" * 32
        state = (await client.get("/get_internal_state")).json()["internal_states"][0]
        assert state["kv_tokens"] == 1024 and state["open_update"] is None

    run(scenario, api_key="s3cret", admin_key="t0psecret", staging="in_place")


def test_load_is_what_runs_and_what_was_sent_but_is_not_yet_known() -> None:
    async def scenario(client: Client) -> None:
        assert (await client.get("/get_load")).json()[0]["num_reqs"] == 0
        with client.front.live.under_way({"a": ["a_0", "a_1", "a_2"]}):
            load = (await client.get("/get_load")).json()[0]
            assert (load["num_reqs"], load["num_waiting_reqs"]) == (3, 3)
            client.link.num_running = 2
            load = (await client.get("/v1/loads", include="core")).json()["loads"][0]
            assert (load["num_reqs"], load["num_running_reqs"], load["num_waiting_reqs"]) == (3, 2, 1)
            assert "memory" not in load

    run(scenario)


def test_loads_show_the_sections_that_are_asked_for() -> None:
    async def scenario(client: Client) -> None:
        answer = (await client.get("/v1/loads", include="core,memory")).json()
        assert answer["loads"][0]["memory"]["kv_tokens"] == 1024
        assert "queues" not in answer["loads"][0]
        load = (await client.get("/v1/loads", include="all")).json()["loads"][0]
        assert load["queues"]["waiting"] == 0 and load["spec"] is None
        answer = await client.get("/v1/loads", include="core,everything")
        assert answer.status_code == 400 and answer.json()["param"] == "include"

    run(scenario)


def test_weights_are_shown_by_name_by_either_method() -> None:
    async def scenario(client: Client) -> None:
        assert (await client.get("/get_weights_by_name", name="norm")).json() == [0.5, -1.25, 3.0]
        assert (await client.get("/get_weights_by_name", name="norm", truncate_size=2)).json() == [0.5, -1.25]
        assert (await client.post("/get_weights_by_name", name="norm", truncate_size=1)).json() == [0.5]
        assert (await client.post("/get_weights_by_name", name="nobody")).status_code == 400
        assert (await client.post("/get_weights_by_name", name="norm", truncate_size="1")).status_code == 400
        assert (await client.get("/get_weights_by_name")).json()["param"] == "name"

    run(scenario)


def test_the_checker_names_what_differs() -> None:
    async def scenario(client: Client) -> None:
        answer = await client.ok("/weights_checker", action="checksum", allow_quant_error=True)
        assert answer["payload"] == {"checksum": "ab"} and answer["without_effect"] == ["allow_quant_error"]
        answer = await client.post("/weights_checker", action="compare")  # type: ignore[assignment]
        assert answer.status_code == 400  # type: ignore[attr-defined]
        assert "layer" in answer.json()["message"]  # type: ignore[attr-defined]
        assert (await client.post("/weights_checker", action="guess")).status_code == 400
        assert (await client.post("/weights_checker", skip_tensor_list=["a"])).status_code == 400

    run(scenario)


@pytest.mark.parametrize("route", [route for route in CONTROL_ROUTES if route.handler.__qualname__.startswith("unsup")])
def test_what_is_not_supported_says_so(route: Any) -> None:
    async def scenario(client: Client) -> None:
        answer = await client.post(route.path, anything=1)
        assert answer.status_code == 400
        assert answer.json()["kind"] == "unsupported" and route.path in answer.json()["message"]
        assert client.link.actions == []

    run(scenario)


def test_freezing_says_how_many_objects_it_froze() -> None:
    import gc

    async def scenario(client: Client) -> None:
        assert (await client.ok("/freeze_gc"))["num_frozen"] > 1000

    try:
        run(scenario)
    finally:
        gc.unfreeze()


def test_profiles_stay_below_their_folder(tmp_path: Path) -> None:
    root = tmp_path / "profiles"
    root.mkdir()
    (root / "out").symlink_to(tmp_path)
    assert profile_folder(str(root), "step-1/rank_0") == root / "step-1" / "rank_0"
    assert profile_folder(str(root), str(root / "step-1")) == root / "step-1"
    assert profile_folder(str(root), None).parent == root
    bad = [
        "..",
        "a/../..",
        "../x",
        "/etc",
        "out",
        "out/x",
        ".hidden",
        "a\0b",
        "a b",
        "a/b/c/d/e",
        "~",
        f"{root}/../x",
        "x" * 101,
    ]
    for name in bad:
        with pytest.raises(Refused, match="output_dir"):
            profile_folder(str(root), name)


def test_a_profile_root_that_is_a_link_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert profile_folder(str(tmp_path / "link"), "a") == tmp_path / "real" / "a"


def test_a_profile_is_started_where_it_may_be_and_with_what_can_be_recorded(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        body = {"output_dir": "run-1", "num_steps": 3, "activities": ["CPU"], "with_stack": True, "record_shapes": None}
        answer = await client.ok("/start_profile", **body)
        assert answer["folder"] == str(tmp_path / "run-1")
        assert client.link.actions == [StartProfile(str(tmp_path / "run-1"), 3, True, False)]
        await client.ok("/stop_profile")
        for change in ({"output_dir": "../x"}, {"start_step": 5}, {"profile_by_stage": True}, {"activities": ["GPU"]}):
            answer = await client.post("/start_profile", **change)  # type: ignore[assignment]
            assert answer.status_code == 400  # type: ignore[attr-defined]
            assert answer.json()["param"] == next(iter(change))  # type: ignore[attr-defined]
        assert len(client.link.actions) == 2
        assert os.listdir(tmp_path) == []

    run(scenario, profile_dir=str(tmp_path))


def test_serialised_tensors_are_refused_with_what_to_send_instead() -> None:
    async def scenario(client: Client) -> None:
        answer = await client.post("/update_weights_from_tensor", serialized_named_tensors=["gASV"])
        assert answer.status_code == 400
        assert answer.json()["kind"] == "unsupported"
        for word in ("/weights/stage", "update_weights_from_distributed", "--allow-pickled-tensors"):
            assert word in answer.json()["message"]
        assert client.link.actions == []

    run(scenario)


def test_a_front_end_has_its_metrics_from_the_start() -> None:
    front = make_front()
    assert b"unison_state" in front.metrics.text()
