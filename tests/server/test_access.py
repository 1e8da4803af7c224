"""Every route has a level, and every level lets in whom it says: all routes, all tokens, all places to listen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.server.http_support import call, call_all
from tests.server.local_link import LocalLink
from unison.config.serving import ServeConfig
from unison.server.access import is_loopback
from unison.server.front import Front, Level, Route
from unison.server.routes import ROUTES
from unison.server.versions import Versions

OPEN = {"/health", "/health_generate", "/live", "/ready"}
USER, ADMIN = "user-key-ü", "admin-key"
TOKENS: dict[str, str | None] = {"none": None, "wrong": "wrong", "user": USER, "admin": ADMIN}


async def _served(front: Front, request: Request) -> Response:
    return Response("served")


def front_of(config: ServeConfig) -> Front:
    """No engine is needed to be refused, nor to be let in to a handler that does nothing."""
    link: Any = None
    return Front(link=link, config=config, tokenizer=None, versions=Versions())


def status(config: ServeConfig, route: Route, token: str | None, headers: dict[str, str] | None = None) -> int:
    told = dict(headers or {})
    bare = Route(route.path, route.methods, route.level, _served)
    sent: list[tuple[bytes, bytes]] = [(name.encode(), value.encode()) for name, value in told.items()]
    if token is not None:
        sent.append((b"authorization", b"Bearer " + token.encode()))
    response = call(front_of(config), route.path, method=route.methods[0], routes=[bare], headers=sent)
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param"}
    return response.status_code


ALL_ROUTES = [*ROUTES, Route("/control", ("POST",), "admin", _served)]


def expected(level: Level, config: ServeConfig, token: str) -> set[int]:
    """By the rules, in the words of a table."""
    if level == "open":
        return {200}
    if token == "admin" and config.admin_key:
        return {200}
    if level == "user":
        return {200} if config.api_key is None or token == "user" else {401}
    if config.admin_key:
        return {403} if token == "user" and config.api_key else {401}
    return {403} if config.api_key or not is_loopback(config.host) else {200}


def configs() -> Iterator[ServeConfig]:
    for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "192.168.1.5", ""):
        for api_key in (None, USER):
            for admin_key in (None, ADMIN):
                yield ServeConfig(host=host, api_key=api_key, admin_key=admin_key)


def test_every_route_lets_in_whom_its_level_says() -> None:
    bare = [Route(route.path, route.methods, route.level, _served) for route in ALL_ROUTES]
    num_checked = 0
    for config in configs():
        for name, token in TOKENS.items():
            headers = [] if token is None else [(b"authorization", b"Bearer " + token.encode())]
            requests = [{"method": route.methods[0], "url": route.path, "headers": headers} for route in bare]
            for route, response in zip(bare, call_all(front_of(config), requests, bare), strict=True):
                assert {response.status_code} == expected(route.level, config, name), (route.path, config, name)
                num_checked += 1
    assert num_checked == len(ALL_ROUTES) * 7 * 4 * 4


def test_only_probes_are_open() -> None:
    for route in ROUTES:
        assert route.level in ("open", "user", "admin")
        assert (route.level == "open") == (route.path in OPEN), route.path


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"host": "localhost:30000"}, True),
        ({"host": "127.0.0.1"}, True),
        ({"host": "127.8.9.1:80"}, True),
        ({"host": "[::1]:30000"}, True),
        ({"host": "LOCALHOST"}, True),
        ({"host": "evil.example"}, False),
        ({"host": "127.0.0.1.evil.example"}, False),
        ({"host": "localhost.evil.example:80"}, False),
        ({"host": "127.0.0.1@evil.example"}, False),
        ({"host": "127.0.0.1:80@evil.example"}, False),
        ({"host": "[::1].evil.example"}, False),
        ({"host": "[::1"}, False),
        ({"host": ""}, False),
        ({"host": "192.168.1.5"}, False),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, True),
        ({"host": "localhost:1", "origin": "http://localhost:2"}, False),
        ({"host": "localhost:1", "origin": "https://evil.example"}, False),
        ({"host": "localhost:1", "origin": "null"}, False),
        ({"host": "localhost:1", "sec-fetch-site": "none"}, True),
        ({"host": "localhost:1", "sec-fetch-site": "same-origin"}, True),
        ({"host": "localhost:1", "sec-fetch-site": "same-site"}, False),
        ({"host": "localhost:1", "sec-fetch-site": "cross-site"}, False),
    ],
)
def test_control_without_a_key_is_closed_to_web_pages(headers: dict[str, str], allowed: bool) -> None:
    control = ALL_ROUTES[-1]
    assert status(ServeConfig(), control, None, headers) == (200 if allowed else 403)
    with_key = ServeConfig(admin_key=ADMIN)
    assert status(with_key, control, ADMIN, headers) == 200


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", USER.encode())],
        [(b"authorization", b"Basic " + USER.encode())],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer " + USER.encode() + b"x")],
        [(b"authorization", b"Bearer " + USER.encode()[:-1])],
        [(b"authorization", b"Bearer " + USER.encode()), (b"authorization", b"Bearer x")],
        [(b"x-api-key", USER.encode())],
    ],
)
def test_a_token_is_taken_from_one_bearer_header_alone(headers: list[tuple[bytes, bytes]]) -> None:
    user = Route("/user", ("GET",), "user", _served)
    config = ServeConfig(api_key=USER)
    assert call(front_of(config), "/user", method="GET", routes=[user], headers=headers).status_code == 401
    good = [(b"Authorization", b"bearer   " + USER.encode() + b" ")]
    assert call(front_of(config), "/user", method="GET", routes=[user], headers=good).status_code == 200


def test_an_empty_key_is_no_key_to_show() -> None:
    """A key set to nothing must not let in whoever shows nothing."""
    config = ServeConfig(api_key="", admin_key="")
    for route in ALL_ROUTES[:1] + ALL_ROUTES[-1:]:
        for token in (None, "", " ", "x"):
            assert status(config, route, token) == 401


def test_a_refusal_says_what_to_do() -> None:
    control = Route("/control", ("POST",), "admin", _served)
    for config, word in (
        (ServeConfig(host="0.0.0.0"), "--admin-key"),
        (ServeConfig(api_key="k"), "--admin-key"),
        (ServeConfig(admin_key="k"), "Authorization: Bearer"),
    ):
        response = call(front_of(config), "/control", routes=[control])
        assert word in response.json()["error"]["message"]


def test_keys_are_told_to_nobody(front: Front) -> None:
    assert isinstance(front.link, LocalLink)
    for path in ("/health", "/live", "/ready", "/nothing"):
        assert "key" not in call(front, path, method="GET").text
