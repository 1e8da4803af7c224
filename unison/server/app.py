"""The front end as an ASGI application: a table of routes, each behind its level, and typed answers to all errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from unison.config.serving import ServeConfig
from unison.server.access import check_access
from unison.server.errors import HttpError, error_response
from unison.server.front import Front, Route
from unison.server.generate import CLIENT_GONE
from unison.server.http_protocol import bounded_protocol

LOG = logging.getLogger("unison.server")
KEEP_ALIVE_S: Final = 65
"""Longer than clients keep idle connections, so that none is closed just as it is used again."""
SHUTDOWN_S: Final = 5
"""How long connections have to take their last answers once the server closes."""
Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(front: Front, routes: Sequence[Route]) -> FastAPI:
    """Nothing is served but these routes: no documentation pages, no redirects."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    app.state.front = front
    app.state.routes = tuple(routes)
    app.router.routes.extend(
        StarletteRoute(route.path, _endpoint(front, route), methods=list(route.methods)) for route in routes
    )
    app.add_exception_handler(HTTPException, _http_exception)
    return app


def _endpoint(front: Front, route: Route) -> Endpoint:
    async def call(request: Request) -> Response:
        try:
            check_access(front.config, route.level, request)
            return await route.handler(front, request)
        except HttpError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception:
            error_id = secrets.token_hex(8)
            LOG.exception("%s %s failed (%s)", request.method, route.path, error_id)
            return error_response(
                HttpError(500, "internal", f"the server made a mistake; its log tells more under {error_id}"), error_id
            )

    return call


async def _http_exception(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    kinds = {404: ("not_found", "there is no such route"), 405: ("method_not_allowed", "this route has other methods")}
    kind, text = kinds.get(status, ("invalid_request", "the request cannot be served"))
    response = error_response(HttpError(status, kind, f"{request.method} {request.url.path[:200]}: {text}"))
    for name, value in (getattr(error, "headers", None) or {}).items():
        response.headers[name] = value
    return response


class _Server(uvicorn.Server):
    """uvicorn's, which leaves signals to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_app(
    front: Front, routes: Sequence[Route], sock: socket.socket, *, stop: asyncio.Event | None = None
) -> None:
    """Serve on a socket that is bound until ``stop`` is set, then end in order.

    In order: new requests are answered 503 while those under way have ``drain_s`` to finish; what has not finished by
    then is aborted and answers with what it has; then the connections are closed.
    """
    stop = asyncio.Event() if stop is None else stop
    server = _Server(server_config(create_app(front, routes), front.config))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await _drain(front, server)
    finally:
        stopping.cancel()
        server.should_exit = True
        await serving


def server_config(app: FastAPI, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=bounded_protocol(config.limits),
        ws="none",
        loop="uvloop",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=min(config.limits.connections, 2048),
        timeout_graceful_shutdown=SHUTDOWN_S,
    )


async def _drain(front: Front, server: uvicorn.Server) -> None:
    front.is_draining = True
    deadline = asyncio.get_running_loop().time() + front.config.drain_s
    while server.server_state.tasks and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)
    if server.server_state.tasks:
        front.link.abort()
