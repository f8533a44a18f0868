"""A node or gateway as a member of its fleet at the coordination service, for as long as it runs.

Owns what is told there, and when. Invariants: what a gateway reads there is what the node would say itself, at most a
moment ago; a service that is silent when the node starts costs it its place in the fleet until it answers, and never
its clients; what cannot be told is logged, and what was told last holds; a node that ends says so. Without a service
nothing is done.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ..session.errors import MidstreamError
from .config import Settings
from .fleet.backoff import Backoff
from .fleet.opening import open_coordination
from .fleet.presence import Presence
from .fleet.record import Record
from .fleet_standing import Standing

_LOG = logging.getLogger("midstream.fleet")

LOOK_EVERY_S = 0.25
_RETRY_FIRST_S = 0.5
_RETRY_LARGEST_S = 10.0
# A service that is silent at the end keeps nobody: the lease ends by itself.
_LEAVE_S = 5.0


def standing_of(settings: Settings) -> Standing | None:
    """How this process will stand in its fleet; None without a service. ConfigError names the setting that is wrong.

    A stream waits for its fence as long as it would for a worker.
    """
    if settings.fleet.coordination == "none":
        return None
    return Standing(open_coordination(settings.fleet), settings.restore.takeover_timeout_s)


@asynccontextmanager
async def as_member(standing: Standing | None, record_now: Callable[[], Record], lease_s: int) -> AsyncIterator[None]:
    """While this lasts."""
    if standing is None:
        yield
        return
    staying = asyncio.create_task(stay(standing, record_now, lease_s), name="fleet-member")
    staying.add_done_callback(_tell_of_a_defect)
    try:
        yield
    finally:
        staying.cancel()
        await asyncio.wait({staying}, timeout=_LEAVE_S)


async def stay(standing: Standing, record_now: Callable[[], Record], lease_s: int) -> None:
    """Join, tell each change, and leave when this is cancelled."""
    presence = await _entered(standing, record_now, lease_s)
    standing.entered(presence)
    try:
        told: Record | None = None
        why_not = ""
        while True:
            try:
                record = record_now()
                if record != told:
                    presence.update(record)
                    told = record
                why_not = ""
            except Exception as error:
                # A place in the fleet is worth more than its newest record: without one all streams are broken off.
                why_not = _log_once(why_not, error)
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        standing.left()
        await presence.close()


async def _entered(standing: Standing, record_now: Callable[[], Record], lease_s: int) -> Presence:
    backoff = Backoff(_RETRY_FIRST_S, _RETRY_LARGEST_S, random.random)
    while True:
        try:
            return await Presence.enter(standing.coordination, record_now(), lease_s, standing.rejoined)
        except (MidstreamError, ValueError) as error:
            _LOG.warning("event=fleet_not_joined error=%s", error)
            await asyncio.sleep(backoff.wait_s())


def _log_once(before: str, error: Exception) -> str:
    """Log what is wrong where that is news; returns it."""
    why = f"{type(error).__name__}: {error}"
    if why != before:
        _LOG.error("event=record_not_told why=%s; what was told last holds", why, exc_info=error)
    return why


def _tell_of_a_defect(staying: "asyncio.Task[None]") -> None:
    if not staying.cancelled() and (error := staying.exception()) is not None:
        _LOG.error("event=fleet_member_broke", exc_info=error)
