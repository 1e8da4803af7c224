"""Who may call which route.

open    everybody: probes that tell nothing
user    whoever shows the API key, where there is one; the admin key too
admin   whoever shows the admin key. Where there is none, control is closed, except on a server that listens on loopback
        and has no API key either, and there only to requests that no web page can have made
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import TYPE_CHECKING

from unison.config.serving import ServeConfig
from unison.server.errors import HttpError
from unison.server.front import Level

if TYPE_CHECKING:
    from starlette.requests import Request


def check_access(config: ServeConfig, level: Level, request: Request) -> None:
    """Raises HttpError: 401 without the right token, 403 where no token would do or this one may not."""
    if level == "open":
        return
    token = _token(request)
    if _is_key(token, config.admin_key):
        return
    if level == "user":
        if config.api_key is not None and not _is_key(token, config.api_key):
            raise _unauthorized("an API key")
        return
    _check_control(config, token, request)


def is_loopback(host: str) -> bool:
    """Whether a name or address can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_control(config: ServeConfig, token: bytes | None, request: Request) -> None:
    if config.admin_key is not None:
        if _is_key(token, config.api_key):
            raise _forbidden("the API key lets nobody control the server; show the admin key")
        raise _unauthorized("the admin key")
    if not is_loopback(config.host):
        raise _forbidden(
            f"control is closed: the server listens on {config.host} and has no admin key (--admin-key-env)"
        )
    if config.api_key is not None:
        raise _forbidden("control is closed: the server has an API key and no admin key (--admin-key-env)")
    _check_not_from_a_page(request)


def _check_not_from_a_page(request: Request) -> None:
    """A browser on this machine reaches loopback too, on behalf of whatever page it shows."""
    hosts = request.headers.getlist("host")
    if len(hosts) != 1 or not is_loopback(_host_name(hosts[0])):
        raise _forbidden("control without an admin key is for requests to localhost; the Host header names another")
    origins = request.headers.getlist("origin")
    if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins):
        raise _forbidden("control without an admin key is closed to pages of other origins")
    sites = request.headers.getlist("sec-fetch-site")
    if any(site.strip().lower() not in ("none", "same-origin") for site in sites):
        raise _forbidden("control without an admin key is closed to pages of other sites")


def _host_name(host: str) -> str:
    """The name in a Host header, without its port and without the brackets of an IPv6 address."""
    if host.startswith("["):
        name, closed, port = host[1:].partition("]")
        return name if closed and (not port or _is_port(port)) else ""
    name, colon, port = host.partition(":")
    return name if not colon or _is_port(f":{port}") else ""


def _is_port(text: str) -> bool:
    return text[0] == ":" and text[1:].isascii() and text[1:].isdigit()


def _token(request: Request) -> bytes | None:
    """What stands behind Bearer in the Authorization header; None where there is no such one, or several."""
    values = [value for name, value in request.scope["headers"] if name.lower() == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = bytes(values[0]).strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" and token.strip() else None


def _is_key(token: bytes | None, key: str | None) -> bool:
    # In constant time, so that its duration tells nothing of the key.
    return token is not None and bool(key) and hmac.compare_digest(token, (key or "").encode())


def _unauthorized(what: str) -> HttpError:
    return HttpError(401, "unauthorized", f"this route needs {what}; send it as Authorization: Bearer <key>")


def _forbidden(message: str) -> HttpError:
    return HttpError(403, "forbidden", message)
