"""A place where what a page says is done."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hygiene.tree import REPO
from unison.algorithms import registry


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder beside the examples, as the current one.

    Modules loaded from it, and what they registered, are forgotten at the end.
    """
    (tmp_path / "examples").symlink_to(REPO / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for kind in ("advantage", "loss"):
        registry.names(kind)
    monkeypatch.setattr(registry, "_REGISTERED", {kind: dict(own) for kind, own in registry._REGISTERED.items()})
    importlib.invalidate_caches()
    yield tmp_path
    for module_name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[module_name]
