"""SGLang's serialised tensors, and deltas on disk: routes whose content is read before the engine hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from unison.core.errors import WeightUpdateError
from unison.server.control_body import Body, Refused, control
from unison.server.control_updates import UpdateBody, take_bucket
from unison.server.link import CommandFailed
from unison.server.messages import Action, StageHandle
from unison.weights.foreign_tensors import Foreign, as_buffers, decode_tensors, release
from unison.weights.pull import apply_delta_to_folder

if TYPE_CHECKING:
    from unison.server.front import Front

_WHY: Final = (
    "serialised tensors are a Python pickle, which can run any code of its sender: refused. Send weights by "
    "/weights/stage (shared memory described in plain data), update_weights_from_distributed, or "
    "update_weights_from_disk; or start the server with --allow-pickled-tensors, which reads them by a fixed list of "
    "classes and runs nothing"
)


class TensorBody(UpdateBody, frozen=True, kw_only=True):
    """``serialized_named_tensors``: base64, one text for each tensor-parallel rank, of which there is one."""

    serialized_named_tensors: list[str]
    load_format: str | None = None


class PullBody(Body, frozen=True, kw_only=True):
    """``target_version``: the number in the name of a version's folder."""

    local_checkpoint_dir: Annotated[str, Meta(min_length=1, max_length=4096)]
    source_dir: Annotated[str, Meta(min_length=1, max_length=4096)]
    target_version: Annotated[int, Meta(ge=0, le=2**62)] | Annotated[str, Meta(pattern="^[0-9]{1,18}$")]


@control(TensorBody)
async def update_weights_from_tensor(front: Front, body: TensorBody) -> dict[str, Any]:
    """Tensors in shared memory of this machine; the sender's memory is given back when they are copied, or refused."""
    if not front.config.allow_pickled_tensors:
        raise Refused("unsupported", _WHY, "serialized_named_tensors")
    texts = body.serialized_named_tensors
    if len(texts) != 1:
        text = f"serialized_named_tensors holds {len(texts)} texts; there is one rank here, so send one"
        raise Refused("request", text, "serialized_named_tensors")
    tensors = await _decoded(texts[0], body.load_format)
    try:
        buffers = _or_failed(tensors)

        def actions(version: int) -> Sequence[Action]:
            return [StageHandle(version, handle, layout=layout) for handle, layout in buffers]

        return await take_bucket(front, body, actions)
    finally:
        await asyncio.to_thread(release, tensors)


async def _decoded(text: str, load_format: str | None) -> list[Foreign]:
    """Off the event loop: many thousand tensors take their time."""
    try:
        return await asyncio.to_thread(decode_tensors, text, load_format)
    except WeightUpdateError as error:
        raise CommandFailed("update", str(error)) from error


def _or_failed(tensors: Sequence[Foreign]) -> list[tuple[Any, Any]]:
    try:
        return list(as_buffers(tensors))
    except WeightUpdateError as error:
        raise CommandFailed("update", str(error)) from error


@control(PullBody)
async def pull_weights(front: Front, body: PullBody) -> dict[str, Any]:
    """Bring a folder of this machine to a version; update_weights_from_disk then loads it."""
    for name in ("local_checkpoint_dir", "source_dir"):
        if "\0" in getattr(body, name):
            raise Refused("request", f"{name} is no name of a folder: it holds a null byte", name)
    folder, source = Path(body.local_checkpoint_dir), Path(body.source_dir)
    try:
        written = await asyncio.to_thread(apply_delta_to_folder, folder, source, int(body.target_version))
    except WeightUpdateError as error:
        raise CommandFailed("update", str(error)) from error
    return {
        "success": True,
        "message": f"{written.path} holds version {written.version}",
        "version": written.version,
        "checksum": written.checksum,
        "num_tensors": written.num_tensors,
        "num_bytes": written.num_bytes,
    }
