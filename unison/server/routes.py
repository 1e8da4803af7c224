"""All routes of the server, each with who may call it."""

from __future__ import annotations

from typing import Final

from unison.server import generate, health
from unison.server.control import CONTROL_ROUTES
from unison.server.front import Route

ROUTES: Final[tuple[Route, ...]] = (*generate.ROUTES, *health.ROUTES, *CONTROL_ROUTES)
