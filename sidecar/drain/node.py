"""The drain of a node: no new sessions, and it is over when none is left or its time has passed.

Owns the drain's state and the watch over it. Invariants: while one is under way the coordinator takes nothing new, and
takes it again the moment the drain is cancelled; what is over is not taken back. Who moves the sessions is not its
business: gateways see that this node drains, and come for theirs (docs/fleet.md).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..coordinator import SidecarCoordinator
from . import phase
from .phase import Drain, Phase

_LOG = logging.getLogger("midstream.drain")

LOOK_EVERY_S = 1.0
# How often it is looked whether what was given away has been gone for long enough.
_AWAY_S = 0.1


class NodeDrain:
    """Of one sidecar."""

    def __init__(self, coordinator: SidecarCoordinator, clock: Callable[[], float] = time.monotonic) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._drain = Drain()
        self._changed = asyncio.Event()

    @property
    def is_under_way(self) -> bool:
        """Whether nothing new is taken, and it may still be cancelled."""
        return self._drain.is_under_way

    def order(self, reason: str, within_s: float | None) -> None:
        """Be empty within that time, and end; None: be empty."""
        self._become(phase.ordered(self._drain, reason, within_s, self._clock()))
        _LOG.info(
            "event=drain reason=%s sessions=%d deadline_s=%.1f",
            reason, self._coordinator.open_count, self._drain.deadline_s - self._clock(),
        )  # fmt: skip

    def cancel(self) -> bool:
        """Serve as before; False where nothing is under way that could be cancelled."""
        if not self._drain.is_under_way:
            return False
        _LOG.info("event=drain_cancelled reasons=%s", ",".join(self._drain.reasons))
        self._become(phase.cancelled(self._drain))
        return True

    def withdraw(self, reason: str) -> None:
        """Who gave that order takes it back; those of others hold."""
        if reason in self._drain.reasons:
            _LOG.info("event=drain_withdrawn reason=%s", reason)
            self._become(phase.withdrawn(self._drain, reason))

    def told(self) -> dict[str, Any]:
        """For people and programs."""
        left = self._coordinator.open_count
        return phase.told(phase.looked(self._drain, left, float("-inf")), self._clock())

    async def over(self) -> None:
        """Returns when a drain is over."""
        while self._drain.phase is not Phase.OVER:
            self._changed.clear()
            await self._wait()
            self._become(phase.looked(self._drain, self._left(), self._clock()))

    def _left(self) -> int:
        """Sessions that are here, and one more while the last one that was given away may come back."""
        return self._coordinator.open_count or int(self._coordinator.gave_lately)

    async def _wait(self) -> None:
        """Until something may be otherwise."""
        if not self._drain.is_under_way:
            await self._changed.wait()
            return
        if self._left() and not self._coordinator.open_count:
            await asyncio.sleep(_AWAY_S)
            return
        idle, changed = asyncio.ensure_future(self._coordinator.idle()), asyncio.ensure_future(self._changed.wait())
        left_s = max(0.0, self._drain.deadline_s - self._clock())
        either: set[asyncio.Future[Any]] = {idle, changed}
        try:
            await asyncio.wait(either, timeout=min(left_s, LOOK_EVERY_S), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in either:
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    await waiting

    def _become(self, drain: Drain) -> None:
        was, self._drain = self._drain.phase, drain
        if drain.phase is not was:
            self._coordinator.draining = drain.phase is not Phase.SERVING
            self._coordinator.workers_changed()
        self._changed.set()
