"""Exporting a model as a folder that transformers loads, beside its tokenizer and configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from unison.core.errors import ModelError
from unison.models.decoder import Decoder
from unison.models.loading import read_config
from unison.models.names import published_tensors

COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def export_model(
    model: Decoder,
    source: Path,
    target: Path,
    parameters: dict[str, Tensor] | None = None,
    texts: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write ``model`` (or ``parameters`` in its place, e.g. float32 masters) into ``target``.

    Configuration, tokenizer, chat template and generation config are copied from ``source``, the
    folder the model was loaded from. Values are saved bit for bit. ``texts`` are further files by name, such as a
    README.md. The folder appears whole or not at all. Returns the files written; raises ModelError where it cannot be
    written.
    """
    if target.exists() and any(target.iterdir()):
        raise ModelError(f"{target} is not empty; export into a new folder")
    part = target.with_name(target.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write_folder(model, source, part, parameters)
        for name, text in (texts or {}).items():
            (part / name).write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        if target.exists():
            target.rmdir()
        part.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ModelError(f"the model could not be exported to {target}: {error}") from error
    return sorted(target.iterdir())


def _write_folder(model: Decoder, source: Path, target: Path, parameters: dict[str, Tensor] | None) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in published_tensors(model, parameters).items()}
    dtypes = {tensor.dtype for tensor in tensors.values()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = read_config(source)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtypes.pop() if len(dtypes) == 1 else torch.float32).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
