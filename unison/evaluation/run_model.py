"""Finds the model that a run trained: its exported folder, or the weights of one of its checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unison.checkpoint.find import find
from unison.checkpoint.load import load
from unison.config.load import load_config
from unison.config.schema import TrainConfig
from unison.core.errors import ModelError
from unison.models.decoder import Decoder
from unison.models.loading import load_model, read_config
from unison.models.registry import read_spec
from unison.models.sources import resolve_model

CHECKPOINTS = "checkpoints"
WEIGHTS = "weights"
"""The group of a checkpoint's tensors that holds the float32 masters, by the model's own parameter names."""

_REFERENCE = re.compile(r"(?P<run>.+)@(?P<step>[0-9]{1,15})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RunModel:
    """The model of a run at a step. ``step`` None: the exported model, whose step is in the run's summary."""

    run: Path
    step: int | None
    config: TrainConfig

    @property
    def folder(self) -> Path:
        """Where configuration and tokenizer lie: the exported model, else the model the run began from."""
        return self.run / "model" if self.step is None else resolve_model(self.config.model.path)

    @property
    def trained_steps(self) -> int | None:
        """Steps that the weights were trained for; None where the run does not say."""
        if self.step is not None:
            return self.step
        steps = read_object(self.run / "summary.json").get("step")
        return steps if isinstance(steps, int) and not isinstance(steps, bool) else None

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by the model's own name; float32 masters from a checkpoint, else as exported."""
        return load_run_weights(self.run, self.step)

    def compute_dtype(self) -> torch.dtype:
        """The dtype that the run computed in, as its environment.json says; else that of its exported model."""
        numerics = read_object(self.run / "environment.json").get("numerics")
        name = numerics.get("dtype") if isinstance(numerics, Mapping) else None
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(str(name), torch.float32)


def find_run_model(reference: str) -> RunModel | None:
    """The run that ``RUN`` or ``RUN@STEP`` names; None where it names no run folder (but a model, say).

    Without a step it is the exported model, or where there is none the newest checkpoint. Raises ModelError for a
    run that has neither, and for ``@STEP`` of something that is no run.
    """
    path = Path(reference).expanduser()
    found = None if path.exists() else _REFERENCE.fullmatch(reference)
    step = int(found["step"]) if found else None
    run = Path(found["run"]).expanduser() if found else path
    if not is_run(run):
        if found and run.exists():
            raise ModelError(f"{run} is no run folder (it has no config.toml), so there is no step {step} of it")
        return None
    config = load_config([run / "config.toml"]).config
    if step is None and not (run / "model" / "config.json").is_file():
        step = newest_step(run)
    return RunModel(run, step, config)


def newest_step(run: Path) -> int:
    """The step of a run's newest checkpoint. Raises ModelError where it has none to load."""
    found = [entry.step for entry in find(run / CHECKPOINTS) if entry.step is not None and entry.problem is None]
    if not found:
        raise ModelError(
            f"{run} has no trained model: neither {run / 'model'} (exported at the end of a run) nor a checkpoint "
            f"in {run / CHECKPOINTS}"
        )
    return found[0]


def load_run_weights(run: Path, step: int | None) -> dict[str, Tensor]:
    """The weights of a run by the model's own parameter names.

    Of a step: the float32 masters of its checkpoint, every byte checked; the whole checkpoint is read for it. Without
    a step: the exported model, as stored. Raises CheckpointError or ModelError where there are none.
    """
    if step is None:
        return exported_parameters(run / "model")
    loaded = load(run / CHECKPOINTS, step)
    if WEIGHTS not in loaded.tensors:
        groups = ", ".join(sorted(loaded.tensors)) or "none"
        raise ModelError(f"{loaded.path} holds no tensors called {WEIGHTS!r}, but {groups}; it is no run's checkpoint")
    return loaded.tensors[WEIGHTS]


def is_run(path: Path) -> bool:
    """Whether a folder holds a run: its configuration, and no model's."""
    return (path / "config.toml").is_file() and not (path / "config.json").is_file()


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of the run folder; empty where the file is missing. Raises ModelError where it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def exported_parameters(folder: Path) -> dict[str, Tensor]:
    """The parameters of a model folder by the model's own names, in the dtype that they are stored in."""
    model = load_model(folder, stored_dtype(folder))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype that config.json names; float32 where it names none of ours."""
    config = read_config(folder)
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)


def decoder_of(folder: Path, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Decoder:
    """A model of the folder's shape with these parameters, each cast by one rounding.

    Raises ModelError where names or shapes are not the model's, or a value is not finite after the cast.
    """
    model = Decoder(read_spec(read_config(folder)), dtype)
    own = dict(model.named_parameters())
    if set(own) != set(parameters):
        names = sorted(set(own) ^ set(parameters))
        raise ModelError(f"the run's weights do not fit the model in {folder}: {names[0]} is on one side only")
    for name, parameter in own.items():
        given = parameters[name]
        if given.shape != parameter.shape:
            raise ModelError(
                f"the run's weights do not fit the model in {folder}: {name} has shape {list(given.shape)}, "
                f"and {list(parameter.shape)} is needed"
            )
        parameter.data.copy_(given)
        if not bool(torch.isfinite(parameter.data).all()):
            raise ModelError(
                f"{name} holds a value that {str(dtype).removeprefix('torch.')} has no finite number for; "
                "choose --dtype bfloat16 or float32"
            )
    return model.requires_grad_(False)
