"""The typed configuration of every component: schema, loading, dump and reference. Imports no torch."""

from __future__ import annotations

from unison.config.checks import check_config
from unison.config.dump import diff_to_defaults, dump_toml
from unison.config.load import Loaded, load_config
from unison.config.schema import TrainConfig

__all__ = ["Loaded", "TrainConfig", "check_config", "diff_to_defaults", "dump_toml", "load_config"]
