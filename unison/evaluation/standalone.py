"""Evaluates a model outside of any training: loads it, answers every set, and says whose numbers they are."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import unison
from unison.config.schema import TrainConfig
from unison.core.errors import ConfigError, ModelError
from unison.engine.client import InProcessClient
from unison.engine.end_tokens import end_token_ids
from unison.engine.engine import Engine
from unison.evaluation.result import EvaluationResult
from unison.evaluation.run_model import RunModel, decoder_of
from unison.evaluation.sets import EvaluationSets, OnProgress
from unison.models.loading import load_model, read_config
from unison.models.names import published_tensors
from unison.models.numerics import choose_numerics
from unison.models.registry import read_spec
from unison.models.sources import resolve_model
from unison.observability.environment import available_cores
from unison.text.tokenizer import Tokenizer
from unison.weights.checksum import tensors_digest


@dataclass(frozen=True, slots=True)
class ModelEvaluation:
    """A result with the model it is about. ``digest`` is that of the weights as computed with."""

    name: str
    digest: str
    dtype: str
    numerics: str
    result: EvaluationResult
    notes: tuple[str, ...]

    def text(self) -> str:
        """The table under a line that says which model it is about."""
        return (
            f"model {self.name}, {self.dtype}, numerics {self.numerics}, weights {self.digest[:16]}\n"
            f"{self.result.table()}"
        )

    def as_json(self) -> dict[str, Any]:
        model = {
            "name": self.name,
            "weights_digest": self.digest,
            "dtype": self.dtype,
            "numerics": self.numerics,
            "unison": unison.__version__,
        }
        return {"model": model, "notes": list(self.notes), **self.result.as_json()}


def evaluate_model(
    config: TrainConfig, run_model: RunModel | None = None, *, name: str = "", on_progress: OnProgress | None = None
) -> ModelEvaluation:
    """Evaluate the model of ``config``, or in its place that of a run, on the configured sets.

    The weight version is the run's step, 0 for a model that no run made. Raises ConfigError where no set is
    configured, and RewardError where a reward could score nothing.
    """
    torch.set_num_threads(config.run.threads or available_cores())
    folder = resolve_model(config.model.path) if run_model is None else run_model.folder
    tokenizer = _tokenizer(folder)
    with closing(EvaluationSets.build(config, tokenizer)) as sets:
        return _evaluate(config, run_model, sets, folder, tokenizer, name, on_progress)


def _evaluate(
    config: TrainConfig,
    run_model: RunModel | None,
    sets: EvaluationSets,
    folder: Path,
    tokenizer: Tokenizer,
    name: str,
    on_progress: OnProgress | None,
) -> ModelEvaluation:
    if not sets:
        raise ConfigError(
            "there is nothing to evaluate: give eval.problems and, where the source needs one, data.eval, "
            "or add a set as [eval.sets.NAME]"
        )
    choice = choose_numerics(read_spec(read_config(folder)), config.model.dtype, config.model.numerics)
    if run_model is None:
        model = load_model(folder, choice.dtype)
    else:
        model = decoder_of(folder, run_model.parameters(), choice.dtype)
    version = 0 if run_model is None else run_model.trained_steps or 0
    engine = Engine(
        model,
        path=choice.path,
        config=config.engine,
        tokenizer=tokenizer,
        end_ids=end_token_ids(folder, tokenizer.eos_token_id),
        version=version,
    )
    result = asyncio.run(sets.run(InProcessClient(engine), version, on_progress=on_progress))
    result.require_scores()
    return ModelEvaluation(
        name=name or config.model.path,
        digest=tensors_digest(published_tensors(model)),
        dtype=choice.dtype_name,
        numerics=choice.path.name,
        result=result,
        notes=(*sets.notes, *choice.notes, *engine.notes, *result.notes()),
    )


def _tokenizer(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json; evaluation needs the model's tokenizer beside its weights")
    return Tokenizer.from_folder(folder)
