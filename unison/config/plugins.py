"""A user's own part, found by ``module:object``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from unison.config.names import did_you_mean
from unison.core.describe import describe
from unison.core.errors import UnisonError


def load_object(path: str, *, kind: str, error: type[UnisonError]) -> Any:
    """The object at ``module:object`` (dots allowed on both sides).

    Modules of the current directory are found, after installed ones of the same name. Raises
    ``error`` naming module and cause where the import fails, whatever the module raised.
    """
    module_name, _, object_name = path.partition(":")
    if not module_name or not object_name:
        raise error(f"the {kind} {path!r} is no module:object path")
    directory = os.getcwd()
    if directory not in sys.path:
        # At the end, so that a file of the user's never shadows an installed module.
        sys.path.append(directory)
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as cause:
        raise error(
            f"the {kind} {path!r} cannot be loaded: importing {module_name} failed: {describe(cause)}"
            f" (looked in {directory} and the installed packages)"
        ) from cause
    origin = getattr(found, "__file__", None) or module_name
    for name in object_name.split("."):
        if not hasattr(found, name):
            known = [known for known in dir(found) if not known.startswith("_")]
            raise error(f"the {kind} {path!r} cannot be loaded: {origin} has no {name!r}{did_you_mean(name, known)}")
        found = getattr(found, name)
    return found
