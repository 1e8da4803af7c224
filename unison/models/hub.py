"""Models by their name on a hub, where one can be reached: weights as safetensors and data files, never code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from unison.core.errors import ModelError

_NAME: Final = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
FILES: Final = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt")
"""What is fetched. Python files, pickles and everything else stay where they are."""


def is_hub_name(name: str) -> bool:
    """Whether this could be ``OWNER/MODEL`` or ``OWNER/MODEL@REVISION``."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def fetch_model(name: str) -> Path:
    """The folder of a hub's model in the local cache of Hugging Face, fetched at its first use.

    Raises ModelError where the hub cannot be reached (or is switched off by HF_HUB_OFFLINE) and the model is not in
    the cache, or where the hub does not have it.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ModelError(f"model {name!r} is no hub name like owner/model or owner/model@revision")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(found["name"], revision=found["revision"], allow_patterns=list(FILES))
    except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError, HFValidationError) as error:
        raise ModelError(f"model {name!r} cannot be had from the hub: {_first_line(error)}") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {name!r} is neither an existing folder nor a short name, and it is not in the local cache of the "
            "hub, which cannot be reached from here (or is switched off by HF_HUB_OFFLINE); download it where a hub "
            "can be reached, and give its folder"
        ) from error
    except OSError as error:
        raise ModelError(f"fetching model {name!r} from the hub failed: {_first_line(error)}") from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
