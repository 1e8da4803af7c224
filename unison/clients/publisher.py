"""Weights to several servers as one update: prepared everywhere, then committed everywhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from unison.clients.endpoint import BusyError, LostError, RefusedError
from unison.clients.member import Member
from unison.clients.transports import Transport
from unison.clients.update import Update
from unison.core.errors import RequestError, ServerError, UnisonError, WeightUpdateError

_LOG = logging.getLogger(__name__)
Fence = Callable[[Member, str], None]


class Publisher:
    """``fence`` is told of servers that failed while others did not."""

    def __init__(self, transport: Transport, *, update_s: float, silence_s: float, fence: Fence) -> None:
        self.transport = transport
        self._update_s = update_s
        self._silence_s = silence_s
        self._fence = fence

    async def prepare(self, members: Sequence[Member], update: Update) -> dict[Member, int]:
        """First phase: every server has the whole update and the sender's checksum; its number there.

        A server that is lost is fenced, and left out. Raises WeightUpdateError where one refused, or none is left;
        the update is then aborted everywhere.
        """
        outcomes = await asyncio.gather(
            *(member.guarded(self._prepare_one(member, update)) for member in members), return_exceptions=True
        )
        prepared: dict[Member, int] = {}
        refusal: UnisonError | None = None
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, int):
                prepared[member] = outcome
            elif isinstance(outcome, LostError | BusyError):
                self._fence(member, str(outcome))
                refusal = refusal or outcome if len(members) == 1 else refusal
            elif isinstance(outcome, UnisonError):
                refusal = outcome
            else:
                raise outcome
        if refusal is not None or not prepared:
            reason = f"weights version {update.version} was not taken: {refusal or 'every server was lost'}"
            await self.abort(members, reason)
            raise WeightUpdateError(reason)
        return prepared

    async def commit(self, prepared: dict[Member, int], update: Update) -> list[Member]:
        """Second phase; the servers that hold the version now. Whoever fails is fenced: it has to catch up."""
        members = list(prepared)
        outcomes = await asyncio.gather(
            *(member.guarded(self._commit_one(member, prepared[member], update)) for member in members),
            return_exceptions=True,
        )
        held: list[Member] = []
        for member, outcome in zip(members, outcomes, strict=True):
            if outcome is None:
                held.append(member)
            elif isinstance(outcome, UnisonError):
                self._fence(member, f"it did not commit version {update.version}: {outcome}")
            else:
                raise outcome
        await self.transport.committed(update)
        return held

    async def catch_up(self, member: Member, update: Update) -> None:
        """Bring one server to the present version. Raises ServerError or WeightUpdateError."""
        number = await self._prepare_one(member, update)
        await self._commit_one(member, number, update)

    async def abort(self, members: Sequence[Member], reason: str) -> None:
        """Give the open update up wherever it can be said; a server that is not reached does so of itself."""

        async def tell(member: Member) -> None:
            await member.link.abort(None, reason, self._silence_s)

        for outcome in await asyncio.gather(*map(tell, members), return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, UnisonError):
                raise outcome

    async def _prepare_one(self, member: Member, update: Update) -> int:
        control = member.link
        status = await control.status(self._silence_s)
        if status.open_update is not None:
            await control.abort(status.open_update, "a new update begins", self._silence_s)
        # A server numbers its versions upwards, whatever they are called: one pushed again has a new number.
        number = max(update.version, status.version + 1)
        try:
            await control.begin(number, update.label, self._update_s)
            await self.transport.stage(control, update, number, self._update_s)
            await control.prepare(number, update.checksum, self._update_s)
        except (RefusedError, RequestError) as error:
            await control.abort(number, str(error), self._silence_s)
            raise
        return number

    async def _commit_one(self, member: Member, number: int, update: Update) -> None:
        checksum = await member.link.commit(number, self._update_s)
        if checksum != update.checksum:
            raise ServerError(
                f"{member.name} committed weights with the checksum {checksum[:16]}, not {update.checksum[:16]}"
            )
