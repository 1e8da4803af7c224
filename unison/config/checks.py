"""What can be seen to be wrong between plain values, before any component is built.

How the batch settings fit together is checked where the batch is made, in ``unison.training``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from unison.config.schema import EngineConfig, RewardConfig, TrainConfig
from unison.config.section import Section
from unison.config.serving import ServersConfig
from unison.core.errors import ConfigError, RequestError
from unison.core.sampling import SamplingParams

_MAX_NAME_BYTES: Final = 200


def check_config(config: TrainConfig) -> None:
    """Raise ConfigError, naming the key to change, for values and combinations that cannot be meant."""
    _check_names(config)
    _check_sampling(config)
    _check_filter(config)
    _check_data(config)
    check_reward(config.reward)
    _check_servers(config)


def _check_names(config: TrainConfig) -> None:
    if not config.model.path.strip():
        raise ConfigError("model.path is empty; give a model folder or a short name like smollm2-135m")
    if not config.run.name.strip():
        raise ConfigError("run.name is empty; give the run a name")
    name = config.run.name
    if "/" in name or name in (".", "..") or not name.isprintable() or len(name.encode()) > _MAX_NAME_BYTES:
        raise ConfigError(
            f"run.name={name[:_MAX_NAME_BYTES]!a} is no name of a folder: at most {_MAX_NAME_BYTES} bytes without / "
            "and control characters; run.dir says where the folder lies"
        )


def _check_sampling(config: TrainConfig) -> None:
    """Both sections must make sampling settings that the engine accepts."""
    rollout = config.rollout
    _try_sampling(
        "rollout",
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
    )
    _try_sampling("eval", temperature=config.eval.temperature)


def _check_filter(config: TrainConfig) -> None:
    if config.rollout.refill and config.rollout.filter is None:
        raise ConfigError(
            f"rollout.refill={config.rollout.refill} has no effect without rollout.filter, whose groups it replaces; "
            "set rollout.filter, or remove it"
        )


def _try_sampling(section: str, **settings: Any) -> None:
    try:
        SamplingParams(**settings)
    except RequestError as error:
        raise ConfigError(f"[{section}]: {error}") from None


def _check_data(config: TrainConfig) -> None:
    data = config.data
    example = _NAMES_DATA.get(data.source)
    if example is None:
        return
    if data.train is None and config.trainer.steps > 0 and not data.mix:
        raise ConfigError(f"data.source is {data.source}, but data.train names no file; give --data.train {example}")
    if data.eval is None and config.eval.problems > 0:
        raise ConfigError(
            f"eval.problems is {config.eval.problems}, but data.eval names no file; give --data.eval {example} "
            "or --eval.problems 0"
        )


def check_reward(reward: RewardConfig) -> None:
    """Raise ConfigError for settings of ``[reward]`` that contradict each other or would have no effect."""
    neutral = RewardConfig()
    for key in ("function", "options"):
        value = getattr(reward, key)
        if reward.parts and value != getattr(neutral, key):
            raise ConfigError(
                f"reward.{key}={value!r} and reward.parts are both given; make the function one of the parts, or "
                "remove the parts"
            )
    if reward.isolation == "process":
        return
    for key in ("timeout_s", "on_timeout", "workers", "memory_mb"):
        value = getattr(reward, key)
        if value != getattr(neutral, key):
            raise ConfigError(f'reward.{key}={value!r} has no effect with reward.isolation="none"; remove one of them')
    for name, part in reward.parts.items():
        if part.timeout_s is not None:
            raise ConfigError(
                f'reward.parts.{name}.timeout_s={part.timeout_s} has no effect with reward.isolation="none"; '
                "remove one of them"
            )


def _check_servers(config: TrainConfig) -> None:
    """Settings of ``[server]`` that would have no effect."""
    server = config.server
    if config.rollout.engine != "server":
        _refuse_set(server, "server", ServersConfig.__struct_fields__, 'without rollout.engine="server"')
        return
    if server.urls:
        _refuse_set(server, "server", _OF_OWN_SERVERS, "on servers that run already (server.urls)")
        _refuse_set(
            config.engine, "engine", EngineConfig.__struct_fields__, "on servers that run already (server.urls)"
        )
        _check_urls(server.urls)
    if server.transport == "disk":
        _refuse_set(server, "server", ("bucket_mb",), 'with server.transport="disk"')
    else:
        _refuse_set(server, "server", ("disk_dir", "disk_delta"), f'with server.transport="{server.transport}"')


def _refuse_set(section: Section, name: str, keys: Iterable[str], why: str) -> None:
    neutral = type(section)()
    for key in keys:
        value = getattr(section, key)
        if value != getattr(neutral, key):
            raise ConfigError(f"{name}.{key}={value!r} has no effect {why}; remove one of them")


def _check_urls(urls: Sequence[str]) -> None:
    for url in urls:
        if not _URL.fullmatch(url):
            raise ConfigError(f"server.urls holds {url!r}; give each like http://127.0.0.1:30000")
    if len({url.rstrip("/") for url in urls}) < len(urls):
        raise ConfigError("server.urls names a server twice; name each once")


_OF_OWN_SERVERS: Final = ("count", "placement", "start_s")
_URL: Final = re.compile(r"https?://[A-Za-z0-9_.\-\[\]:]+/?")

_NAMES_DATA: Final = {"jsonl": "FILE.jsonl", "parquet": "FILE.parquet", "datasets": "FOLDER_OR_NAME"}
"""Sources that read what data.train and data.eval name, with an example."""
