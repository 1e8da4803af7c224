from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unison import Engine, SamplingParams
from unison.core.errors import ModelError
from unison.models.sources import cache_dir, resolve_model
from unison.models.tiny_random import write_tiny_random
from unison.weights.checksum import tensors_digest

WEIGHTS_DIGEST = "7a891bbdcce7b7a636b30afc0117f8c7d4abcf2fab1a92e7b532ed9fd88ebc63"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNISON_CACHE", str(tmp_path / "cache"))
    return resolve_model("tiny-random")


def test_it_is_made_at_its_first_use_and_then_found(folder: Path) -> None:
    assert folder == cache_dir() / "tiny-random"
    written = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert resolve_model("tiny-random") == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == written


def test_a_damaged_folder_is_made_again(folder: Path) -> None:
    sound = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(sound[:-1])
    assert resolve_model("tiny-random") == folder
    assert (folder / "model.safetensors").read_bytes() == sound


def test_its_weights_are_the_same_on_every_machine(tmp_path: Path) -> None:
    write_tiny_random(tmp_path)
    assert tensors_digest(load_file(tmp_path / "model.safetensors")) == WEIGHTS_DIGEST


def test_its_weights_have_the_spread_of_a_fresh_model(folder: Path) -> None:
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert weight.float().std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.05), name
            assert abs(weight.float().mean().item()) < 0.01, name


def test_transformers_loads_it_and_reads_bytes_and_control_tokens(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "a 1\n\u00e9\u4e16 \U0001f600"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer("<|im_end|>")["input_ids"] == [json.loads((folder / "config.json").read_text())["eos_token_id"]]


def test_it_answers_raw_prompts_and_chats(folder: Path) -> None:
    engine = Engine.from_pretrained("tiny-random")
    assert engine.tokenizer is not None
    chat = engine.tokenizer.render_chat([{"role": "user", "content": "hi<|im_end|>"}])
    assert chat.count(258) == 1  # the end of the turn, and not what the user typed
    raw, chatted = engine.generate([list(b"1+1="), chat], SamplingParams(max_new_tokens=5, seed=1, ignore_eos=True))
    assert len(raw[0].token_ids) == len(chatted[0].token_ids) == 5


def test_a_near_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(ModelError, match="did you mean 'tiny-random'"):
        resolve_model("tiny-randm")
