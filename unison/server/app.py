"""The front end as an ASGI application: a table of routes, each behind its level, and typed answers to all errors."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from unison.server.access import check_access
from unison.server.errors import HttpError, error_response
from unison.server.front import Front, Route
from unison.server.generate import CLIENT_GONE

LOG = logging.getLogger("unison.server")
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
