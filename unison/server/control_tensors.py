"""SGLang's serialised tensors and deltas on disk: routes whose content is read before the engine hears of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from unison.server.control_body import Body, Refused, control
from unison.server.control_updates import UpdateBody

if TYPE_CHECKING:
    from unison.server.front import Front

_WHY: Final = (
    "serialised tensors are a Python pickle, which can run any code of its sender: refused. Send weights by "
    "/weights/stage (shared memory described in plain data), update_weights_from_distributed, or "
    "update_weights_from_disk; or start the server with allow_pickled_tensors, which reads tensors by a fixed list of "
    "classes and runs nothing"
)


class TensorBody(UpdateBody, frozen=True, kw_only=True):
    """``serialized_named_tensors``: base64, one text for each tensor-parallel rank, of which there is one."""

    serialized_named_tensors: list[str]
    load_format: str | None = None


class PullBody(Body, frozen=True, kw_only=True):
    local_checkpoint_dir: Annotated[str, Meta(min_length=1, max_length=4096)]
    source_dir: Annotated[str, Meta(min_length=1, max_length=4096)]
    target_version: int | str | None = None


@control(TensorBody)
async def update_weights_from_tensor(front: Front, body: TensorBody) -> dict[str, Any]:
    raise Refused("unsupported", _WHY, "serialized_named_tensors")


@control(PullBody)
async def pull_weights(front: Front, body: PullBody) -> dict[str, Any]:
    raise Refused("unsupported", "pull_weights is not supported; use update_weights_from_disk", None)
