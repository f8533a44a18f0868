"""Follows a service with leases, and tells all who watch.

Owns the one task of a process that follows, the `Roster` that it keeps, and the pictures made of it. Invariants: a
picture is stale from the moment at which the service was last known to answer; nobody is taken out of it while it is;
a reader who is slow is given the newest picture and never a queue of old ones.

It never ends by itself: whatever goes wrong with the service is logged once, and it is followed again, with waits that
grow and are jittered.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable

from ...session.errors import CoordinationError, MidstreamError
from .backoff import Backoff
from .clock import Clock
from .coordination import TRY_S, Picture
from .lease_service import Current, Gone, LeaseService, Put, Whole, bounded
from .record import MemberId
from .roster import Roster

_log = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.1
_RETRY_LARGEST_S = 5.0
# Who has found a silent member waits up to so long before it asks for its burial, for all others have found it too.
_BURIAL_SPREAD_S = 0.5


class Informer:
    """What one process knows of a fleet's members. `draw` gives numbers in [0, 1)."""

    def __init__(self, service: LeaseService, every_s: float, clock: Clock, draw: Callable[[], float]) -> None:
        self._service = service
        self._every_s = every_s
        self._clock = clock
        self._draw = draw
        self._backoff = Backoff(_RETRY_FIRST_S, _RETRY_LARGEST_S, draw)
        self._roster = Roster(service.renewals)
        self._picture: Picture | None = None  # None until the first whole one
        self._version = 0
        self._is_loaded = False
        self._roster_version = -1
        self._bury_at_s = math.inf
        self._changed = asyncio.Event()
        self._answered_s = clock()
        self._told = ""
        self._unreadable_told = 0
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin to follow; does nothing where that goes on already."""
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._run(), name="fleet-informer")

    async def watch(self) -> AsyncIterator[Picture]:
        """Pictures, the newest first, until `close`."""
        self.start()
        seen = 0
        while not self._is_closed:
            changed = self._changed
            if self._picture is not None and self._version != seen:
                seen = self._version
                yield self._picture
            else:
                await changed.wait()

    async def is_over(self, member: MemberId) -> bool:
        """Whether no token can come from this member any more, as far as is known here.

        The service is asked about one that was never heard of; a lease later it is over if there is none. ValueError
        when that is no member's id.
        """
        self.start()
        is_known = self._roster.knows(member)
        if not is_known and not await bounded(self._service.name, self._service.is_there(member)):
            self._roster.absent(self._clock(), member)
        return self._roster.is_over(self._clock(), member)

    def first(self) -> MemberId | None:
        """Of the members whose leases are at the service the one whose id comes first; None while that is not known."""
        if self._picture is None or self._picture.stale_since_s is not None:
            return None
        return next((m.id for m in self._picture.members.values() if not m.is_fading), None)

    def forget(self, member: MemberId) -> None:
        """This process had that id, and its fence is closed for good."""
        self._roster.forget(member)
        self._publish(stale_since_s=self._picture.stale_since_s if self._picture else None)

    async def close(self) -> None:
        """End the task and all watches."""
        self._is_closed = True
        self._wake()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except MidstreamError as error:
                self._lost(str(error))
            except Exception:
                # A defect here must not look like a fleet in which nothing changes any more.
                _log.exception("fleet: following failed")
                self._lost("following failed")
            await asyncio.sleep(self._backoff.wait_s())

    async def _follow(self) -> None:
        changes = self._service.follow(self._every_s)
        pending: asyncio.Future[Whole | Put | Gone | Current] | None = None
        try:
            heard_s = self._clock()
            while True:
                if pending is None:
                    pending = asyncio.ensure_future(anext(changes))
                now_s = self._clock()
                silence_left_s = heard_s + self._every_s + 2 * TRY_S - now_s
                if silence_left_s <= 0:
                    raise CoordinationError(f"{self._service.name}: nothing was heard for {now_s - heard_s:.1f} s")
                await asyncio.wait([pending], timeout=max(0.0, min(silence_left_s, self._due_s(now_s) - now_s)))
                if pending.done():
                    done, pending = pending, None
                    self._heard(done.result())
                    heard_s = self._clock()
                if self._is_current:
                    await self._elapse()
        except StopAsyncIteration:
            raise CoordinationError(f"{self._service.name}: what follows it has ended; following again") from None
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
            await changes.aclose()  # type: ignore[attr-defined]

    @property
    def _is_current(self) -> bool:
        return self._picture is not None and self._picture.stale_since_s is None

    def _heard(self, change: Whole | Put | Gone | Current) -> None:
        now_s = self._answered_s = self._clock()
        match change:
            case Whole(entries):
                self._roster.whole(now_s, entries)
                self._is_loaded = True
                if self._told:
                    _log.info("fleet: service=%s answers again", self._service.name)
                    self._told = ""
            case Put(member, entry):
                self._roster.put(now_s, member, entry)
            case Gone(member):
                self._roster.gone(now_s, member)
            case Current():
                self._backoff.succeeded()  # not before: who is cut off right after the whole would list without end
        if self._roster.unreadable_count > self._unreadable_told:
            if self._unreadable_told == 0:
                _log.warning(
                    "fleet: service=%s a member's record cannot be read here: other version?", self._service.name
                )
            self._unreadable_told = self._roster.unreadable_count
        self._publish(stale_since_s=None)

    def _due_s(self, now_s: float) -> float:
        """When there is something to do even if nothing is heard."""
        if not self._is_current:
            return math.inf
        if not self._roster.silent(now_s):
            self._bury_at_s = math.inf
            return self._roster.next_s()
        if self._bury_at_s == math.inf:
            self._bury_at_s = now_s + self._draw() * _BURIAL_SPREAD_S
        return self._bury_at_s

    async def _elapse(self) -> None:
        self._roster.tick(self._clock())
        if self._clock() >= self._bury_at_s:
            self._bury_at_s = math.inf
            for member, mark in self._roster.silent(self._clock()):
                await self._bury(member, mark)
        self._publish(stale_since_s=None)

    async def _bury(self, member: MemberId, mark: str) -> None:
        was_buried = await bounded(self._service.name, self._service.bury(member, mark))
        if was_buried:
            _log.warning("fleet: member=%s was silent for a whole lease and is lost", member)
            self._roster.gone(self._clock(), member)
        else:
            self._roster.is_alive(self._clock(), member)

    def _lost(self, why: str) -> None:
        if not self._told:
            _log.warning("fleet: service=%s does not answer: %s", self._service.name, why)
            self._told = why
        if self._picture is not None and self._picture.stale_since_s is None:
            self._publish(stale_since_s=self._answered_s)

    def _publish(self, stale_since_s: float | None) -> None:
        if not self._is_loaded:
            return
        known = self._picture
        if known is None or self._roster.version != self._roster_version or known.stale_since_s != stale_since_s:
            self._roster_version = self._roster.version
            self._picture = Picture(self._roster.members(), stale_since_s)
            self._version += 1
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
