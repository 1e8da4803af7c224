"""What the server says of itself: model, settings, load, weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

import unison
from unison.server.control_body import Body, Empty, Refused, control, json_answer
from unison.server.link import CommandFailed
from unison.server.messages import CheckWeights, WeightsByName
from unison.server.metrics import MEDIA_TYPE

if TYPE_CHECKING:
    from unison.server.front import Front

SECRETS: Final = ("api_key", "admin_key")
_SECTIONS: Final = ("core", "memory", "queues", "all")
_ABSENT_SECTIONS: Final = ("spec", "lora", "disagg")
_MOST_NAMED: Final = 20


class LoadsBody(Body, frozen=True, kw_only=True):
    """``include``: sections, with commas between them."""

    include: Annotated[str, Meta(max_length=200)] = "core"


class WeightsBody(Body, frozen=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=1000)]
    truncate_size: Annotated[int, Meta(ge=0, le=1 << 20)] = 100


class CheckerBody(Body, frozen=True, kw_only=True):
    """No weights here are quantised, so there is no error of quantisation to allow."""

    INERT: ClassVar[frozenset[str]] = frozenset(("allow_quant_error",))
    action: Literal["checksum", "snapshot", "reset_tensors", "compare"] = "checksum"
    selector: Literal["target", "all", "draft"] | None = None
    skip_tensor_list: list[str] | None = None


@control(Empty)
async def model_info(front: Front, body: Empty) -> dict[str, Any]:
    info = front.link.info
    return {
        "model_path": info.path,
        "tokenizer_path": info.path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": front.versions.label(front.link.version),
        "model_type": info.family,
        "vocab_size": info.vocab_size,
        "context_length": info.context_length,
        "dtype": info.dtype,
    }


@control(Empty)
async def get_weight_version(front: Front, body: Empty) -> dict[str, Any]:
    return {"weight_version": front.versions.label(front.link.version)}


@control(Empty)
async def server_info(front: Front, body: Empty) -> dict[str, Any]:
    """Settings and limits in one flat object, keys left out; and what the engine process says of itself."""
    settings: dict[str, Any] = msgspec.to_builtins(front.config)
    limits = {f"limits_{name}": value for name, value in settings.pop("limits").items()}
    settings = {name: value for name, value in settings.items() if name not in SECRETS}
    info = front.link.info
    engine = {
        "model_path": info.path,
        "tokenizer_path": info.path,
        "context_length": info.context_length,
        "dtype": info.dtype,
        "numerics": info.numerics,
        "sampler": info.sampler,
        "torch": info.torch,
        "vocab_size": info.vocab_size,
        "num_parameters": info.num_parameters,
        "architecture": info.architecture,
        "end_ids": list(info.end_ids),
        "weight_bytes": info.weight_bytes,
        "max_total_num_tokens": info.kv_tokens,
        "page_size": info.page_size,
        "engine_threads": info.threads,
        "notes": list(info.notes),
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
    }
    return {
        **settings,
        **limits,
        **engine,
        "weight_version": front.versions.label(front.link.version),
        "checksum": front.updates.checksum,
        "started_at": front.started_at,
        "version": unison.__version__,
        "internal_states": [_internal_state(front)],
    }


def _internal_state(front: Front) -> dict[str, Any]:
    link = front.link
    beat: dict[str, Any] = msgspec.to_builtins(link.beat)
    beat.pop("type", None)
    update = front.updates.open
    return {
        **beat,
        "state": link.state,
        "weight_version": front.versions.label(link.version),
        "open_update": None if update is None else update.version,
        "num_restarts": link.num_restarts,
        "silence_s": link.silence_s,
        "last_gen_throughput": front.metrics.throughput(),
    }


@control(Empty)
async def get_internal_state(front: Front, body: Empty) -> dict[str, Any]:
    return {"internal_states": [_internal_state(front)]}


@control(Empty)
async def get_load(front: Front, body: Empty) -> Response:
    return json_answer([await _load(front)])


@control(LoadsBody)
async def loads(front: Front, body: LoadsBody) -> dict[str, Any]:
    sections = [section.strip() for section in body.include.split(",") if section.strip()]
    for section in sections:
        if section not in _SECTIONS + _ABSENT_SECTIONS:
            known = ", ".join(_SECTIONS + _ABSENT_SECTIONS)
            raise Refused("request", f"include: {section!r} is not one of {known}", "include")
    beat = front.link.beat
    load = await _load(front)
    if {"memory", "all"} & set(sections):
        load["memory"] = {
            "num_used_tokens": beat.num_used_tokens,
            "num_cached_tokens": beat.num_cached_tokens,
            "kv_tokens": beat.kv_tokens,
            "weight_bytes": front.link.info.weight_bytes,
        }
    if {"queues", "all"} & set(sections):
        load["queues"] = {"waiting": beat.num_waiting, "paused": beat.pause_mode is not None}
    # Sections of what this server has none of.
    load |= {section: None for section in _ABSENT_SECTIONS if section in sections or "all" in sections}
    total = {name: load[name] for name in ("num_reqs", "num_running_reqs", "num_waiting_reqs", "num_used_tokens")}
    return {
        "timestamp": time.time(),
        "version": unison.__version__,
        "dp_rank_count": 1,
        "loads": [load],
        "aggregate": total,
    }


async def _load(front: Front) -> dict[str, Any]:
    """Nothing under way is only said where it is so: a beat may be older than the request that was sent last."""
    beat = front.link.beat
    num_waiting = max(beat.num_waiting, front.live.num_samples - beat.num_running)
    return {
        "dp_rank": 0,
        "num_reqs": beat.num_running + num_waiting,
        "num_running_reqs": beat.num_running,
        "num_waiting_reqs": num_waiting,
        "num_tokens": beat.num_used_tokens,
        "num_used_tokens": beat.num_used_tokens,
        "max_total_num_tokens": beat.kv_tokens,
        "token_usage": beat.num_used_tokens / beat.kv_tokens if beat.kv_tokens else 0.0,
        "gen_throughput": front.metrics.throughput(),
        "cache_hit_rate": front.metrics.cache_hit_rate,
        "ts_tic": time.time(),
    }


@control(Empty)
async def metrics(front: Front, body: Empty) -> Response:
    return Response(front.metrics.text(), media_type=MEDIA_TYPE)


@control(WeightsBody)
async def get_weights_by_name(front: Front, body: WeightsBody) -> Response:
    """The first values of a published tensor, nested as it is."""
    result = await front.link.command(WeightsByName(body.name, body.truncate_size))
    return json_answer(result["values"])


@control(CheckerBody)
async def weights_checker(front: Front, body: CheckerBody) -> dict[str, Any]:
    if body.selector == "draft":
        raise Refused("unsupported", "selector draft is not supported: there is no draft model", "selector")
    if body.skip_tensor_list:
        raise Refused("unsupported", "skip_tensor_list is not supported: all tensors are compared", "skip_tensor_list")
    payload = await front.link.command(CheckWeights(body.action))
    differing = payload.get("differing")
    if differing:
        names = ", ".join(map(str, differing[:_MOST_NAMED])) + (" ..." if len(differing) > _MOST_NAMED else "")
        raise CommandFailed("update", f"{len(differing)} tensors differ from the snapshot: {names}")
    return {"success": True, "message": f"{body.action} done", "payload": payload}
