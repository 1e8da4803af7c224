"""Every answer that is no success: a status, and a body that says what kind of error it is and of which field.

``{"error": {"message": str, "type": str, "param": str | null}}``; nothing else ever answers an error of sampling.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec
from starlette.responses import Response

from unison.core.errors import UnisonError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

RETRY_S: Final = 1
"""What Retry-After says where a server will soon be able to serve again."""
MAX_SHOWN_CHARS: Final = 80
JSON: Final = "application/json"
LINGER_S: Final = 1.0
"""How long a refused client may go on sending, so that it reads the refusal and not a reset connection."""
_CLOSING: Final = (408, 413)


class HttpError(UnisonError):
    """An error as its client sees it. ``kind`` is the body's ``type``, ``param`` the field to change."""

    def __init__(
        self, status: int, kind: str, message: str, *, param: str | None = None, retry_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_s = retry_s

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param}}

    @property
    def headers(self) -> dict[str, str]:
        named = {} if self.retry_s is None else {"retry-after": str(self.retry_s)}
        return {**named, "www-authenticate": "Bearer"} if self.status == 401 else named


class BadField(HttpError):
    """A field whose value cannot be served: 400, and the field's name."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(400, "invalid_request", message, param=param)


def unavailable(message: str, kind: str = "unavailable") -> HttpError:
    """503: nothing is wrong with the request, and a later one may be served."""
    return HttpError(503, kind, message, retry_s=RETRY_S)


def error_response(error: HttpError, request_id: str | None = None) -> Response:
    headers = {**error.headers, **id_header(request_id)}
    if error.status in _CLOSING:
        return _Refusal(msgspec.json.encode(error.body), error.status, {**headers, "connection": "close"}, JSON)
    return json_response(error.body, error.status, headers)


class _Refusal(Response):
    """An answer to a request whose body is not read to its end. It is sent at once and whole; then what the client
    still sends is thrown away for a moment, for a connection closed before would be reset, and the answer lost."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (message := await receive())["type"] != "http.disconnect" and message.get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in which every finite float reads back to the bit; infinite ones become null."""
    return Response(msgspec.json.encode(body), status, headers, media_type=JSON)


def id_header(request_id: str | None) -> dict[str, str]:
    """``X-Request-Id``, percent-encoded where an id holds what no header can."""
    return {} if request_id is None else {"x-request-id": quote(request_id, safe=" !#$&'()*+,/:;<=>?@[]^`{|}~")}


def shown(value: object) -> str:
    """A value as a message may repeat it: short, whatever a client sent."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, dict)) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)} items"
    text = repr(value if not isinstance(value, str) else value[:MAX_SHOWN_CHARS])
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
