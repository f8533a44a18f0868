"""A node as a member of its fleet at the coordination service, for as long as it runs.

Owns what is told there, and when. Invariants: what a gateway reads there is what the node would say itself, at most a
moment ago; a service that is silent when the node starts costs it its place in the fleet until it answers, and never
its clients; a node that ends says so. Without a service nothing is done.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ..session.errors import MidstreamError
from .config import Fleet
from .fleet.backoff import Backoff
from .fleet.coordination import Coordination, Membership
from .fleet.opening import open_coordination
from .fleet.presence import Presence
from .fleet.record import MemberId, Record

_LOG = logging.getLogger("midstream.fleet")

LOOK_EVERY_S = 0.25
_RETRY_FIRST_S = 0.5
_RETRY_LARGEST_S = 10.0
# A service that is silent at the end keeps nobody: the lease ends by itself.
_LEAVE_S = 5.0


@asynccontextmanager
async def as_member(fleet: Fleet, record_now: Callable[[], Record]) -> AsyncIterator[None]:
    """While this lasts. ConfigError names the setting that is wrong."""
    if fleet.coordination == "none":
        yield
        return
    coordination = open_coordination(fleet)
    staying = asyncio.create_task(stay(coordination, record_now, fleet.lease_s), name="fleet-member")
    try:
        yield
    finally:
        staying.cancel()
        await asyncio.wait({staying}, timeout=_LEAVE_S)
        await coordination.close()


async def stay(coordination: Coordination, record_now: Callable[[], Record], lease_s: int) -> None:
    """Join, tell each change, and leave when this is cancelled."""
    presence = await _entered(coordination, record_now, lease_s)
    try:
        told: Record | None = None
        while True:
            record = record_now()
            if record != told:
                presence.update(record)
                told = record
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        await presence.close()


async def _entered(coordination: Coordination, record_now: Callable[[], Record], lease_s: int) -> Presence:
    backoff = Backoff(_RETRY_FIRST_S, _RETRY_LARGEST_S, random.random)
    while True:
        try:
            return await Presence.enter(coordination, record_now(), lease_s, _rejoined)
        except MidstreamError as error:
            _LOG.warning("event=fleet_not_joined error=%s", error)
            await asyncio.sleep(backoff.wait_s())


async def _rejoined(membership: Membership, former: MemberId) -> None:
    """The sessions of gateways have been left by these by then; those of clients of its own are nobody else's."""
    _LOG.warning("event=fleet_joined_again member=%s former=%s", membership.id, former)
