"""Packages that only some graders need, imported when the first response is graded."""

from __future__ import annotations

import importlib
from typing import Any

from unison.core.errors import RewardError


def optional_module(name: str, package: str, extra: str = "rewards") -> Any:
    """The module, or RewardError that says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RewardError(
            f"this grader needs {package}, which cannot be imported ({error}); "
            f"install it with: pip install 'unison[{extra}]'"
        ) from error
