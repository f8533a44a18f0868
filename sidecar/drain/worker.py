"""The drain of one worker: its sessions go on at the node's other workers, and it ends when none is left.

Owns the moves and their pace. Invariants: at most `at_once` sessions move at a time, and none is cut before another
worker has its key and room for it; what cannot move may end where it is until the deadline, and is then taken over like
the sessions of any worker that ends. It can be cancelled until then; whoever has moved stays where it went.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ...session.errors import Refused
from ...session.ids import SessionId
from ..coordinator import SidecarCoordinator
from ..metrics import Metrics
from ..put_off import PutOff
from ..session_record import Record
from ..workers import Worker
from . import phase
from .here import Here
from .order import Leaving, dearest_first
from .phase import Drain, Phase
from .room import MORE_TOKENS

_LOG = logging.getLogger("midstream.drain")

LOOK_EVERY_S = 0.1
MOVED_WITHIN_S = 30.0
PUT_OFF_FIRST_S, PUT_OFF_LARGEST_S = 0.5, 10.0


class WorkerDrain:
    """`end` ends the worker when the drain is over; `changed` tells that it takes sessions, or takes none."""

    def __init__(
        self,
        worker: Worker,
        here: Here,
        coordinator: SidecarCoordinator,
        metrics: Metrics,
        *,
        at_once: int,
        short_s: float,
        end: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._here = here
        self._coordinator = coordinator
        self._metrics = metrics
        self._at_once = at_once
        self._short_s = short_s
        self._end = end
        self._clock = clock
        self._drain = Drain()
        self._moving: dict[SessionId, asyncio.Task[None]] = {}
        self._put_off: PutOff[SessionId] = PutOff(PUT_OFF_FIRST_S, PUT_OFF_LARGEST_S)
        self._running: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the worker was ended."""
        return self._drain.phase is Phase.OVER

    def order(self, reason: str, within_s: float) -> None:
        """Empty the worker within that time."""
        self._drain = phase.ordered(self._drain, reason, within_s, self._clock())
        if self._running is None:
            self._take_sessions(False)
            self._running = asyncio.create_task(self._run(), name=f"drain of {self._worker.name}")
            self._running.add_done_callback(self._ended)
        _LOG.info("event=drain worker=%s reason=%s sessions=%d", self._worker.name, reason, self._left())

    def cancel(self) -> bool:
        """Have it take sessions again; False where it was ended already."""
        if not self._drain.is_under_way:
            return False
        self._drain = phase.cancelled(self._drain)
        if self._running is not None:
            self._running.cancel()
            self._running = None
        self._take_sessions(True)
        _LOG.info("event=drain_cancelled worker=%s sessions=%d", self._worker.name, self._left())
        return True

    async def close(self) -> None:
        """Move nothing more."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def told(self) -> dict[str, Any]:
        """For people and programs."""
        return phase.told(phase.looked(self._drain, self._left(), float("-inf")), self._clock())

    def _take_sessions(self, takes: bool) -> None:
        self._worker.leaving = not takes
        self._coordinator.workers_changed()

    def _left(self) -> int:
        """Sessions that run there, or still need what is there."""
        epochs = [self._worker.current, *self._worker.older]
        return sum(len(epoch.sessions) for epoch in epochs if epoch is not None)

    async def _run(self) -> None:
        try:
            while True:
                self._drain = phase.looked(self._drain, self._left(), self._clock())
                if self._drain.phase is Phase.OVER:
                    break
                self._harvest()
                self._begin_some()
                if self._moving:
                    await asyncio.wait(self._moving.values(), timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(LOOK_EVERY_S)
        finally:
            for task in self._moving.values():
                task.cancel()
            await asyncio.gather(*self._moving.values(), return_exceptions=True)
            self._moving.clear()
        _LOG.info("event=drain_over worker=%s sessions_left=%d", self._worker.name, self._left())
        await self._end()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("event=drain_broke worker=%s", self._worker.name, exc_info=error)

    # ---- moves

    def _begin_some(self) -> None:
        now_s = self._clock()
        here = self._here.leaving(self._worker.name)
        self._put_off.keep({SessionId(one.session) for one in here})
        for leaving in dearest_first(here, self._short_s):
            if len(self._moving) >= self._at_once:
                return
            session = SessionId(leaving.session)
            if session in self._moving or self._put_off.is_put_off(session, now_s):
                continue
            work = self._move(session, leaving)
            self._moving[session] = asyncio.create_task(work, name=f"move of {session}")

    def _harvest(self) -> None:
        for session, task in list(self._moving.items()):
            if not task.done():
                continue
            del self._moving[session]
            error = task.exception()
            if error is None:
                self._put_off.succeeded(session)
                continue
            self._put_off.failed(session, self._clock())
            reason = error.reason if isinstance(error, Refused) else "internal"
            self._metrics.drain_moves.labels(reason).inc()
            level = logging.WARNING if isinstance(error, Refused) else logging.ERROR
            _LOG.log(level, "event=not_moved session=%s reason=%s error=%s", session, reason, error)

    async def _move(self, session: SessionId, leaving: Leaving) -> None:
        """Have one session go on at another worker, and wait until it does. Raises Refused."""
        record = next((r for r in self._coordinator.in_flight() if r.facts.session == session), None)
        if record is None:
            return
        self._require_room(leaving)
        await self._coordinator.operators.move(session)
        with suppress(TimeoutError):
            async with asyncio.timeout(MOVED_WITHIN_S):
                while not self._has_moved(record):  # noqa: ASYNC110 - an arena makes no noise
                    await asyncio.sleep(LOOK_EVERY_S / 4)
        if record.owner.epoch.worker == self._worker.name and self._is_in_flight(record):
            raise Refused("elsewhere", f"session {session} came back; it goes on where it was")
        self._metrics.drain_moves.labels("moved").inc()

    def _require_room(self, leaving: Leaving) -> None:
        able = [free for free in self._here.free() if free.key == leaving.key]
        if not able:
            raise Refused("no_target", "no other worker that is ready has its key; it stays where it is")
        wanted = leaving.positions + MORE_TOKENS
        if not any(free.places >= 1 and (free.tokens is None or free.tokens >= wanted) for free in able):
            raise Refused("no_room", f"no other worker has room for {wanted} positions; it stays where it is for now")

    def _has_moved(self, record: Record) -> bool:
        """Whether it has an owner elsewhere that has all of its KV, or has ended."""
        moved = record.source is record.owner and record.owner.epoch.worker != self._worker.name
        return moved or not self._is_in_flight(record)

    def _is_in_flight(self, record: Record) -> bool:
        return any(other is record for other in self._coordinator.in_flight())
