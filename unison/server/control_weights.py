"""Unison's own weight routes: begin, layout, stage, prepare, commit, abort, status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from unison.processes.shared_memory import Handle
from unison.server.control_body import Body, Empty, Refused, control
from unison.server.messages import RegisterLayout, StageDisk, StageGroup, StageHandle
from unison.server.updates import Sender
from unison.weights.cuda_ipc import CudaIpcHandle
from unison.weights.manifest import BufferLayout

if TYPE_CHECKING:
    from unison.server.front import Front

Version = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Checksum = Annotated[str, Meta(min_length=32, max_length=32, pattern="^[0-9a-f]{32}$")]


class SenderBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pid: Annotated[int, Meta(ge=1)]


class BeginBody(Body, frozen=True, kw_only=True):
    """``timeout_s``: the update is given up when nobody speaks of it for so long; or when its sender is gone."""

    version: Version
    label: Annotated[str, Meta(max_length=1000)] | None = None
    target: str = "base"
    sender: SenderBody | None = None
    timeout_s: Seconds | None = None


class LayoutBody(Body, frozen=True, kw_only=True):
    layout: BufferLayout


class StageBody(Body, frozen=True, kw_only=True):
    """One of three transports, each with fields of its own."""

    version: Version
    transport: Literal["handles", "group", "disk"]
    handle: Handle | CudaIpcHandle | None = None
    layout_id: str = ""
    layout: BufferLayout | None = None
    checksum: Checksum | None = None
    group: Name | None = None
    flattened: bool = False
    timeout_s: Seconds = 120.0
    path: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None


class PrepareBody(Body, frozen=True, kw_only=True):
    version: Version
    checksum: Checksum | None = None


class CommitBody(Body, frozen=True, kw_only=True):
    version: Version


class AbortBody(Body, frozen=True, kw_only=True):
    version: Version | None = None
    reason: Annotated[str, Meta(max_length=10_000)] = ""


@control(BeginBody)
async def weights_begin(front: Front, body: BeginBody) -> dict[str, Any]:
    sender = None
    if body.sender is not None:
        sender = Sender.find(body.sender.pid)
        if sender is None:
            text = f"sender: there is no process {body.sender.pid} on this machine; leave it out for one elsewhere"
            raise Refused("request", text, "sender")
    await front.updates.alone(
        f"begin of version {body.version}",
        lambda: front.updates.begin(
            body.version, body.label, "own", target=body.target, sender=sender, lease_s=body.timeout_s
        ),
    )
    return {"success": True, "version": body.version, "staging": front.config.staging}


@control(LayoutBody)
async def weights_layout(front: Front, body: LayoutBody) -> dict[str, Any]:
    await front.link.command(RegisterLayout(body.layout))
    return {"success": True, "layout_id": body.layout.layout_id}


@control(StageBody)
async def weights_stage(front: Front, body: StageBody) -> dict[str, Any]:
    action = _stage_action(body)
    what = f"stage by {body.transport} for version {body.version}"
    timeout_s = body.timeout_s if body.transport == "group" else 0.0
    result = await front.updates.alone(what, lambda: front.updates.stage(body.version, action, timeout_s))
    return {"success": True, **result}


def _stage_action(body: StageBody) -> StageHandle | StageGroup | StageDisk:
    if body.transport == "handles":
        if body.handle is None:
            raise Refused("request", "transport handles needs `handle`", "handle")
        _check_layout(body)
        return StageHandle(body.version, body.handle, body.layout_id, body.layout, body.checksum)
    if body.transport == "group":
        if body.group is None:
            raise Refused("request", "transport group needs `group`, the group's name", "group")
        _check_layout(body)
        return StageGroup(body.version, body.group, body.layout, body.layout_id, body.flattened, body.timeout_s)
    if body.path is None:
        raise Refused("request", "transport disk needs `path`, a folder", "path")
    return StageDisk(body.version, body.path)


def _check_layout(body: StageBody) -> None:
    if (body.layout is None) == (not body.layout_id):
        raise Refused("request", "a stage needs `layout_id`, or `layout`, and not both", "layout_id")


@control(PrepareBody)
async def weights_prepare(front: Front, body: PrepareBody) -> dict[str, Any]:
    what = f"prepare of version {body.version}"
    return {
        "success": True,
        **await front.updates.alone(what, lambda: front.updates.prepare(body.version, body.checksum)),
    }


@control(CommitBody)
async def weights_commit(front: Front, body: CommitBody) -> dict[str, Any]:
    what = f"commit of version {body.version}"
    return {"success": True, **await front.updates.alone(what, lambda: front.updates.commit(body.version))}


@control(AbortBody)
async def weights_abort(front: Front, body: AbortBody) -> dict[str, Any]:
    """Aborting what is not open is no error: it is what the sender wants."""

    async def abort() -> bool:
        update = front.updates.open
        if update is None or body.version not in (None, update.version):
            return False
        await front.updates.abort(body.reason or "its sender aborted it", is_told=True)
        return True

    was_open = await front.updates.alone("abort", abort)
    return {"success": True} if was_open else {"success": True, "message": "no such update was open"}


@control(Empty)
async def weights_status(front: Front, body: Empty) -> dict[str, Any]:
    update = front.updates.open
    return {
        "version": front.link.version,
        "label": front.versions.label(front.link.version),
        "state": front.link.state,
        "staging": front.config.staging,
        "checksum": front.updates.checksum,
        "open_update": None if update is None else update.version,
        "num_restarts": front.link.num_restarts,
        "pid": front.link.info.pid,
    }
