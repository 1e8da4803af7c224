"""Which server a request goes to. Nothing that comes out depends on it: only how often a prompt is computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from unison.clients.member import Member
from unison.core.records import GenerationRequest

_MAX_GROUPS: Final = 1 << 16


class Router:
    """Copies of a prompt go where its first one went, as long as that server is ready; others where least is open."""

    def __init__(self) -> None:
        self._places: OrderedDict[object, Member] = OrderedDict()

    def choose(self, request: GenerationRequest, members: Sequence[Member]) -> Member | None:
        """One of the members that are ready; None where none is."""
        ready = [member for member in members if member.is_ready]
        if not ready:
            return None
        key = group_of(request)
        place = self._places.get(key)
        if place is None or place not in ready:
            place = min(ready, key=lambda member: member.num_open)
            self._places[key] = place
            while len(self._places) > _MAX_GROUPS:
                self._places.popitem(last=False)
        return place


def group_of(request: GenerationRequest) -> object:
    """What the copies of a prompt have in common: GROUP of GROUP/COPY, else the prompt itself."""
    group, slash, copy = request.request_id.rpartition("/")
    return group if slash and group and copy else hash(request.prompt_ids)
