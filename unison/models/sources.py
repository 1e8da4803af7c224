"""Where a model comes from: a folder on this machine, a short name, or the name of one on a hub."""

from __future__ import annotations

import difflib
from pathlib import Path

from unison.core.errors import ModelError
from unison.models.cache import cache_dir
from unison.models.hub import fetch_model, is_hub_name
from unison.models.packaged import PACKAGED_MODELS, ensure

__all__ = ["cache_dir", "resolve_model"]

TINY_RANDOM = "tiny-random"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def resolve_model(name_or_path: str) -> Path:
    """The folder of a model in Hugging Face layout, ready to load.

    An existing path is taken as it is; the model of a short name is fetched and converted, or made, at its first
    use; ``owner/model`` is fetched from the hub, where one can be reached. Raises ModelError where the folder cannot be
    loaded from, or the name is unknown.
    """
    if not name_or_path:
        raise ModelError(f"the model's name is empty; give a folder, or one of {short_names()}")
    path = Path(name_or_path).expanduser()
    if path.exists():
        check_folder(path)
        return path
    if name_or_path in PACKAGED_MODELS:
        return ensure(name_or_path)
    if name_or_path == TINY_RANDOM:
        # Its module loads torch, which naming a model must not.
        from unison.models.tiny_random import ensure_tiny_random

        return ensure_tiny_random()
    if not is_hub_name(name_or_path):
        raise ModelError(unknown(name_or_path))
    try:
        folder = fetch_model(name_or_path)
    except ModelError as error:
        raise ModelError(f"{error}; {_hint(name_or_path)}short names: {short_names()}") from error
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Raise ModelError, with the reason, where a folder is no model in safetensors form."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is a file; give the folder that holds config.json and *.safetensors")
    files = [entry for entry in folder.iterdir() if entry.is_file()]
    if not files:
        raise ModelError(f"{folder} holds no files; a model folder has config.json and *.safetensors")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; give a folder in Hugging Face layout")
    if any(file.suffix == ".safetensors" for file in files):
        return
    pickles = sorted(file.name for file in files if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(
            f"{folder} has its weights only as {pickles[0]}, a format that can run code when loaded and is refused; "
            f"save the model again as *.safetensors"
        )
    raise ModelError(f"{folder} has a config.json but no weights (*.safetensors)")


def unknown(name: str) -> str:
    return (
        f"model {name!r} is neither an existing folder nor a short name; {_hint(name)}short names: {short_names()}; "
        "a model on a hub is named owner/model"
    )


def _hint(name: str) -> str:
    close = difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), known_names(), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""


def known_names() -> list[str]:
    return [*PACKAGED_MODELS, TINY_RANDOM]


def short_names() -> str:
    return ", ".join(known_names())
