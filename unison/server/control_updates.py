"""SGLang's routes for weights, as thin adapters of one transaction.

A lone bucket of tensors begins an update to the version after the present one, if none is open. It is committed by the
first call that carries weight_version or flush_cache true (its default), by end_weight_update, update_weight_version,
flush_cache or continue_generation. Between begin_weight_update and end_weight_update, end alone commits.
Two departures: an update that lacks tensors is refused, and update_weight_version aborts nobody unless told to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar

from msgspec import Meta

from unison.server.control_body import Body, Refused, control
from unison.server.control_weights import Name, Seconds
from unison.server.link import CommandFailed
from unison.server.messages import Action, JoinGroup, LeaveGroup, StageDisk, StageGroup
from unison.weights.manifest import DTYPES, BufferLayout, TensorEntry, pack_layout

if TYPE_CHECKING:
    from unison.server.front import Front

DEFAULT_GROUP: Final = "weight_update_group"
_JOIN_S: Final = 120.0
_FULL_FORMATS: Final = (None, "auto", "safetensors")
T = TypeVar("T")
Selector = Literal["target", "all", "draft"] | None


class InitGroupBody(Body, frozen=True, kw_only=True):
    """``timeout_s``: how long the engine waits for the others to join."""

    master_address: Name
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=0, le=1 << 20)]
    world_size: Annotated[int, Meta(ge=2, le=1 << 20)]
    group_name: Name = DEFAULT_GROUP
    backend: str = "nccl"
    timeout_s: Seconds = _JOIN_S


class GroupBody(Body, frozen=True, kw_only=True):
    group_name: Name = DEFAULT_GROUP


class UpdateBody(Body, frozen=True, kw_only=True):
    """What all updates have in common."""

    INERT: ClassVar[frozenset[str]] = frozenset(
        ("torch_empty_cache", "disable_draft_model", "keep_pause", "recapture_cuda_graph", "token_step")
    )
    flush_cache: bool = True
    """Whether this bucket is the last one. Keys and values of old weights are never matched, flushed or not."""
    abort_all_requests: bool = False
    weight_version: Annotated[str, Meta(max_length=1000)] | None = None
    selector: Selector = None


class DistributedBody(UpdateBody, frozen=True, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Meta(ge=0)]]]
    group_name: Name = DEFAULT_GROUP
    load_format: Literal["flattened_bucket"] | None = None
    timeout_s: Seconds = 120.0


class DiskBody(UpdateBody, frozen=True, kw_only=True):
    model_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_format: str | None = None
    is_async: bool = False
    manifest: dict[str, Any] | None = None


class BeginBracketBody(Body, frozen=True, kw_only=True):
    selector: Selector = None


class EndBracketBody(Body, frozen=True, kw_only=True):
    weight_version: Annotated[str, Meta(max_length=1000)] | None = None


class PostProcessBody(Body, frozen=True, kw_only=True):
    restore_weights_before_load: bool = False
    post_process_quantization: bool = False


class VersionBody(Body, frozen=True, kw_only=True):
    """``abort_all_requests`` is false by default: a new name for the same weights concerns no running request."""

    new_version: Annotated[str, Meta(max_length=1000)]
    abort_all_requests: bool = False


@control(InitGroupBody)
async def init_weights_update_group(front: Front, body: InitGroupBody) -> dict[str, Any]:
    _check_backend(body.backend)
    if body.rank_offset >= body.world_size:
        text = f"rank_offset {body.rank_offset} is no rank of a world of {body.world_size}"
        raise Refused("request", text, "rank_offset")
    action = JoinGroup(
        body.group_name,
        body.master_address,
        body.master_port,
        body.rank_offset,
        body.world_size,
        body.backend,
        body.timeout_s,
    )
    update = front.updates.open
    if update is not None and update.origin == "bucket":
        await front.updates.alone(
            "init_weights_update_group", lambda: front.updates.abort("a group was opened: whoever staged it began anew")
        )
    result = await front.link.command(action, body.timeout_s + 10.0)
    return {"success": True, "message": f"joined {body.group_name!r} as rank {body.rank_offset}", **result}


def _check_backend(backend: str) -> None:
    if backend == "gloo":
        return
    if backend != "nccl":
        raise Refused(
            "request", f"backend {backend!r} is not supported; use gloo, or nccl where there is CUDA", "backend"
        )
    import torch

    if not torch.cuda.is_available():
        raise Refused(
            "request", 'backend "nccl" needs CUDA, and this server has none; send "backend": "gloo"', "backend"
        )


@control(GroupBody)
async def destroy_weights_update_group(front: Front, body: GroupBody) -> dict[str, Any]:
    try:
        result = await front.link.command(LeaveGroup(body.group_name))
    except CommandFailed as error:
        kind = "update" if error.kind == "state" else error.kind
        raise CommandFailed(kind, str(error)) from error
    return {"success": True, "message": f"left {body.group_name!r}", **result}


@control(DistributedBody)
async def update_weights_from_distributed(front: Front, body: DistributedBody) -> dict[str, Any]:
    layout = bucket_layout(body)
    flattened = body.load_format is not None

    def action(version: int) -> Sequence[Action]:
        return [StageGroup(version, body.group_name, layout, "", flattened, body.timeout_s)]

    return await take_bucket(front, body, action, body.timeout_s)


def bucket_layout(body: DistributedBody) -> BufferLayout:
    """Tensors in list order: packed without gaps in a flattened bucket, as SGLang's trainers send it."""
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        counts = f"{len(body.names)} names, {len(body.dtypes)} dtypes and {len(body.shapes)} shapes"
        raise Refused("request", f"{counts} do not belong together; there must be one of each for a tensor", "names")
    if not body.names:
        raise Refused("request", "names: a bucket without tensors holds nothing", "names")
    if len(set(body.names)) < len(body.names):
        twice = next(name for i, name in enumerate(body.names) if name in body.names[:i])
        raise Refused("request", f"names: {twice!r} is there twice", "names")
    dtypes = [dtype.removeprefix("torch.") for dtype in body.dtypes]
    unknown = next((dtype for dtype in dtypes if dtype not in DTYPES), None)
    if unknown is not None:
        raise Refused("request", f"dtypes: {unknown!r} is not one of {', '.join(DTYPES)}", "dtypes")
    shapes = [tuple(shape) for shape in body.shapes]
    if body.load_format is None:
        return pack_layout(zip(body.names, dtypes, shapes, strict=True))
    entries = []
    end = 0
    for name, dtype, shape in zip(body.names, dtypes, shapes, strict=True):
        entries.append(TensorEntry(name, dtype, shape, end))
        end += math.prod(shape) * DTYPES[dtype].itemsize
    return BufferLayout(tuple(entries), end)


@control(DiskBody)
async def update_weights_from_disk(front: Front, body: DiskBody) -> dict[str, Any]:
    """A whole folder is a whole update: it is committed at once, unless a bracket is open."""
    if body.load_format not in _FULL_FORMATS:
        text = f"load_format {body.load_format!r} is not supported; leave it out: folders of safetensors are read"
        raise Refused("unsupported", text, "load_format")
    if body.is_async:
        raise Refused("unsupported", "is_async is not supported: the answer says how the update ended", "is_async")
    if body.manifest is not None:
        raise Refused("unsupported", "manifest is not supported; the folder is read whole", "manifest")
    num_paused = _num_paused(front)
    answer = await take_bucket(front, body, lambda version: [StageDisk(version, body.model_path)], is_whole=True)
    return {**answer, "num_paused_requests": num_paused}


def _num_paused(front: Front) -> int:
    beat = front.link.beat
    return beat.num_running + beat.num_waiting if beat.pause_mode is not None else 0


@control(BeginBracketBody)
async def begin_weight_update(front: Front, body: BeginBracketBody) -> dict[str, Any]:
    _check_selector(body.selector)
    return await _begin_bracket(front)


@control(EndBracketBody)
async def end_weight_update(front: Front, body: EndBracketBody) -> dict[str, Any]:
    return await front.updates.alone("end_weight_update", lambda: _end_update(front, body.weight_version))


@control(PostProcessBody)
async def post_process_weights(front: Front, body: PostProcessBody) -> dict[str, Any]:
    """An older form of begin (restore_weights_before_load) and end (post_process_quantization)."""
    if body.restore_weights_before_load and body.post_process_quantization:
        text = "restore_weights_before_load begins an update, post_process_quantization ends it: send one of them"
        raise Refused("request", text, "post_process_quantization")
    if body.restore_weights_before_load:
        return await _begin_bracket(front)
    if body.post_process_quantization:
        return await front.updates.alone("post_process_weights", lambda: _end_update(front, None))
    return {"success": True, "message": "nothing was asked for"}


async def _begin_bracket(front: Front) -> dict[str, Any]:
    update = await front.updates.alone(
        "begin_weight_update", lambda: front.updates.begin(front.link.version + 1, None, "bracket")
    )
    return {"success": True, "message": f"update to version {update.version} begun", "version": update.version}


async def _end_update(front: Front, label: str | None) -> dict[str, Any]:
    updates = front.updates
    lapse = updates.take_lapse("bracket", "bucket")
    if lapse is not None:
        raise CommandFailed("update", lapse)
    update = updates.current()
    if update.origin == "own":
        raise CommandFailed(
            "state", f"the update to version {update.version} is ended by /weights/commit or /weights/abort"
        )
    if label is not None:
        update.label = label
    if not update.num_staged:
        await updates.abort("it ended without a tensor", is_told=True)
        updates.take_lapse("bracket")
        return {"success": True, "message": "nothing was sent, so nothing has changed"}
    return await _commit_open(front)


@control(VersionBody)
async def update_weight_version(front: Front, body: VersionBody) -> dict[str, Any]:
    if body.abort_all_requests:
        front.link.abort()

    async def name() -> str:
        update = front.updates.open
        if update is not None and update.origin == "bracket":
            update.label = body.new_version
            return f"version {update.version} will be called so when it is committed"
        if await commit_buckets(front, body.new_version):
            return "committed under this version"
        await front.updates.relabel(body.new_version)
        return "the present weights are called so from the next token on"

    message = await front.updates.alone("update_weight_version", name)
    return {"success": True, "message": message, "new_version": body.new_version}


async def take_bucket(
    front: Front,
    body: UpdateBody,
    actions: Callable[[int], Sequence[Action]],
    timeout_s: float = 0.0,
    *,
    is_whole: bool = False,
) -> dict[str, Any]:
    """Stage one bucket in the update that is open, or in a new one; commit it if the body says so.

    ``actions`` makes the messages for a version. Raises CommandFailed; the update is then given up.
    """
    _check_selector(body.selector)
    if body.abort_all_requests:
        front.link.abort()
    return await front.updates.alone(
        "a bucket of weights", lambda: _take_bucket(front, body, actions, timeout_s, is_whole)
    )


async def _take_bucket(
    front: Front,
    body: UpdateBody,
    actions: Callable[[int], Sequence[Action]],
    timeout_s: float,
    is_whole: bool,
) -> dict[str, Any]:
    updates = front.updates
    if updates.failed_bracket is not None:
        raise CommandFailed("update", f"{updates.failed_bracket}; end it, then begin anew")
    update = updates.open
    if update is not None and update.origin == "own":
        raise CommandFailed("state", f"an update to version {update.version} by /weights/begin is open")
    if is_whole and update is not None and update.origin == "bucket":
        # Its tensors may be those of a trainer that is gone: they must not become part of another's.
        silent_s = time.monotonic() - update.spoken
        raise CommandFailed(
            "state",
            f"buckets of an update to version {update.version} are staged, and nobody spoke of it for {silent_s:.0f} "
            "s; end it, or give it up with /weights/abort",
        )
    if update is None:
        update = await updates.begin(front.link.version + 1, None, "bucket")
    if body.weight_version is not None:
        update.label = body.weight_version
    await _or_give_up(front, lambda: _stage_all(front, actions(update.version), timeout_s))
    is_last = is_whole or body.flush_cache or body.weight_version is not None
    if update.origin == "bucket" and is_last:
        return await _commit_open(front)
    return {"success": True, "message": f"staged for version {update.version}, not yet committed", "committed": False}


async def _stage_all(front: Front, actions: Sequence[Action], timeout_s: float) -> None:
    for action in actions:
        await front.updates.stage(None, action, timeout_s)


async def commit_buckets(front: Front, label: str | None = None) -> dict[str, Any] | None:
    """Commit what lone buckets have come to; None where there are none. To be called within ``Updates.alone``.

    Raises CommandFailed where they are incomplete, or were given up since their sender last heard of them.
    """
    lapse = front.updates.take_lapse("bucket")
    if lapse is not None:
        raise CommandFailed("update", lapse)
    update = front.updates.open
    if update is None or update.origin != "bucket":
        return None
    if label is not None:
        update.label = label
    return await _commit_open(front)


async def _commit_open(front: Front) -> dict[str, Any]:
    update = front.updates.current()

    async def prepare_and_commit() -> dict[str, Any]:
        await front.updates.prepare(None)
        return await front.updates.commit(None)

    try:
        result = await _or_give_up(front, prepare_and_commit)
    except CommandFailed as error:
        hint = _incomplete_hint(update.note) if update.origin == "bucket" else ""
        raise CommandFailed(error.kind, f"{error}{hint}") from error
    if update.origin == "bracket":
        front.updates.take_lapse("bracket")
    return {"success": True, "message": f"version {result['label']} is committed", "committed": True, **result}


def _incomplete_hint(note: str) -> str:
    hint = " (buckets of one update before its last: flush_cache false, no weight_version)"
    return f"{hint}; before it {note}" if note else hint


async def _or_give_up(front: Front, work: Callable[[], Awaitable[T]]) -> T:
    """Run a part of an update, and give the whole of it up where that fails, for whatever reason."""
    try:
        return await work()
    except CommandFailed as error:
        await front.updates.abort(str(error), is_told=True)
        kind = "update" if error.kind in ("request", "state") else error.kind
        raise CommandFailed(kind, str(error)) from error


def _check_selector(selector: Selector) -> None:
    if selector == "draft":
        raise Refused("unsupported", "selector draft is not supported: there is no draft model", "selector")
