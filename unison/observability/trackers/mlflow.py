"""MLflow: a folder, a database or a server, as ``mlflow.tracking_uri`` or MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from typing import Any, Final

from unison.core.protocols import MetricSink
from unison.observability.trackers.base import Memory, TrackerRun

_MAX_PARAMS_A_CALL: Final = 100
_MAX_PARAM_CHARS: Final = 500


class MlflowSink:
    """Logs each step as one batch; a step that MLflow had before a resume is not logged again.

    ``client`` is an MlflowClient and ``metric`` MLflow's class of one value.
    """

    def __init__(self, client: Any, metric: Any, run_id: str, memory: Memory) -> None:
        self._client = client
        self._metric = metric
        self._run_id = run_id
        self._memory = memory

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._memory.is_new(step):
            now_ms = time.time_ns() // 1_000_000
            values = [self._metric(name, float(value), now_ms, step) for name, value in metrics.items()]
            self._client.log_batch(self._run_id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def open_mlflow(run: TrackerRun) -> MetricSink:
    """Begin an MLflow run with the configuration as its parameters, or go on in the one whose id is kept."""
    # Reports of MLflow's use go to another server than the one that was chosen.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = importlib.import_module("mlflow")
    entities = importlib.import_module("mlflow.entities")
    client = mlflow.MlflowClient(tracking_uri=run.options.get("tracking_uri"))
    kept = None if run.resume_step is None else run.memory.get("run_id")
    if kept is not None:
        client.update_run(kept, status="RUNNING")
        return MlflowSink(client, entities.Metric, kept, run.memory)
    name = run.options.get("experiment", "unison")
    experiment = client.get_experiment_by_name(name)
    experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
    run_id = client.create_run(experiment_id, run_name=run.name).info.run_id
    run.memory.set("run_id", run_id)
    run.memory.set("last_step", None)
    params = [entities.Param(key, str(value)[:_MAX_PARAM_CHARS]) for key, value in run.config.items()]
    for start in range(0, len(params), _MAX_PARAMS_A_CALL):
        client.log_batch(run_id, params=params[start : start + _MAX_PARAMS_A_CALL])
    return MlflowSink(client, entities.Metric, run_id, run.memory)
