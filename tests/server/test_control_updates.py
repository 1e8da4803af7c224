"""SGLang's routes for weights: what trainers send, in their order, and what happens when it fails midway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.fake_link import Client, run
from unison.server.messages import AbortUpdate, CommitUpdate, JoinGroup, StageDisk, StageGroup


def bucket(*names: str, **more: Any) -> dict[str, Any]:
    return {
        "names": list(names),
        "dtypes": ["float32"] * len(names),
        "shapes": [[4, 2]] * len(names),
        "group_name": "g",
        **more,
    }


def test_the_order_of_calls_of_a_slime_like_trainer_is_one_update() -> None:
    async def scenario(client: Client) -> None:
        link = client.link
        link.num_running = 2
        assert (await client.ok("/pause_generation"))["status"] == "ok"
        assert (await client.get("/flush_cache")).status_code == 200
        await client.ok("/post_process_weights", restore_weights_before_load=True, post_process_quantization=False)
        await client.ok("/update_weights_from_distributed", **bucket("embed"), flush_cache=False)
        last = bucket("layer", "norm", weight_version="7", flush_cache=False)
        answer = await client.ok("/update_weights_from_distributed", **last)
        assert answer["committed"] is False
        assert link.version == 0
        await client.ok("/post_process_weights", restore_weights_before_load=False, post_process_quantization=True)
        assert link.version == 1
        assert (await client.get("/get_weight_version")).json() == {"weight_version": "7"}
        assert (await client.ok("/continue_generation"))["status"] == "ok"
        update = ["BeginUpdate", "StageGroup", "StageGroup", "PrepareUpdate", "CommitUpdate"]
        assert link.names == ["Pause", "FlushCache", *update, "Continue"]

    run(scenario)


def test_buckets_without_a_bracket_are_committed_by_the_one_that_carries_the_version() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/update_weights_from_distributed", **bucket("embed", "layer"), flush_cache=False)
        assert client.link.version == 0
        last = await client.ok(
            "/update_weights_from_distributed", **bucket("norm"), flush_cache=False, weight_version="a"
        )
        assert last["committed"] is True
        assert (await client.get("/model_info")).json()["weight_version"] == "a"
        assert client.link.names.count("BeginUpdate") == 1

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/flush_cache", {}),
        ("/continue_generation", {}),
        ("/end_weight_update", {}),
        ("/update_weight_version", {"new_version": "named"}),
    ],
)
def test_buckets_that_wait_are_committed_by_whatever_ends_an_update(path: str, body: dict[str, Any]) -> None:
    async def scenario(client: Client) -> None:
        for name in ("embed", "layer", "norm"):
            await client.ok("/update_weights_from_distributed", **bucket(name), flush_cache=False)
        assert client.link.version == 0
        assert (await client.post(path, **body)).status_code == 200
        assert client.link.version == 1
        assert "BumpVersion" not in client.link.names
        wanted = body.get("new_version", "1")
        assert (await client.get("/get_weight_version")).json() == {"weight_version": wanted}

    run(scenario)


@pytest.mark.parametrize("path", ["/flush_cache", "/continue_generation", "/end_weight_update"])
def test_an_update_that_lacks_tensors_is_refused_by_name_and_given_up(path: str) -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/update_weights_from_distributed", **bucket("embed"), flush_cache=False)
        answer = await client.post(path)
        assert answer.status_code == 400
        assert "layer, norm" in answer.text
        assert client.link.version == 0
        assert client.link.open_version is None
        assert "Continue" not in client.link.names
        # What became of it was told: the next call is about something else.
        assert (await client.post("/continue_generation")).status_code == 200

    run(scenario)


def test_a_bucket_that_fails_gives_the_whole_update_up() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/update_weights_from_distributed", **bucket("embed"), flush_cache=False)
        answer = await client.post("/update_weights_from_distributed", **bucket("nobody"), flush_cache=False)
        assert answer.status_code == 400
        assert answer.json()["success"] is False
        assert "nobody" in answer.json()["message"]
        assert client.link.open_version is None
        # The rest of the buckets cannot make up for the first.
        await client.ok("/update_weights_from_distributed", **bucket("layer"), flush_cache=False)
        answer = await client.post("/update_weights_from_distributed", **bucket("norm"), weight_version="1")
        assert answer.status_code == 400
        assert "embed" in answer.json()["message"]
        assert client.link.version == 0
        assert (await client.get("/get_weight_version")).json() == {"weight_version": "default"}

    run(scenario)


def test_after_a_failure_within_a_bracket_nothing_is_taken_until_it_ends() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/begin_weight_update")
        assert (await client.post("/update_weights_from_distributed", **bucket("nobody"))).status_code == 400
        for path, body in (
            ("/update_weights_from_distributed", bucket("embed", "layer", "norm")),
            ("/end_weight_update", {}),
        ):
            answer = await client.post(path, **body)
            assert answer.status_code == 400
            assert "nobody" in answer.json()["message"]
        assert client.link.version == 0
        await client.ok("/begin_weight_update")
        await client.ok("/update_weights_from_distributed", **bucket("embed", "layer", "norm"))
        assert client.link.version == 0
        await client.ok("/end_weight_update")
        assert client.link.version == 1

    run(scenario)


def test_within_a_bracket_only_its_end_commits() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/begin_weight_update", selector="all")
        await client.ok("/update_weights_from_distributed", **bucket("embed", "layer", "norm"), weight_version="x")
        await client.ok("/update_weight_version", new_version="y")
        await client.ok("/continue_generation")
        assert (await client.get("/flush_cache")).status_code == 200
        assert client.link.version == 0
        await client.ok("/end_weight_update")
        assert (await client.get("/get_weight_version")).json() == {"weight_version": "y"}

    run(scenario)


def test_a_bracket_without_a_tensor_changes_nothing() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/begin_weight_update")
        answer = await client.ok("/end_weight_update")
        assert "nothing" in answer["message"]
        assert client.link.version == 0
        assert (await client.post("/end_weight_update")).status_code == 409

    run(scenario)


def test_a_verl_like_trainer_sends_buckets_and_then_flushes() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/init_weights_update_group", master_address="127.0.0.1", master_port=2900, rank_offset=1, world_size=2, group_name="g", backend="gloo")  # noqa: E501  # fmt: skip
        for name in ("embed", "layer", "norm"):
            await client.ok("/update_weights_from_distributed", **bucket(name, load_format="flattened_bucket"), flush_cache=False)  # noqa: E501  # fmt: skip
        answer = await client.http.post("/flush_cache")
        assert answer.status_code == 200
        assert client.link.version == 1
        assert client.link.actions[0] == JoinGroup("g", "127.0.0.1", 2900, 1, 2, "gloo", 120.0)

    run(scenario)


def test_a_miles_like_trainer_retracts_and_names_the_version_afterwards() -> None:
    async def scenario(client: Client) -> None:
        client.link.num_running = 3
        await client.ok("/pause_generation", mode="retract")
        await client.ok("/update_weights_from_disk", model_path="/models/next", abort_all_requests=False)
        await client.ok("/update_weight_version", new_version="2")
        await client.ok("/continue_generation")
        assert client.link.aborted == []
        assert client.link.num_running == 3
        assert (await client.get("/model_info")).json()["weight_version"] == "2"

    run(scenario)


def test_tensors_of_a_flattened_bucket_lie_without_gaps() -> None:
    async def scenario(client: Client) -> None:
        body = {"names": ["embed", "layer", "norm"], "dtypes": ["torch.bfloat16", "float32", "float16"], "shapes": [[3], [2, 2], []], "group_name": "g", "load_format": "flattened_bucket"}  # noqa: E501  # fmt: skip
        await client.ok("/update_weights_from_distributed", **body)
        stage = next(action for action in client.link.actions if isinstance(action, StageGroup))
        assert stage.flattened and stage.layout is not None
        assert [entry.offset for entry in stage.layout.entries] == [0, 6, 22]
        assert stage.layout.num_bytes == 24

    run(scenario)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"dtypes": ["float32"]}, "names"),
        ({"names": ["embed", "embed"]}, "names"),
        ({"dtypes": ["float32", "int64"]}, "dtypes"),
        ({"shapes": [[4, 2], [4, -2]]}, "shapes[1][1]"),
        ({"names": "embed"}, "names"),
        ({"flush_cache": "yes"}, "flush_cache"),
        ({"weight_version": 3}, "weight_version"),
        ({"load_format": "direct"}, "load_format"),
        ({"selector": "draft"}, "selector"),
    ],
)
def test_a_bucket_with_a_wrong_field_is_refused_by_its_name(change: dict[str, Any], param: str) -> None:
    async def scenario(client: Client) -> None:
        answer = await client.post("/update_weights_from_distributed", **{**bucket("embed", "layer"), **change})
        assert answer.status_code == 400
        assert answer.json()["param"] == param
        assert client.link.actions == []

    run(scenario)


def test_nccl_is_refused_where_there_is_no_cuda() -> None:
    async def scenario(client: Client) -> None:
        answer = await client.post("/init_weights_update_group", master_address="h", master_port=1, rank_offset=1, world_size=2)  # noqa: E501  # fmt: skip
        assert answer.status_code == 400
        assert "gloo" in answer.json()["message"]

    run(scenario)


def test_destroying_a_group_that_was_never_joined_is_an_error_that_clients_pass_over() -> None:
    async def scenario(client: Client) -> None:
        client.link.fail["LeaveGroup"] = ("state", "group 'g' was never joined")
        answer = await client.post("/destroy_weights_update_group", group_name="g")
        assert answer.status_code == 400
        assert answer.json()["success"] is False

    run(scenario)


def test_an_update_from_disk_answers_how_many_requests_are_paused() -> None:
    async def scenario(client: Client) -> None:
        client.link.num_running = 4
        await client.ok("/pause_generation", mode="in_place")
        body = {"model_path": "/models/next", "weight_version": "step-9", "load_format": "auto", "token_step": 3}
        answer = await client.ok("/update_weights_from_disk", **body, flush_cache=False, future_field=1)
        assert answer["num_paused_requests"] == 4
        assert answer["label"] == "step-9"
        assert answer["ignored_fields"] == ["future_field"]
        assert answer["without_effect"] == ["token_step"]
        assert StageDisk(1, "/models/next") in client.link.actions
        assert isinstance(client.link.actions[-1], CommitUpdate)

    run(scenario)


@pytest.mark.parametrize("change", [{"is_async": True}, {"load_format": "dummy"}, {"manifest": {"a": 1}}])
def test_what_would_change_an_update_from_disk_is_refused(change: dict[str, Any]) -> None:
    async def scenario(client: Client) -> None:
        answer = await client.post("/update_weights_from_disk", model_path="/m", **change)
        assert answer.status_code == 400
        assert answer.json()["kind"] == "unsupported"
        assert client.link.actions == []

    run(scenario)


def test_a_folder_that_cannot_be_read_leaves_the_old_version_serving() -> None:
    async def scenario(client: Client) -> None:
        client.link.fail["StageDisk"] = ("update", "there is no folder /m")
        answer = await client.post("/update_weights_from_disk", model_path="/m", weight_version="9")
        assert answer.status_code == 400
        assert answer.json()["message"].startswith("there is no folder /m")
        assert client.link.names == ["BeginUpdate", "StageDisk", "AbortUpdate"]
        assert (await client.get("/get_weight_version")).json() == {"weight_version": "default"}

    run(scenario)


def test_a_commit_that_fails_gives_its_label_to_nobody() -> None:
    async def scenario(client: Client) -> None:
        client.link.fail["CommitUpdate"] = ("internal", "out of memory")
        answer = await client.post("/update_weights_from_disk", model_path="/m", weight_version="bad")
        assert answer.status_code == 500
        assert client.front.versions.label(1) == "1"
        assert (await client.ok("/update_weights_from_disk", model_path="/m"))["label"] == "1"

    run(scenario)


def test_naming_the_version_aborts_nobody_unless_told_to() -> None:
    async def scenario(client: Client) -> None:
        client.link.num_running = 12
        answer = await client.ok("/update_weight_version", new_version="2")
        assert answer["success"] is True and answer["new_version"] == "2"
        assert client.link.aborted == []
        assert client.link.names == ["BumpVersion"]
        await client.ok("/update_weight_version", new_version="3", abort_all_requests=True)
        assert client.link.aborted == [None]
        assert client.front.versions.label(2) == "3"

    run(scenario)


def test_a_relabelled_version_keeps_its_checksum() -> None:
    async def scenario(client: Client) -> None:
        checksum = (await client.ok("/update_weights_from_disk", model_path="/m"))["checksum"]
        await client.ok("/update_weight_version", new_version="final")
        assert (await client.get("/weights/status")).json()["checksum"] == checksum
        assert (await client.get("/server_info")).json()["checksum"] == checksum

    run(scenario)


def test_an_engine_that_died_during_buckets_is_told_to_whoever_ends_them() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/update_weights_from_distributed", **bucket("embed"), flush_cache=False)
        client.link.die()
        answer = await client.post("/continue_generation")
        assert answer.status_code == 400
        assert "engine process ended" in answer.json()["message"]
        assert (await client.post("/continue_generation")).status_code == 200

    run(scenario)


def test_buckets_nobody_speaks_of_are_given_up_and_the_next_call_is_told() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/update_weights_from_distributed", **bucket("embed"), flush_cache=False)
        while "AbortUpdate" not in client.link.names:
            await asyncio.sleep(0.02)
        answer = await client.post("/flush_cache")
        assert answer.status_code == 400
        assert "nobody spoke of it for 0.2 s" in answer.text

    run(scenario, update_s=0.2)


def test_what_was_given_up_is_named_when_later_buckets_are_incomplete() -> None:
    async def scenario(client: Client) -> None:
        await client.ok("/update_weights_from_distributed", **bucket("embed"), flush_cache=False)
        client.link.die()
        await client.ok("/update_weights_from_distributed", **bucket("layer"), flush_cache=False)
        answer = await client.post("/update_weights_from_distributed", **bucket("norm"))
        assert answer.status_code == 400
        assert "embed" in answer.json()["message"] and "engine process ended" in answer.json()["message"]

    run(scenario)


def test_two_whole_updates_at_once_are_done_one_after_the_other() -> None:
    async def scenario(client: Client) -> None:
        answers = await asyncio.gather(
            *(client.post("/update_weights_from_disk", model_path=f"/m{i}", weight_version=str(i)) for i in range(8))
        )
        assert {answer.status_code for answer in answers} == {200}
        assert client.link.version == 8
        one = ["BeginUpdate", "StageDisk", "PrepareUpdate", "CommitUpdate"]
        assert client.link.names == one * 8

    run(scenario)


def test_a_call_that_waits_too_long_for_another_says_for_which() -> None:
    async def scenario(client: Client) -> None:
        client.link.hold["StageDisk"] = asyncio.Event()
        first = asyncio.create_task(client.post("/update_weights_from_disk", model_path="/m"))
        await asyncio.sleep(0.05)
        answer = await client.post("/end_weight_update")
        assert answer.status_code == 503
        assert "a bucket of weights" in answer.json()["message"]
        # Pausing takes no part in it.
        await client.ok("/pause_generation", mode="in_place")
        client.link.hold.pop("StageDisk").set()
        assert (await first).status_code == 200

    run(scenario, update_s=0.3)


def test_an_update_goes_to_its_end_although_its_client_is_gone() -> None:
    async def scenario(client: Client) -> None:
        client.link.hold["CommitUpdate"] = asyncio.Event()
        call = asyncio.create_task(client.post("/update_weights_from_disk", model_path="/m", weight_version="v"))
        while "CommitUpdate" not in client.link.names:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.sleep(0)
        client.link.hold.pop("CommitUpdate").set()
        await client.ok("/update_weights_from_disk", model_path="/m")
        assert client.front.versions.label(1) == "v"
        assert client.link.version == 2

    run(scenario)


def test_a_begin_that_nobody_waited_for_is_taken_back() -> None:
    async def scenario(client: Client) -> None:
        client.link.fail["BeginUpdate"] = ("unavailable", "the engine process did not answer")
        client.link.open_version = 3  # as it will be when the engine comes to it
        assert (await client.post("/weights/begin", version=3)).status_code == 503
        assert AbortUpdate(3, "nobody waits for it") in client.link.actions
        await client.ok("/weights/begin", version=3)

    run(scenario)
