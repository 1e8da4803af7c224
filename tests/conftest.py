from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import write_tiny_model

TinyModelDir = Callable[..., Path]


def pytest_configure(config: pytest.Config) -> None:
    # Tests run side by side; one thread each keeps them from waiting for one another's cores.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Whatever a test does to torch's threads ends with it: a training run takes one for each core."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real SmolLM2-135M-Instruct. Fails, and does not skip, where it cannot be had."""
    from unison.models.sources import resolve_model

    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> TinyModelDir:
    """``tiny_model_dir("qwen3", tie_word_embeddings=True)`` -> folder of a small random model.

    Families llama, qwen2, qwen3; keywords are fields of the transformers configuration, e.g.
    attention_bias=True, mlp_bias=True, rope_parameters={"rope_type": "linear", "factor": 2.0,
    "rope_theta": 1e4}. Each variant is made once a session: treat the folder as read-only.
    """
    made: dict[str, Path] = {}

    def make(family: str = "llama", **config_overrides: Any) -> Path:
        key = json.dumps([family, config_overrides], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"tiny_{family}")
            write_tiny_model(folder, family, **config_overrides)
            made[key] = folder
        return made[key]

    return make
