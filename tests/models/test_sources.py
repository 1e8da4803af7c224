from __future__ import annotations

import fnmatch
import subprocess
import sys
from pathlib import Path

import pytest

from unison.core.errors import ModelError
from unison.models.hub import FILES, is_hub_name
from unison.models.sources import cache_dir, resolve_model


def model_folder(folder: Path, *files: str) -> Path:
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}")
    return folder


def test_an_existing_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "config.json", "model-00001-of-00002.safetensors")
    assert resolve_model(str(folder)) == folder


def test_a_home_relative_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = model_folder(tmp_path / "m", "config.json", "model.safetensors")
    assert resolve_model("~/m") == folder


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ((), "holds no files"),
        (("model.safetensors",), "no config.json"),
        (("config.json", "tokenizer.json"), "no weights"),
        (("config.json", "pytorch_model.bin"), "pytorch_model.bin, a format that can run code"),
        (("config.json", "consolidated.00.pth"), "can run code"),
    ],
)
def test_an_unusable_folder_is_refused_with_its_reason(tmp_path: Path, files: tuple[str, ...], reason: str) -> None:
    folder = model_folder(tmp_path / "m", *files)
    with pytest.raises(ModelError, match=reason) as caught:
        resolve_model(str(folder))
    assert str(folder) in str(caught.value)


def test_safetensors_beside_pickles_are_enough(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "config.json", "pytorch_model.bin", "model.safetensors")
    assert resolve_model(str(folder)) == folder


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ModelError, match="is a file; give the folder"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["smollm2-135", "SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_a_near_name_is_answered_with_the_right_one(name: str) -> None:
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        resolve_model(name)


def test_an_unknown_name_lists_the_short_names() -> None:
    with pytest.raises(
        ModelError, match=r"short names: smollm2-135m, tiny-random; a model on a hub is named owner/model"
    ):
        resolve_model("Zebra-1000B")


def test_a_hub_that_cannot_be_reached_is_said_with_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"not in the local cache of the hub.*give its folder.*short names") as caught:
        resolve_model("qwen9/Zebra-1000B")
    assert "did you mean" not in str(caught.value)


def test_a_hub_name_fetches_weights_and_data_and_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(model_folder(tmp_path / "m", "config.json", "model.safetensors"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("Qwen/Qwen2.5-0.5B@main") == tmp_path / "m"
    assert (asked["name"], asked["revision"]) == ("Qwen/Qwen2.5-0.5B", "main")
    for name in ("modeling_own.py", "pytorch_model.bin", "model.pt", "weights.pkl", "run.sh"):
        assert not any(fnmatch.fnmatch(name, str(pattern)) for pattern in FILES)
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "chat_template.jinja"):
        assert any(fnmatch.fnmatch(name, str(pattern)) for pattern in FILES)


@pytest.mark.parametrize("name", ["../evil/model", "a/b/c", "owner/", "/model", "owner/../x", "a b/c", "owner/model@"])
def test_what_is_no_hub_name_is_never_asked_for(name: str) -> None:
    assert not is_hub_name(name)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ModelError, match="empty"):
        resolve_model("")


def test_the_cache_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("UNISON_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "unison"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "unison"
    monkeypatch.setenv("UNISON_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_importing_sources_opens_no_connection_and_loads_no_heavy_package() -> None:
    program = """
import socket, subprocess, sys
def refuse(*args, **kwargs): raise SystemExit("connection or process at import")
socket.socket.connect = subprocess.Popen.__init__ = refuse
import unison.models.sources
heavy = {"torch", "transformers", "gguf", "huggingface_hub"} & set(sys.modules)
sys.exit(f"loaded {heavy}" if heavy else 0)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
