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
    """``make_front(limits={...}, engine={...}, **fields of ServeConfig)`` -> a front end over an engine of its own."""
    links: list[LocalLink] = []

    def make(
        *, limits: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **config: Any
    ) -> Front:
        options = {"kv_tokens": 4096, **(engine or {})}
        link = LocalLink(Engine.from_pretrained(tiny_model_dir(), dtype="float32", **options))
        links.append(link)
        tokenizer = link.engine.tokenizer
        assert tokenizer is not None
        settings = ServeConfig(limits=LimitsConfig(**(limits or {})), **config)
        return Front(link=link, config=settings, tokenizer=tokenizer, versions=Versions())

    yield make
    for link in links:
        link.close()
