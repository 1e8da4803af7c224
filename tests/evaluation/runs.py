"""Run folders as a training run leaves them, made in a moment."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from unison.checkpoint.save import Saver
from unison.config.dump import dump_toml
from unison.config.schema import TrainConfig
from unison.models.loading import load_model
from unison.models.saving import export_model


def make_run(
    run: Path, base: Path, *, steps: tuple[int, ...] = (1, 2), exported: bool = True, dtype: str = "bfloat16"
) -> Path:
    """A run of the model in ``base``: checkpoints with masters that differ by step, and the export of the last."""
    run.mkdir(parents=True)
    config = {
        "model": {"path": str(base), "dtype": dtype, "numerics": "exact"},
        "run": {"name": "a run", "dir": str(run), "seed": 3, "threads": 1},
        "data": {"source": "sums", "options": {"max_operand": 6, "eval_size": 4}},
        "rollout": {"max_new_tokens": 4},
        "engine": {"kv_tokens": 4096},
        "eval": {"problems": 4},
        "log": {"progress": "off"},
    }
    (run / "config.toml").write_text(dump_toml(msgspec.convert(config, TrainConfig)))
    (run / "environment.json").write_text(json.dumps({"numerics": {"dtype": dtype}}))
    for step in steps:
        Saver(run / "checkpoints").save(step, {"weights": masters(base, step)}, {"cursor": {}}, {})
    if exported:
        last = max(steps, default=0)
        model = load_model(base, {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype])
        for name, parameter in model.named_parameters():
            parameter.data.copy_(masters(base, last)[name])
        export_model(model, base, run / "model")
        (run / "summary.json").write_text(json.dumps({"step": last}))
    return run


def masters(base: Path, step: int) -> dict[str, Tensor]:
    model = load_model(base, torch.float32)
    return {name: (p.detach() * (1 + 0.01 * step)).clone() for name, p in model.named_parameters()}
