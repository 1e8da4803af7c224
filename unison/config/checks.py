"""What can be seen to be wrong between plain values, before any component is built.

How the batch settings fit together is checked where the batch is made, in ``unison.training``.
"""

from __future__ import annotations

from typing import Any, Final

from unison.config.schema import RewardConfig, TrainConfig
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


_NAMES_DATA: Final = {"jsonl": "FILE.jsonl", "parquet": "FILE.parquet", "datasets": "FOLDER_OR_NAME"}
"""Sources that read what data.train and data.eval name, with an example."""
