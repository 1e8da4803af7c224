"""Probes: whether the server lives, whether it takes requests, whether its engine really works.

/live              the event loop answers, and the engine process has said something lately
/ready             a request sent now would be taken
/health(_generate) the scheduler proves within ``health_s`` that it works; probes at one time share one proof
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from unison.server.errors import unavailable
from unison.server.front import Front, Route
from unison.server.link import CommandFailed
from unison.server.submission import check_available, check_up

if TYPE_CHECKING:
    from starlette.requests import Request


async def live(front: Front, request: Request) -> Response:
    silence_s = front.link.silence_s
    if front.link.state == "dead":
        raise unavailable("the engine has died and cannot be restarted", "dead")
    if front.link.state not in ("starting", "restarting") and silence_s > front.config.hang_s:
        raise unavailable(f"the engine process has said nothing for {silence_s:.1f} s", "silent")
    return Response()


async def ready(front: Front, request: Request) -> Response:
    check_available(front)
    return Response()


async def health(front: Front, request: Request) -> Response:
    check_up(front)
    if front.probe is None or front.probe.done():
        front.probe = asyncio.create_task(front.link.check_alive(front.config.health_s))
        front.probe.add_done_callback(_seen)
    try:
        # Shielded: one prober that leaves takes no proof from the others. With a deadline of its own: a link that
        # does not keep to its own must not keep probers waiting.
        await asyncio.wait_for(asyncio.shield(front.probe), front.config.health_s + 1)
    except CommandFailed as failed:
        raise unavailable(f"the scheduler gives no sign of life: {failed}", "unhealthy") from None
    except TimeoutError:
        raise unavailable("the scheduler gives no sign of life", "unhealthy") from None
    return Response()


def _seen(probe: asyncio.Task[None]) -> None:
    """Whoever started it may have left before it failed."""
    if not probe.cancelled():
        probe.exception()


ROUTES: Final = (
    Route("/health", ("GET",), "open", health),
    Route("/health_generate", ("GET",), "open", health),
    Route("/live", ("GET",), "open", live),
    Route("/ready", ("GET",), "open", ready),
)
