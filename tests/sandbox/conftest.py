from __future__ import annotations

import os
import secrets

import pytest

from unison.sandbox.base import Sandbox
from unison.sandbox.find import find_sandbox


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    """The machine's sandbox. What needs it is skipped where there is none, with the reason."""
    found = find_sandbox()
    if found.sandbox is None:
        pytest.skip(f"no sandbox here: {found.reason}. {found.fix}")
    return found.sandbox


@pytest.fixture(autouse=True)
def own_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """One made-up user for all sandboxes of this process, by which the tests know their own."""
    monkeypatch.setattr(secrets, "randbelow", lambda number: os.getpid() % number)
