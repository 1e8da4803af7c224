"""Pause, abort, cache and memory: what a trainer tells the engine between two rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta
from starlette.responses import PlainTextResponse, Response

from unison.engine.lifecycle import MEMORY_TAGS, MemoryTag, PauseMode
from unison.server.control_body import STATUS, Body, Refused, control
from unison.server.control_updates import commit_buckets
from unison.server.control_weights import Seconds
from unison.server.link import CommandFailed
from unison.server.live import LiveRequest
from unison.server.messages import Continue, FlushCache, Pause, ReleaseMemory, ResumeMemory

if TYPE_CHECKING:
    from unison.server.front import Front

_POLL_S: Final = 0.05
_WAIT_S: Final = 60.0


class PauseBody(Body, frozen=True, kw_only=True):
    """abort: running requests are answered with what they have. retract: they go back to the queue and are computed
    anew. in_place: they keep their keys and values, and go on with them."""

    mode: PauseMode = "abort"


class ContinueBody(Body, frozen=True, kw_only=True):
    INERT: ClassVar[frozenset[str]] = frozenset(("torch_empty_cache",))


class FlushBody(Body, frozen=True, kw_only=True):
    """``timeout_s``: how long to wait for requests that hold keys and values."""

    timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class AbortBody(Body, frozen=True, kw_only=True):
    """``rid`` is matched whole, or as the beginning of ids (``prefix``). ``wait``: answer when they have ended."""

    rid: Annotated[str, Meta(max_length=1000)] = ""
    abort_all: bool = False
    prefix: bool = False
    wait: bool = False
    timeout_s: Seconds = _WAIT_S


class MemoryBody(Body, frozen=True, kw_only=True):
    """None is all of them. There is no cuda_graph here, so nothing is to be done for it."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


@control(PauseBody)
async def pause_generation(front: Front, body: PauseBody) -> dict[str, Any]:
    result = await front.link.command(Pause(body.mode))
    return {"success": True, "status": "ok", "message": f"generation is paused ({body.mode})", **result}


@control(ContinueBody)
async def continue_generation(front: Front, body: ContinueBody) -> dict[str, Any]:
    """Buckets that wait for their commit are committed before anything is sampled."""
    committed = await _commit_waiting(front, "continue_generation")
    result = await front.link.command(Continue())
    return {"success": True, "status": "ok", "message": "generation goes on", **committed, **result}


async def _commit_waiting(front: Front, what: str) -> dict[str, Any]:
    update = await front.updates.alone(what, lambda: commit_buckets(front))
    return {} if update is None else {"weight_version": update["label"]}


@control(FlushBody)
async def flush_cache(front: Front, body: FlushBody) -> Response:
    """Text, as SGLang's clients expect; 400 while requests hold keys and values, so that they ask again."""
    try:
        await _commit_waiting(front, "flush_cache")
        await _flush(front, body.timeout_s)
    except CommandFailed as error:
        status = 400 if error.kind == "state" else STATUS.get(error.kind, 500)
        return PlainTextResponse(f"The cache was not flushed: {error}\n", status)
    return PlainTextResponse("Cache flushed.\n")


async def _flush(front: Front, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while True:
        try:
            await front.link.command(FlushCache())
            return
        except CommandFailed as error:
            if error.kind != "state" or time.monotonic() + _POLL_S > end:
                raise
        await asyncio.sleep(_POLL_S)


@control(AbortBody)
async def abort_request(front: Front, body: AbortBody) -> dict[str, Any]:
    """An id that is not under way is no error: its answer may have just been sent."""
    if not body.rid and not body.abort_all:
        raise Refused("request", "name a request by `rid`, or send `abort_all`: true", "rid")
    rid = None if body.abort_all else body.rid
    entries = front.live.find(rid, is_prefix=body.prefix)
    if rid is None:
        num_aborted = front.link.abort()
    else:
        # An id of the engine's own names one sample of many.
        names = {name for entry in entries for name in entry.engine_ids} or {rid}
        num_aborted = sum(front.link.abort(name) for name in names)
    if body.wait:
        await _wait_for(front, entries, body.timeout_s)
    return {"success": True, "num_aborted": num_aborted}


async def _wait_for(front: Front, entries: Sequence[LiveRequest], timeout_s: float) -> None:
    try:
        await asyncio.wait_for(front.live.wait_for(entries), timeout_s)
    except TimeoutError as error:
        num_left = sum(not entry.ended.is_set() for entry in entries)
        text = f"{num_left} aborted requests have not ended within {timeout_s:g} s"
        raise CommandFailed("unavailable", text) from error


@control(MemoryBody)
async def release_memory_occupation(front: Front, body: MemoryBody) -> dict[str, Any]:
    return await _memory(front, body, ReleaseMemory)


@control(MemoryBody)
async def resume_memory_occupation(front: Front, body: MemoryBody) -> dict[str, Any]:
    return await _memory(front, body, ResumeMemory)


async def _memory(front: Front, body: MemoryBody, action: type[ReleaseMemory] | type[ResumeMemory]) -> dict[str, Any]:
    wanted = MEMORY_TAGS if body.tags is None else body.tags
    tags: tuple[MemoryTag, ...] = tuple(tag for tag in MEMORY_TAGS if tag in wanted)
    result = await front.link.command(action(tags)) if tags else {}
    nothing_to_do = {"nothing_to_do": ["cuda_graph"]} if body.tags and "cuda_graph" in body.tags else {}
    return {"success": True, **result, **nothing_to_do}
