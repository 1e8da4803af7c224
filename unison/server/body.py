"""A request's body, read within bounds, and the client's presence."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from unison.config.serving import LimitsConfig
from unison.server.errors import HttpError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive


async def read_body(request: Request, limits: LimitsConfig) -> bytes:
    """The whole body. Raises HttpError: 413 where it is too long, 408 where it does not come in time.

    Counted as it comes, so neither a missing Content-Length nor a wrong one helps; ClientDisconnect where it stops.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise _too_long(limits)
    pieces: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(limits.read_s):
            async for piece in request.stream():
                length += len(piece)
                if length > limits.body_bytes:
                    raise _too_long(limits)
                pieces.append(piece)
    except TimeoutError:
        raise HttpError(408, "timeout", f"the body did not come within {limits.read_s:g} s") from None
    return b"".join(pieces)


def _too_long(limits: LimitsConfig) -> HttpError:
    return HttpError(413, "too_large", f"the body is longer than {limits.body_bytes} bytes; send less at once")


async def wait_until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
