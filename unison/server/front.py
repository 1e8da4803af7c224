"""What all routes share, and what a route is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from unison.config.serving import ServeConfig
from unison.server.link import EngineLink
from unison.server.live import LiveRequests
from unison.server.metrics import Metrics
from unison.server.updates import Updates
from unison.server.versions import Versions

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from unison.text.tokenizer import Tokenizer

Level = Literal["open", "user", "admin"]
"""open: everybody, health alone. user: whoever shows the API key, if there is one. admin: unison.server.access says."""


@dataclass(slots=True)
class Front:
    """The front end's parts."""

    link: EngineLink
    config: ServeConfig
    tokenizer: Tokenizer | None
    versions: Versions
    is_draining: bool = False
    """Set by SIGTERM: what runs may end, nothing new is begun."""
    started_at: float = field(default_factory=time.time)
    probe: asyncio.Task[None] | None = None
    """The probe through the scheduler that is under way; whoever asks meanwhile shares it."""
    live: LiveRequests = field(default_factory=LiveRequests)
    metrics: Metrics = field(init=False)
    updates: Updates = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.link)
        self.updates = Updates(self.link, self.versions, self.metrics, lease_s=self.config.update_s)


@dataclass(frozen=True, slots=True)
class Route:
    """Every route declares who may call it; there is no default."""

    path: str
    methods: tuple[str, ...]
    level: Level
    handler: Callable[[Front, Request], Awaitable[Response]]
