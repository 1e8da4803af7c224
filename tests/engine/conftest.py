from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.support import make_engine
from unison.engine.client import InProcessClient
from unison.models.decoder import Decoder
from unison.models.loading import load_model


@pytest.fixture(scope="session")
def model(tiny_model_dir: Callable[..., Path]) -> Decoder:
    """A small Qwen3 in float32, shared by all tests: nobody writes to its weights."""
    return load_model(tiny_model_dir("qwen3"), torch.float32)


@pytest.fixture
def own_model(tiny_model_dir: Callable[..., Path]) -> Decoder:
    """The same weights in a copy that a test may change."""
    return load_model(tiny_model_dir("qwen3"), torch.float32)


@pytest.fixture
def client(model: Decoder) -> InProcessClient:
    return InProcessClient(make_engine(model))
