"""A member that joins again, as another one, each time its lease is lost.

Owns the membership of the moment. Invariants: none may send from the loss of one lease until the next join was
answered; whoever is told of the new member is told which was the former, whose sessions are its own only where it
claims them before anybody else does. Until `close` it never gives up, with waits that grow and are jittered.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ...session.errors import MidstreamError
from .backoff import Backoff
from .coordination import Coordination, Membership
from .record import MemberId, Record

_log = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.2
_RETRY_LARGEST_S = 10.0

# The new membership, and the id of the one that was lost.
Rejoined = Callable[[Membership, MemberId], Awaitable[None]]


class Presence:
    """One process in a fleet; made by `enter`."""

    def __init__(
        self, fleet: Coordination, membership: Membership, record: Record, lease_s: int, told: Rejoined
    ) -> None:
        self._fleet = fleet
        self._membership = membership
        self._record = record
        self._lease_s = lease_s
        self._told = told
        self._backoff = Backoff(_RETRY_FIRST_S, _RETRY_LARGEST_S, random.random)
        self._task = asyncio.create_task(self._stay(), name="fleet-presence")

    @classmethod
    async def enter(cls, fleet: Coordination, record: Record, lease_s: int, told: Rejoined) -> "Presence":
        """Join, and stay. CoordinationError or ConfigError when the first join does not work."""
        return cls(fleet, await fleet.join(record, lease_s), record, lease_s, told)

    @property
    def membership(self) -> Membership:
        """That of the moment; it can be lost at any time."""
        return self._membership

    def update(self, record: Record) -> None:
        """Have this record told, by this member and by those after it. ValueError when it is unfit."""
        record = replace(record, formerly=self._record.formerly)
        self._membership.update(record)
        self._record = record

    async def close(self) -> None:
        """Leave for good."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._membership.leave()

    async def _stay(self) -> None:
        while True:
            await self._membership.lost()
            former = self._membership.id
            self._record = replace(self._record, formerly=former)
            self._membership = await self._join()
            _log.warning("fleet: member=%s is what member=%s was", self._membership.id, former)
            try:
                await self._told(self._membership, former)
            except Exception:
                # Whoever was told has its own troubles; this process stays in the fleet all the same.
                _log.exception("fleet: member=%s could not take up what member=%s had", self._membership.id, former)

    async def _join(self) -> Membership:
        while True:
            try:
                joined = await self._fleet.join(self._record, self._lease_s)
            except MidstreamError as error:
                _log.warning("fleet: %s cannot join again: %s", self._record.name, error)
                await asyncio.sleep(self._backoff.wait_s())
            else:
                self._backoff.succeeded()
                return joined
