"""An engine process that is only talked about: a small machine of states that records what it was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from unison.config.serving import ServeConfig
from unison.server.control import CONTROL_ROUTES
from unison.server.front import Front, Route
from unison.server.link import CommandFailed
from unison.server.messages import (
    AbortUpdate,
    Action,
    Beat,
    BeginUpdate,
    BumpVersion,
    CheckWeights,
    CommitUpdate,
    Continue,
    EngineInfo,
    FlushCache,
    Pause,
    PrepareUpdate,
    RegisterLayout,
    ReleaseMemory,
    StageDisk,
    StageGroup,
    StageHandle,
    WeightsByName,
)
from unison.server.versions import Versions

NAMES = ("embed", "layer", "norm")
INFO = EngineInfo(
    path="/models/tiny",
    family="llama",
    dtype="float32",
    numerics="native",
    vocab_size=512,
    context_length=256,
    num_parameters=1000,
    weight_bytes=4000,
    end_ids=(2,),
    kv_tokens=1024,
    page_size=16,
    threads=1,
    sampler="v1",
    torch="2",
    pid=4242,
    checksum="0" * 32,
)


def name_of(action: Action) -> str:
    return type(action).__name__


@dataclass
class FakeLink:
    """Knows which tensors an update lacks; ``disk`` and layouts say which ones a stage brings."""

    version: int = 0
    tensors: tuple[str, ...] = NAMES
    info: EngineInfo = INFO
    num_restarts: int = 0
    silence_s: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)
    fail: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name of an action -> kind and message; taken out when it has failed once."""
    hold: dict[str, asyncio.Event] = field(default_factory=dict)
    """Name of an action -> what it waits for."""
    num_running: int = 0
    aborted: list[str | None] = field(default_factory=list)
    on_abort: Callable[[], None] = lambda: None
    pause_mode: Any = None
    dead: bool = False
    missing: set[str] | None = None
    open_version: int | None = None

    @property
    def state(self) -> Any:
        if self.dead:
            return "restarting"
        return "running" if self.pause_mode is None else "paused"

    @property
    def beat(self) -> Beat:
        return Beat(
            self.state if not self.dead else "running",
            self.version,
            pause_mode=self.pause_mode,
            open_update=self.open_version,
            num_running=self.num_running,
            num_used_tokens=64 * self.num_running,
            kv_tokens=1024,
            counters=self.counters,
        )

    async def check_alive(self, timeout_s: float) -> None:
        return

    def submit(self, request: Any, *, streamed: bool = False) -> Any:
        raise NotImplementedError

    def abort(self, request_id: str | None = None) -> int:
        self.aborted.append(request_id)
        self.on_abort()
        return self.num_running if request_id is None else int(self.num_running > 0)

    @property
    def names(self) -> list[str]:
        return [name_of(action) for action in self.actions]

    def die(self) -> None:
        """A new process is there, with the version that was committed last and nothing open."""
        self.num_restarts += 1
        self.open_version = self.missing = None

    async def command(self, action: Action, timeout_s: float = 60.0) -> dict[str, Any]:
        self.actions.append(action)
        name = name_of(action)
        if name in self.hold:
            await self.hold[name].wait()
        if self.dead:
            raise CommandFailed("unavailable", "there is no engine process")
        if name in self.fail:
            raise CommandFailed(*self.fail.pop(name))
        return self._answer(action)

    def _answer(self, action: Action) -> dict[str, Any]:
        match action:
            case BeginUpdate(version):
                if self.open_version is not None:
                    raise CommandFailed("update", "one is open")
                self.open_version, self.missing = version, set(self.tensors)
                return {"version": version}
            case StageGroup() | StageHandle() | StageDisk():
                return self._stage(action)
            case PrepareUpdate(version):
                self._check(version)
                return {"checksum": f"{version:032x}", "num_tensors": 3, "seconds": {"checksum": 0.1}}
            case CommitUpdate(version):
                self._check(version)
                self.version, self.open_version = version, None
                return {"version": version, "checksum": f"{version:032x}", "seconds": {"swap": 0.1, "repack": 0.2}}
            case AbortUpdate():
                self.open_version = None
                return {"aborted": action.version}
            case BumpVersion(version):
                self.version = version
                return {"version": version}
            case Pause(mode):
                self.pause_mode = mode
                if mode == "abort":
                    self.num_running = 0
                return {}
            case Continue():
                self.pause_mode = None
                return {}
            case FlushCache():
                if self.num_running:
                    raise CommandFailed("state", f"{self.num_running} requests run")
                return {}
            case ReleaseMemory(tags):
                return {"freed_bytes": {tag: 4000 for tag in tags}}
            case WeightsByName(name, truncate):
                if name not in NAMES:
                    raise CommandFailed("request", f"there is no tensor {name!r}")
                return {"values": [0.5, -1.25, 3.0][:truncate]}
            case CheckWeights(kind):
                return {"differing": ["layer"]} if kind == "compare" else {"checksum": "ab"}
            case RegisterLayout(layout):
                return {"layout_id": layout.layout_id}
        return {}

    def _stage(self, action: StageGroup | StageHandle | StageDisk) -> dict[str, Any]:
        if self.open_version != action.version or self.missing is None:
            raise CommandFailed("update", f"no update to version {action.version} is open")
        if isinstance(action, StageDisk):
            names: Iterable[str] = self.tensors
        elif action.layout is None:
            raise CommandFailed("state", f"unknown layout {action.layout_id}")
        else:
            names = [entry.name for entry in action.layout.entries]
        for name in names:
            if name not in self.tensors:
                raise CommandFailed("update", f"there is no tensor {name!r}")
            self.missing.discard(name)
        return {"num_tensors": len(list(names)), "seconds": {"all": 0.1}}

    def _check(self, version: int) -> None:
        if self.open_version != version:
            raise CommandFailed("update", f"no update to version {version} is open")
        if self.missing:
            raise CommandFailed("update", f"tensors are missing: {', '.join(sorted(self.missing))}")


def make_front(link: FakeLink | None = None, **settings: Any) -> Front:
    fake = link or FakeLink()
    return Front(fake, ServeConfig(**settings), None, Versions(fake.version))


def make_app(front: Front, routes: Iterable[Route] = CONTROL_ROUTES) -> Starlette:
    def mount(route: Route) -> StarletteRoute:
        async def endpoint(request: Request) -> Response:
            return await route.handler(front, request)

        return StarletteRoute(route.path, endpoint, methods=list(route.methods))

    return Starlette(routes=[mount(route) for route in routes])


class Client:
    """Speaks to the routes over a front end in this process; ``front.link`` is the fake one."""

    def __init__(self, front: Front) -> None:
        self.front = front
        transport = httpx.ASGITransport(make_app(front))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://server")

    @property
    def link(self) -> FakeLink:
        link = self.front.link
        if not isinstance(link, FakeLink):
            raise TypeError(type(link))
        return link

    async def post(self, path: str, /, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def ok(self, path: str, /, **body: Any) -> dict[str, Any]:
        answer = await self.post(path, **body)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    async def get(self, path: str, /, **query: Any) -> httpx.Response:
        return await self.http.get(path, params=query)


def run(scenario: Callable[[Client], Any], link: FakeLink | None = None, **settings: Any) -> None:
    """Run a scenario of coroutines in an event loop of its own."""

    async def main() -> None:
        await asyncio.wait_for(scenario(Client(make_front(link, **settings))), 20)

    asyncio.run(main())
