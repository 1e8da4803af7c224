"""Weights by files: nothing is left of a transport, however its process ended."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unison.clients.disk_transport import DiskTransport, sweep
from unison.clients.endpoint import LostError
from unison.clients.launch import Launch, ServerProcess
from unison.clients.open import open_fleet
from unison.clients.update import Update
from unison.config.load import load_config
from unison.config.schema import EngineConfig
from unison.core.errors import ConfigError, ServerError, WeightUpdateError
from unison.models.loading import read_config
from unison.models.numerics import choose_numerics
from unison.models.registry import read_spec
from unison.processes.shared_memory import open_handle
from unison.weights.version_files import read_manifest


class FakeControl:
    """Remembers where it was told to read."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    async def stage(self, number: int, transport: str, body: dict[str, Any], timeout_s: float) -> None:
        self.paths.append(Path(body["path"]))


def make_update(version: int, value: float) -> Update:
    return Update({"a": torch.full((4, 3), value)}, version, torch.float32)


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from unison.clients.disk_transport import _Place;"
        "place = _Place.claim(Path(sys.argv[1])); (place.folder / 'model').write_bytes(b'x');"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    [left] = tmp_path.glob("weights-*")
    (tmp_path / "weights-of-somebody").mkdir()
    control: Any = FakeControl()
    transport = DiskTransport(tmp_path, use_delta=False)

    async def stage() -> None:
        await transport.stage(control, make_update(1, 1.0), 1, 5.0)
        sweep(tmp_path)
        assert control.paths[0].is_dir()
        await transport.close()

    asyncio.run(stage())
    assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["weights-of-somebody"]


def test_a_version_that_was_not_taken_can_come_again_made_of_other_tensors(tmp_path: Path) -> None:
    control: Any = FakeControl()
    transport = DiskTransport(tmp_path, use_delta=False)

    async def stage() -> None:
        for value in (1.0, 2.0, 2.0):
            update = make_update(1, value)
            await transport.stage(control, update, 1, 5.0)
            manifest = read_manifest(control.paths[-1])
            assert manifest is not None and manifest.checksum == update.checksum
        assert control.paths[1] == control.paths[2]
        await transport.committed(update)
        assert not control.paths[0].parent.exists() and control.paths[1].exists()
        await transport.close()

    asyncio.run(stage())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_a_refused_update(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    control: Any = FakeControl()
    transport = DiskTransport(tmp_path / "file" / "in_it", use_delta=True)
    with pytest.raises(WeightUpdateError, match="in_it: Not a directory"):
        asyncio.run(transport.stage(control, make_update(1, 1.0), 1, 5.0))


def test_a_disk_dir_that_cannot_be_written_is_told_before_anything_starts(
    tmp_path: Path, tiny_model_dir: Callable[..., Path]
) -> None:
    (tmp_path / "file").write_text("")
    words = ["--rollout.engine", "server", "--server.transport", "disk", "--server.disk_dir", f"{tmp_path}/file/x"]
    folder = tiny_model_dir()
    config = load_config([], ["--model.path", str(folder), *words, "--trainer.steps", "0"]).config
    spec = read_spec(read_config(folder))
    with pytest.raises(ConfigError, match=r"server\.disk_dir=.*file is no folder to write into"):
        open_fleet(config, folder, choose_numerics(spec, "float32", "exact"), spec, (), {})


def test_closed_weights_take_no_memory_although_they_are_mapped() -> None:
    update = make_update(1, 1.0)
    mapped = open_handle(update.segment.handle)
    assert any(mapped[:48])
    update.close()
    update.close()
    assert isinstance(mapped, mmap.mmap) and not any(mapped[:48])


def launch_of(model: Path) -> Launch:
    return Launch(
        model=model,
        dtype="float32",
        numerics="exact",
        engine=EngineConfig(max_running=7),
        staging="in_place",
        threads=1,
        start_s=5.0,
        update_s=600.0,
    )


def test_a_server_is_told_how_long_an_update_may_take_and_what_of_the_engine_is_not_the_default(tmp_path: Path) -> None:
    words = launch_of(tmp_path).command([], 9)
    told = dict(itertools.pairwise(words))
    assert (told["--update-s"], told["--staging"], told["--engine.max_running"]) == ("600.0", "in_place", "7")
    assert sum(word.startswith("--engine.") for word in words) == 1


def test_a_server_that_the_system_cannot_start_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launch_of(tmp_path)

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unison.clients.launch.tempfile.TemporaryFile", full)
    process = ServerProcess(launch)
    with pytest.raises(ServerError, match=r"could not be started.*No space left") as told:
        asyncio.run(process.start())
    assert not isinstance(told.value, LostError)
    assert process.has_ended
