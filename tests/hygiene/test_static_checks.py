"""Lint, format and types, as `make lint` runs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.hygiene.tree import REPO


@pytest.mark.parametrize(
    "command",
    [("ruff", "check", "--no-fix"), ("ruff", "format", "--check"), ("mypy", "--strict")],
    ids=["lint", "format", "types"],
)
def test_the_tree_passes(command: tuple[str, ...]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=REPO, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
