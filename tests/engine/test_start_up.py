"""What an engine finds out before its first request: end tokens, and how much memory to take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.test_kv_pool import SPEC
from unison.core.errors import ModelError
from unison.engine import memory
from unison.engine.end_tokens import end_token_ids
from unison.engine.memory import automatic_kv_tokens, available_memory_bytes


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def test_end_ids_come_from_both_configurations_and_the_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, config={"eos_token_id": 2}, generation_config={"eos_token_id": [5, 7], "temperature": 0.6})
    assert end_token_ids(tmp_path) == {2, 5, 7}
    assert end_token_ids(tmp_path, tokenizer_eos=9) == {2, 5, 7, 9}


def test_models_may_have_no_end_id(tmp_path: Path) -> None:
    assert end_token_ids(tmp_path) == frozenset()
    write(tmp_path, config={"eos_token_id": None}, generation_config={})
    assert end_token_ids(tmp_path) == frozenset()


@pytest.mark.parametrize("value", ["</s>", [1, "2"], -1, [3, -1], True, 2.0, {"id": 2}])
def test_an_end_id_that_is_none_is_refused_with_its_file(tmp_path: Path, value: object) -> None:
    write(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id="):
        end_token_ids(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", '"text"'])
def test_an_unreadable_configuration_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    write(tmp_path, config=text)
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        end_token_ids(tmp_path)


def test_the_pool_takes_what_is_wanted_or_a_share_of_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPEC, max_positions=4096)
    assert spec.kv_bytes_per_token(4) == 2 * 2 * 1 * 4 * 4
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1 << 40)
    assert automatic_kv_tokens(spec, torch.float32, max_running=3) == 3 * 2048
    assert automatic_kv_tokens(replace(spec, max_positions=1024), torch.float32, max_running=3) == 3 * 1024
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 64 * 4 * 1300)
    assert automatic_kv_tokens(spec, torch.float32, max_running=3) == 1024
    assert automatic_kv_tokens(spec, torch.bfloat16, max_running=3) == 2560
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 0)
    assert automatic_kv_tokens(spec, torch.float32, max_running=3) == 512


def test_this_machine_has_memory() -> None:
    assert 1 << 20 < available_memory_bytes() < 1 << 50
