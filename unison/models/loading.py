"""Loading a folder of safetensors into a model, tensor by tensor, with a closing check.

``WeightLoader`` serves start-up and weight updates alike: it knows which tensors a complete set
has, refuses what is foreign, misshapen or doubled, and at the end names what never came.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unison.core.errors import ModelError
from unison.models.decoder import Decoder
from unison.models.names import TensorSlot, canonical_name, tensor_slots
from unison.models.registry import read_spec
from unison.models.rope import inverse_frequencies
from unison.models.spec import DecoderSpec

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class WeightLoader:
    """Writes published tensors into ``parameters``; ``finish`` checks that the set was complete."""

    def __init__(self, spec: DecoderSpec, parameters: Mapping[str, Tensor]) -> None:
        self._slots: dict[str, TensorSlot] = {slot.name: slot for slot in tensor_slots(spec)}
        self._spec = spec
        self._parameters = parameters
        self._given: set[str] = set()
        self._written: set[str] = set()

    @torch.no_grad()
    def write(self, name: str, tensor: Tensor) -> None:
        """Write one published tensor, cast to the parameter's dtype by one rounding."""
        target = canonical_name(self._spec, name)
        slot = self._slots.get(target)
        if slot is None:
            raise ModelError(f"tensor {name!r} has no place in this model")
        if name in self._given:
            raise ModelError(f"tensor {name!r} was given twice")
        if tuple(tensor.shape) != slot.shape:
            raise ModelError(f"tensor {name!r} has shape {list(tensor.shape)}; {list(slot.shape)} is needed")
        if tensor.dtype not in _FLOATS:
            raise ModelError(f"tensor {name!r} has dtype {tensor.dtype}; float32, bfloat16 or float16 is needed")
        destination = self._parameters[slot.parameter][slot.start : slot.end]
        if target not in self._written:
            destination.copy_(tensor)
        elif not torch.equal(destination, tensor.to(destination.dtype)):
            raise ModelError(f"tensor {name!r} differs from the one it is tied to; send one of them, or equal ones")
        self._given.add(name)
        self._written.add(target)

    @property
    def written(self) -> Set[str]:
        """The published names under which tensors were written."""
        return self._written

    def refuse_given(self, names: Set[str]) -> None:
        """Raise ModelError if one of the names was given already."""
        twice = sorted(self._given & names)
        if twice:
            raise ModelError(f"tensor {twice[0]!r} was given twice")

    def record(self, names: Set[str]) -> None:
        """Count tensors as given that were written by other means than ``write``."""
        self._given |= names
        self._written |= {canonical_name(self._spec, name) for name in names}

    def finish(self) -> None:
        """Raise ModelError unless every tensor of the model was written."""
        missing = [name for name in self._slots if name not in self._written]
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ModelError(f"{len(missing)} of {len(self._slots)} tensors were never written: {shown}")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ModelError naming the file where it cannot be read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{folder} is no model folder: it has no config.json") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(config).__name__}")
    return config


def load_model(folder: Path, dtype: torch.dtype) -> Decoder:
    """The model in ``folder`` with weights cast to ``dtype``; at most one tensor is held twice."""
    spec = read_spec(read_config(folder))
    model = Decoder(spec, dtype)
    load_weights(model, folder)
    return model.requires_grad_(False)


def load_weights(model: Decoder, folder: Path) -> None:
    """Fill ``model`` from the folder's safetensors files."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    loader = WeightLoader(model.spec, parameters)
    for name, tensor in stream_tensors(folder):
        if name.endswith(".rotary_emb.inv_freq"):
            check_frequencies(name, tensor, model.spec)
        else:
            loader.write(name, tensor)
    loader.finish()


def check_frequencies(name: str, tensor: Tensor, spec: DecoderSpec) -> None:
    """Old checkpoints carry the rotary frequencies; they are ours to compute, but must be the same."""
    own = inverse_frequencies(spec.rope, spec.head_dim).to(tensor.dtype)
    if own.shape != tensor.shape or not torch.allclose(own.float(), tensor.float(), rtol=1e-2, atol=0):
        raise ModelError(f"tensor {name!r} differs from the rotary frequencies that config.json describes")


def stream_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every safetensors file of the folder, read one at a time."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - a handle of the library, not a dict
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is no readable safetensors file: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The folder's weight files: those of the index where there is one, else all safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            outside = [name for name in names if Path(name).name != name]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is no readable weight index: {error!r}") from error
        if outside:
            raise ModelError(f"{index} names files outside its folder: {', '.join(outside)}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks weight files named by its index: {', '.join(missing)}")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no weights: no *.safetensors file in it")
    return files
