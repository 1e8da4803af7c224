"""Exports what a run has trained as a folder in Hugging Face layout, with a card that says what it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import unison
from unison.core.errors import ModelError
from unison.evaluation.files import read_evaluation
from unison.evaluation.run_model import RunModel, decoder_of, stored_dtype
from unison.models.names import published_tensors
from unison.models.saving import export_model
from unison.weights.checksum import tensors_digest

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written where. ``digest`` is that of the weights as exported."""

    folder: Path
    step: int | None
    dtype: str
    digest: str
    num_parameters: int


def export_run(run_model: RunModel, target: Path, dtype: str | None = None) -> Exported:
    """Write the run's model into ``target``, a new folder that appears whole or not at all.

    ``dtype`` None keeps that of the exported model, and of a checkpoint takes the one the run computed in: then the
    weights are, bit for bit, those that sampled. No code of the run or of its rewards is executed. Raises ModelError
    for a folder that is not empty, for a dtype that cannot hold the weights, and where nothing can be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} is {'not empty' if target.is_dir() else 'a file'}; export into a new folder")
    source = run_model.folder
    chosen = DTYPES[dtype] if dtype else _default_dtype(run_model)
    model = decoder_of(source, run_model.parameters(), chosen)
    digest = tensors_digest(published_tensors(model))
    exported = Exported(
        folder=target,
        step=run_model.trained_steps,
        dtype=str(chosen).removeprefix("torch."),
        digest=digest,
        num_parameters=model.spec.num_parameters(),
    )
    export_model(model, source, target, texts={CARD: model_card(run_model, exported)})
    return exported


def _default_dtype(run_model: RunModel) -> torch.dtype:
    return stored_dtype(run_model.folder) if run_model.step is None else run_model.compute_dtype()


def model_card(run_model: RunModel, exported: Exported) -> str:
    """The README.md of an exported model: origin, weights, and the run's evaluation of them where it made one."""
    config = run_model.config
    evaluation = None if exported.step is None else read_evaluation(run_model.run, exported.step)
    table = str(evaluation["table"]) if evaluation and "table" in evaluation else ""
    scores = f"```text\n{table.replace('```', '` ` `')}\n```" if table else "The run made no evaluation at this step."
    rewards = ", ".join(_code(part.function) for part in config.reward.parts.values())
    lines = {
        "base model": _code(config.model.path),
        "run": f"{_code(config.run.name)} in {_code(str(run_model.run))}",
        "step": "not known" if exported.step is None else str(exported.step),
        "algorithm": _code(config.algorithm.name),
        "reward": rewards or _code(config.reward.function),
        "parameters": f"{exported.num_parameters / 1e6:.1f} M, {exported.dtype}",
        "weights digest": _code(exported.digest),
        "made with": f"Unison {unison.__version__}",
    }
    rows = "\n".join(f"| {key} | {value} |" for key, value in lines.items())
    return _CARD.format(title=_plain(config.run.name), rows=rows, scores=scores)


def _plain(text: str) -> str:
    """Text that stays on its line and means nothing to Markdown."""
    return "".join(letter if letter.isalnum() or letter in " -_./" else " " for letter in text).strip() or "model"


def _code(text: str) -> str:
    return "`" + "".join(" " if letter in "`|\n\r" else letter for letter in text) + "`"


_CARD = """\
---
library_name: transformers
tags:
- reinforcement-learning
---

# {title}

Trained with reinforcement learning. The configuration and the history are in the run's folder.

| | |
|---|---|
{rows}

The digest is SHA-256 over names, dtypes, shapes and bytes of the tensors, as `unison eval` prints it.

## Evaluation

{scores}

## Use

The folder loads with `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` of transformers, and
with `unison generate --model FOLDER`. The licence is that of the base model.
"""
