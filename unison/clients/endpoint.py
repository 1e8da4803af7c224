"""One server's address: requests to it, with deadlines and typed errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final

import httpx
import msgspec

from unison.core.errors import RequestError, ServerError

_KEEP_ALIVE_S: Final = 4.0
"""Below what servers grant an idle connection: one that they are about to close is not used again."""
_CONNECT_S: Final = 10.0
_MAX_WORDS: Final = 2000


class LostError(ServerError):
    """The server could not be reached, went away, or said nothing until the deadline: nothing is known."""


class BusyError(ServerError):
    """The server cannot take the request now (503); later it may."""


class RefusedError(ServerError):
    """The server answered with an error of its own. ``status`` is that of HTTP, ``kind`` the body's word for it."""

    def __init__(self, message: str, status: int, kind: str = "", content: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.content = content


class Endpoint:
    """HTTP to one server, over connections that are kept. Belongs to one event loop; ``close`` it there."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._has_key = key is not None
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key is not None else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
            # A proxy between a trainer and its servers would see every sample.
            trust_env=False,
        )

    async def get(self, path: str, timeout_s: float) -> Any:
        """The JSON answered. Raises LostError, BusyError, RefusedError, RequestError."""
        return self._json(await self._send("GET", path, None, timeout_s), path)

    async def post(self, path: str, body: object, timeout_s: float) -> Any:
        """As ``get``."""
        return self._json(await self._send("POST", path, body, timeout_s), path)

    async def post_raw(self, path: str, body: object, timeout_s: float) -> bytes:
        """The bytes answered. Raises as ``get``."""
        return (await self._send("POST", path, body, timeout_s)).content

    async def events(self, path: str, body: object, timeout_s: float) -> AsyncGenerator[bytes, None]:
        """The data of server-sent events, one by one, until ``[DONE]``. Raises as ``get``."""
        try:
            request = self._client.build_request(
                "POST", path, content=msgspec.json.encode(body), headers=_JSON, timeout=_timeouts(timeout_s)
            )
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    self._check(response, path)
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        data = line[5:].strip()
                        if data == "[DONE]":
                            return
                        yield data.encode()
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise self._lost(path, error, timeout_s) from error
        raise LostError(f"{self.url}{path}: the stream broke off")

    async def close(self) -> None:
        await self._client.aclose()

    async def _send(self, method: str, path: str, body: object, timeout_s: float) -> httpx.Response:
        content = None if body is None else msgspec.json.encode(body)
        try:
            response = await self._client.request(
                method, path, content=content, headers=_JSON if content else None, timeout=_timeouts(timeout_s)
            )
        except httpx.HTTPError as error:
            raise self._lost(path, error, timeout_s) from error
        self._check(response, path)
        return response

    def _lost(self, path: str, error: httpx.HTTPError, timeout_s: float) -> LostError:
        if isinstance(error, httpx.TimeoutException):
            return LostError(f"{self.url}{path} did not answer within {timeout_s:g} s")
        return LostError(f"{self.url}{path} cannot be reached: {str(error) or type(error).__name__}")

    def _check(self, response: httpx.Response, path: str) -> None:
        status = response.status_code
        if status < httpx.codes.BAD_REQUEST:
            return
        words, kind, is_control = _complaint(response.content)
        where = f"{self.url}{path}"
        if status == httpx.codes.SERVICE_UNAVAILABLE:
            raise BusyError(f"{where}: {words}")
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            key = "the key given to the client" if self._has_key else "no key was given; give the server's admin key"
            raise RefusedError(f"{where} refuses {key}: {words}", status, kind)
        if status == httpx.codes.BAD_REQUEST and not is_control:
            raise RequestError(words)
        raise RefusedError(f"{where} answered {status}: {words}", status, kind, response.content)

    def _json(self, response: httpx.Response, path: str) -> Any:
        try:
            return msgspec.json.decode(response.content) if response.content else None
        except msgspec.MsgspecError as error:
            raise ServerError(f"{self.url}{path} answered what is no JSON: {error}") from error


_JSON: Final = {"Content-Type": "application/json"}


def _timeouts(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))


def _complaint(content: bytes) -> tuple[str, str, bool]:
    """Message and kind of an error's body, and whether it is of a control route's form."""
    text = content.decode("utf-8", "replace")[:_MAX_WORDS]
    try:
        body = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return text or "no reason given", "", False
    if not isinstance(body, dict):
        return text, "", False
    inner = body.get("error")
    if isinstance(inner, dict):
        return str(inner.get("message") or text), str(inner.get("type") or ""), False
    return str(body.get("message") or inner or text), str(body.get("kind") or ""), "success" in body
