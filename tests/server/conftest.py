from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import TinyModelDir
from tests.server.local_link import LocalLink
from unison.config.serving import LimitsConfig, ServeConfig
from unison.engine.engine import Engine
from unison.server.front import Front
from unison.server.versions import Versions

MakeFront = Callable[..., Front]


@pytest.fixture
def make_front(tiny_model_dir: TinyModelDir) -> Iterator[MakeFront]:
    yield from _fronts(tiny_model_dir)


@pytest.fixture(scope="module")
def shared_front(tiny_model_dir: TinyModelDir) -> Iterator[Front]:
    """One for a whole file, for tests that leave it as it was."""
    for make in _fronts(tiny_model_dir):
        yield make()


def _fronts(tiny_model_dir: TinyModelDir) -> Iterator[MakeFront]:
    """``make_front(limits={...}, engine={...}, model={...}, **fields of ServeConfig)``: a front end with an engine."""
    links: list[LocalLink] = []

    def make(
        *,
        limits: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        **config: Any,
    ) -> Front:
        folder = tiny_model_dir(**(model or {}))
        link = LocalLink(Engine.from_pretrained(folder, dtype="float32", **{"kv_tokens": 8192, **(engine or {})}))
        links.append(link)
        settings = ServeConfig(limits=LimitsConfig(**(limits or {})), **config)
        return Front(link=link, config=settings, tokenizer=link.engine.tokenizer, versions=Versions())

    yield make
    for link in links:
        link.close()


@pytest.fixture
def front(make_front: MakeFront) -> Front:
    return make_front()


@pytest.fixture(scope="session")
def reference(tiny_model_dir: TinyModelDir) -> Engine:
    """Another engine of the same model, for what answers are held against."""
    return Engine.from_pretrained(tiny_model_dir(), dtype="float32", kv_tokens=8192)
