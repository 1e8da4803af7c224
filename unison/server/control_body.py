"""Bodies and answers of control routes: typed on the way in, always JSON on the way out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import msgspec
from starlette.responses import Response

from unison.config.serving import LimitsConfig
from unison.core.errors import UnisonError
from unison.server.body import read_body
from unison.server.link import CommandFailed

if TYPE_CHECKING:
    from starlette.requests import Request

    from unison.server.front import Front

STATUS: Final[Mapping[str, int]] = {
    "request": 400,
    "update": 400,
    "unsupported": 400,
    "state": 409,
    "unavailable": 503,
    "internal": 500,
}
"""HTTP status of a failure by its kind."""


class Refused(UnisonError):
    """A control call the front end refuses; ``param`` names the field at fault, if it is one."""

    def __init__(self, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.param = param


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all bodies. Fields in INERT are known, and change nothing here: answers say so where they are sent."""

    INERT: ClassVar[frozenset[str]] = frozenset()


class Empty(Body, frozen=True, kw_only=True):
    """A body without fields."""


BodyT = TypeVar("BodyT", bound=Body)
Action = Callable[["Front", BodyT], Awaitable[dict[str, Any] | Response]]
Handler = Callable[["Front", "Request"], Awaitable[Response]]


def control(body_type: type[BodyT]) -> Callable[[Action[BodyT]], Handler]:
    """Make a route's handler of a function from a typed body to its answer; failures become answers too."""

    def decorate(action: Action[BodyT]) -> Handler:
        @wraps(action)
        async def handler(front: Front, request: Request) -> Response:
            try:
                raw = await read_json(request, front.config.limits)
                notes = field_notes(raw, body_type, strict=front.config.strict)
                answer = await action(front, parse_body(raw, body_type, from_query=bool(request.query_params)))
            except (Refused, CommandFailed) as error:
                return failure(error.kind, str(error), getattr(error, "param", None))
            return answer if isinstance(answer, Response) else json_answer({**answer, **notes})

        return handler

    return decorate


async def read_json(request: Request, limits: LimitsConfig) -> dict[str, Any]:
    """The body's JSON object, {} where there is none, over what the query says. Raises Refused, HttpError."""
    query: dict[str, Any] = dict(request.query_params)
    data = await read_body(request, limits)
    if not data.strip():
        return query
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused("request", f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("request", f"the body must be a JSON object, not {type(body).__name__}")
    return {**query, **body}


def parse_body(raw: Mapping[str, Any], body_type: type[BodyT], *, from_query: bool = False) -> BodyT:
    """Raises Refused that names the field; what came by the query is text, and converted."""
    try:
        return msgspec.convert(dict(raw), body_type, strict=not from_query)
    except msgspec.ValidationError as error:
        text = str(error)
        raise Refused("request", text.replace("`$.", "`"), field_at_fault(text)) from error


def field_at_fault(message: str) -> str | None:
    """The field that a message of msgspec is about: in backquotes at its end, with or without a path."""
    quoted = message.split("`")
    last = quoted[-2] if len(quoted) > 2 else ""
    return last.removeprefix("$.") or None


def field_notes(raw: Mapping[str, Any], body_type: type[Body], *, strict: bool) -> dict[str, list[str]]:
    """What an answer says of the fields that did nothing. Under ``strict`` unknown ones are Refused."""
    known = set(body_type.__struct_fields__)
    ignored = sorted(name for name in raw if name not in known and name not in body_type.INERT)
    if ignored and strict:
        raise Refused(
            "request", f"unknown field {ignored[0]!r}; known are {', '.join(sorted(known)) or 'none'}", ignored[0]
        )
    inert = sorted(name for name in raw if name in body_type.INERT)
    return {**({"ignored_fields": ignored} if ignored else {}), **({"without_effect": inert} if inert else {})}


def json_answer(answer: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def failure(kind: str, message: str, param: str | None = None) -> Response:
    """A failed call: unison's and SGLang's fields in one object."""
    status = STATUS.get(kind, 500)
    answer = {
        "success": False,
        "message": message,
        "kind": kind,
        "object": "error",
        "type": "BadRequestError" if status == 400 else "ControlError",
        "param": param,
        "code": status,
    }
    return json_answer(answer, status)
