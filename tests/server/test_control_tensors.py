"""Serialised tensors of other frameworks, and folders pulled up to a version."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.fake_link import Client, FakeLink, run
from unison.processes.shared_memory import open_handle
from unison.server.link import CommandFailed
from unison.server.messages import StageHandle
from unison.weights.delta import write_delta
from unison.weights.disk import write_full

SENDER = Path(__file__).parent.parent / "weights" / "foreign_sender.py"
NAMES = ("plain", "parameter", "half", "scalar", "empty")


class ReadingLink(FakeLink):
    """Reads what a handle names, as an engine does when it stages."""

    seen: dict[str, bytes]

    async def command(self, action: Any, timeout_s: float = 60.0) -> dict[str, Any]:
        result = await super().command(action, timeout_s)
        if isinstance(action, StageHandle) and action.layout is not None:
            memory = open_handle(action.handle)
            for entry in action.layout.entries:
                self.seen[entry.name] = memory[entry.offset : entry.offset + entry.num_bytes]
        return result


@contextlib.contextmanager
def sender(kind: str) -> Iterator[tuple[str, dict[str, Any], subprocess.Popen[str]]]:
    """A trainer in a process of its own: its dump, what the tensors hold, and the process."""
    process = subprocess.Popen([sys.executable, str(SENDER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        tell(process, kind)
        yield process.stdout.readline().strip(), json.loads(process.stdout.readline()), process
    finally:
        process.kill()
        process.wait()
        # Not read to its end: torch's keeper of shared memory holds the pipe as well.
        process.stdin.close()
        process.stdout.close()


def tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def drop(process: subprocess.Popen[str]) -> None:
    """Have the sender let go of its tensors."""
    assert process.stdout is not None
    tell(process, "drop")
    assert process.stdout.readline() == "done\n"


def shared_objects() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}


def test_tensors_of_a_bucket_are_read_where_they_lie_and_given_back() -> None:
    with sender("bucket") as (dump, told, process):
        link = ReadingLink(tensors=NAMES)
        link.seen = {}

        async def scenario(client: Client) -> None:
            body = {"serialized_named_tensors": [dump], "load_format": "flattened_bucket", "weight_version": "9"}
            answer = await client.ok("/update_weights_from_tensor", **body)
            assert answer["committed"] is True and answer["label"] == "9"

        run(scenario, link, allow_pickled_tensors=True)
        assert {name: data.hex() for name, data in link.seen.items()} == {name: told[name][2] for name in NAMES}
        ours = {name for name in shared_objects() if f"torch_{process.pid}_" in name}
        assert ours
        drop(process)
        assert not ours & shared_objects()


def test_a_tensor_that_does_not_lie_in_one_piece_is_refused_and_nothing_begun() -> None:
    with sender("pairs") as (dump, _, _):

        async def scenario(client: Client) -> None:
            answer = await client.post("/update_weights_from_tensor", serialized_named_tensors=[dump])
            assert answer.status_code == 400
            assert answer.json()["success"] is False and "contiguous" in answer.json()["message"]
            assert client.link.actions == []

        run(scenario, FakeLink(tensors=NAMES), allow_pickled_tensors=True)


@pytest.mark.parametrize(
    "text",
    ["", "!!", base64.b64encode(b"\x80\x04cos\nsystem\n(S'true'\ntR.").decode(), base64.b64encode(b"\x80").decode()],
)
def test_what_is_no_dump_of_tensors_is_refused_and_run_by_nobody(text: str) -> None:
    async def scenario(client: Client) -> None:
        answer = await client.post("/update_weights_from_tensor", serialized_named_tensors=[text])
        assert answer.status_code == 400
        assert answer.json()["kind"] == "update"
        assert client.link.actions == []

    run(scenario, allow_pickled_tensors=True)


def test_tensors_for_several_ranks_are_refused() -> None:
    async def scenario(client: Client) -> None:
        answer = await client.post("/update_weights_from_tensor", serialized_named_tensors=["a", "b"])
        assert answer.status_code == 400
        assert answer.json()["param"] == "serialized_named_tensors"

    run(scenario, allow_pickled_tensors=True)


def test_a_pull_brings_a_folder_to_a_version_that_an_update_then_loads(tmp_path: Path) -> None:
    old = {"embed": torch.randn(4, 2), "norm": torch.ones(2)}
    new = {**old, "norm": torch.full((2,), 3.0)}
    source = tmp_path / "source"
    source.mkdir()
    first = write_full(source / "version_00000001", old, version=1, dtype=torch.float32)
    checksum = write_full(tmp_path / "whole", new, version=2, dtype=torch.float32).checksum
    write_delta(
        source / "version_00000002",
        old,
        new,
        base_version=1,
        version=2,
        base_checksum=first.checksum,
        checksum=checksum,
    )

    async def scenario(client: Client) -> None:
        local = tmp_path / "local"
        body = {"local_checkpoint_dir": str(local), "source_dir": str(source)}
        answer = await client.ok("/pull_weights", **body, target_version="2")
        assert (answer["version"], answer["checksum"], answer["num_tensors"]) == (2, checksum, 2)
        await client.ok("/update_weights_from_disk", model_path=str(local), weight_version="2")
        missing = await client.post("/pull_weights", **body, target_version=3)
        assert missing.status_code == 400
        assert "version 3 is missing" in missing.json()["message"]
        wrong = await client.post("/pull_weights", **body, target_version="latest")
        assert wrong.status_code == 400 and wrong.json()["param"] == "target_version"

    run(scenario)


def test_an_engine_that_refuses_the_tensors_leaves_the_old_version() -> None:
    with sender("bucket") as (dump, _, process):

        async def scenario(client: Client) -> None:
            client.link.fail["StageHandle"] = ("update", "shape differs")
            body = {"serialized_named_tensors": [dump], "load_format": "flattened_bucket"}
            answer = await client.post("/update_weights_from_tensor", **body)
            assert answer.status_code == 400 and "shape differs" in answer.json()["message"]
            assert client.link.names == ["BeginUpdate", "StageHandle", "AbortUpdate"]
            with pytest.raises(CommandFailed):
                client.front.updates.current()

        run(scenario, FakeLink(tensors=NAMES), allow_pickled_tensors=True)
        drop(process)
        assert not {name for name in shared_objects() if f"torch_{process.pid}_" in name}
