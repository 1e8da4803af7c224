"""The trackers there are: what each is called, needs, and may be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTracker:
    """``package`` is what is imported, ``extra`` what pip installs it by, ``opener`` our module:function."""

    package: str
    extra: str
    opener: str
    options: Mapping[str, str]
    """Option -> what it means."""


_FOLDER: Final = "unison.observability.trackers"

TRACKERS: Final[Mapping[str, KnownTracker]] = {
    "tensorboard": KnownTracker(
        package="tensorboard",
        extra="tensorboard",
        opener=f"{_FOLDER}.tensorboard:open_tensorboard",
        options={"dir": "folder of the event files; by default tensorboard/ in the run folder"},
    ),
    "wandb": KnownTracker(
        package="wandb",
        extra="wandb",
        opener=f"{_FOLDER}.wandb:open_wandb",
        options={
            "project": "project of the run; by default unison",
            "entity": "user or team; by default that of your login",
            "group": "group of the run",
            "mode": "online, offline or disabled; by default the variable WANDB_MODE decides",
            "dir": "folder under which W&B keeps its files; by default the run folder",
        },
    ),
    "trackio": KnownTracker(
        package="trackio",
        extra="trackio",
        opener=f"{_FOLDER}.trackio:open_trackio",
        options={
            "project": "project of the run; by default unison",
            "space_id": "a Space of the Hugging Face hub to log to; by default this machine alone",
        },
    ),
    "mlflow": KnownTracker(
        package="mlflow",
        extra="mlflow",
        opener=f"{_FOLDER}.mlflow:open_mlflow",
        options={
            "tracking_uri": "folder, database or server; by default the variable MLFLOW_TRACKING_URI, or this folder",
            "experiment": "experiment of the run; by default unison",
        },
    ),
}
