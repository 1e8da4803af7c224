"""From a run's configuration to its fleet: which servers, how they are started, what they must be like."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unison.clients.cores import Shares, available, divide_cores
from unison.clients.disk_transport import DiskTransport, sweep
from unison.clients.fleet import Fleet, Plan
from unison.clients.group_transport import GroupTransport
from unison.clients.launch import Launch, ServerProcess
from unison.clients.member import Member
from unison.clients.transports import HandleTransport, Transport
from unison.config.schema import TrainConfig
from unison.core.errors import ConfigError
from unison.engine.sampler import SAMPLER_NAME
from unison.models.numerics import NumericsChoice
from unison.models.spec import DecoderSpec


def open_fleet(
    config: TrainConfig,
    folder: Path,
    choice: NumericsChoice,
    spec: DecoderSpec,
    end_ids: Iterable[int],
    published: Mapping[str, Tensor],
) -> Fleet:
    """The servers of ``[server]``, ready for requests. Raises ConfigError, ServerError."""
    server = config.server
    shares = _shares(config)
    launch = Launch(
        model=folder,
        dtype=choice.dtype_name,
        numerics=choice.path.name,
        engine=config.engine,
        staging=server.staging,
        threads=config.run.threads,
        start_s=server.start_s,
        update_s=server.update_s,
    )
    key = _key(server.admin_key_env)
    processes = () if server.urls else tuple(ServerProcess(launch, cores, key) for cores in shares.servers)
    expected = expectations(config, choice, spec, end_ids)

    async def check(member: Member) -> None:
        check_info(member.name, await member.link.info(), expected)

    plan = Plan(
        config=server,
        dtype=choice.dtype,
        check=check,
        transport=_transport(config),
        processes=processes,
        key=key,
        trainer_cores=shares.trainer,
    )
    return Fleet(plan, published)


def expectations(
    config: TrainConfig, choice: NumericsChoice, spec: DecoderSpec, end_ids: Iterable[int]
) -> dict[str, Any]:
    """What ``/server_info`` must say, so that its answers are those of an engine in this process."""
    return {
        "dtype": choice.dtype_name,
        "numerics": choice.path.name,
        "sampler": SAMPLER_NAME,
        "torch": str(torch.__version__),
        "vocab_size": spec.vocab_size,
        "num_parameters": spec.num_parameters(),
        # Weights of another model can have these very sizes.
        "architecture": spec.digest,
        "end_ids": sorted(end_ids),
        "staging": config.server.staging,
    }


def check_info(name: str, info: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first difference, with both values."""
    for key, value in expected.items():
        if info.get(key) != value:
            hint = "; set server.staging" if key == "staging" else ""
            raise ConfigError(f"{name} has {key} {info.get(key)!r}, and this run needs {value!r}{hint}")


def _shares(config: TrainConfig) -> Shares:
    server = config.server
    if server.urls or server.placement == "colocated":
        return Shares((), ((),) * server.count)
    return divide_cores(available(), server.count)


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"server.admin_key_env names {variable}, and no such environment variable is set")
    return key


def _transport(config: TrainConfig) -> Transport:
    server = config.server
    if server.transport == "disk":
        root = run_folder(config)
        if server.disk_dir is not None:
            root = Path(server.disk_dir)
            _check_writable(root)
            sweep(root)
        return DiskTransport(root, use_delta=server.disk_delta)
    if server.transport == "group":
        return GroupTransport(server.bucket_mb << 20)
    return HandleTransport(server.bucket_mb << 20)


def _check_writable(root: Path) -> None:
    """Raise ConfigError where no folder can be made under ``root``: it would be noticed after a whole step."""
    nearest = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"server.disk_dir={str(root)!r} cannot be written: {nearest} is no folder to write into")


def run_folder(config: TrainConfig) -> Path:
    """Where the run keeps its files."""
    return Path(config.run.dir or Path("runs") / config.run.name)
