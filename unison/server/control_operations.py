"""Routes of SGLang for operations: the few that mean something here, and an honest refusal of the others."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from unison.server.control_body import Empty, Handler, control, failure

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from unison.server.front import Front

UNSUPPORTED: Final[Mapping[str, str]] = {
    "/update_weights_from_ipc": "send tensors by /weights/stage with shared memory, a process group, or a folder",
    "/set_internal_state": "settings are those that the server was started with",
    "/slow_down": "the engine is never made slower on purpose",
    "/configure_logging": "what the server logs is decided at its start",
    "/open_session": "send the whole prompt with each request: the prefix cache keeps what is shared",
    "/close_session": "there are no sessions to close",
    "/load_lora_adapter": "adapters are not served; merge them into the weights and update those",
    "/load_lora_adapter_from_tensors": "adapters are not served; merge them into the weights and update those",
    "/unload_lora_adapter": "adapters are not served",
}
"""Path -> what to do instead."""


@control(Empty)
async def freeze_gc(front: Front, body: Empty) -> dict[str, Any]:
    """Take the front end's present objects out of garbage collection; the engine process has its own."""

    def freeze() -> int:
        gc.collect()
        gc.freeze()
        return gc.get_freeze_count()

    num_frozen = await asyncio.to_thread(freeze)
    return {"success": True, "message": f"{num_frozen} objects of the front end are frozen", "num_frozen": num_frozen}


def unsupported(path: str) -> Handler:
    """A handler that says so."""

    async def handler(front: Front, request: Request) -> Response:
        return failure("unsupported", f"{path} is not supported: {UNSUPPORTED[path]}")

    return handler
