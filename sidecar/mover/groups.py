"""Who is prepared next, and what is carried out together: the order of all copies into one memory.

Many restores come at once, and what each costs beside the copy itself decides how long the last one takes. So they are
let in a few at a time, the most urgent first; what those have prepared is one call in a worker thread; and the next few
are let in as soon as that call has started its work, so that they are prepared while a GPU copies, but not while the
thread that starts it needs the interpreter. Where something is copied already twice as many are let in: there is the
time to prepare them, and what a call costs by itself is there once for all of them. Invariant: every place that was
given is used or given back, also by one who was cancelled; nobody who has handed in work goes on before that work is
over. Belongs to one event loop.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from ...session.errors import PoolError
from .burst import CallTimes
from .pools import Copied, Copies, CopySource, Pool


@dataclass(frozen=True, slots=True)
class Work:
    """What one restore hands in: blocks to be copied from one place into a pool."""

    source: CopySource
    destination: Pool
    copies: Copies


@dataclass(slots=True)
class _Group:
    """Those who were let in together; `missing` of them have neither handed in anything nor left."""

    missing: int
    works: list[Work] = field(default_factory=list)
    waiting: "list[asyncio.Future[Copied | PoolError]]" = field(default_factory=list)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class Place:
    """The right to hand in work, once, in turn: the earliest deadline first, and of equal ones who came first."""

    __slots__ = ("_deadline", "_group", "_groups")

    def __init__(self, groups: "Groups", deadline: float) -> None:
        self._groups = groups
        self._deadline = deadline
        self._group: _Group | None = None

    async def __aenter__(self) -> "Place":
        self._group = await self._groups.let_in(self._deadline)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the place back if nothing was handed in."""
        group, self._group = self._group, None
        if group is not None:
            self._groups.left(group)

    async def copy(self, work: Work) -> Copied:
        """Have it carried out with that of the others; never returns before it is over. Raises PoolError."""
        group, self._group = self._group, None
        assert group is not None
        done = await self._groups.settled(group, work)
        if isinstance(done, PoolError):
            raise done
        return done


class Groups:
    """Lets in `together` at a time, twice as many behind others, and has at most `at_once` calls running.

    `told` is told how each call went, and when that was seen.
    """

    def __init__(
        self, together: int, at_once: int, told: Callable[[CallTimes, float], object] = lambda times, seen_s: None
    ) -> None:
        self._together = together
        self._at_once = at_once
        self._free = at_once
        self._told = told
        self._waiting: list[tuple[float, int, asyncio.Future[_Group]]] = []
        self._order = itertools.count()
        self._forming: _Group | None = None
        self._called = False

    def place(self, deadline: float) -> Place:
        """A place, to be entered."""
        return Place(self, deadline)

    async def let_in(self, deadline: float) -> _Group:
        """Wait for one's turn."""
        mine: asyncio.Future[_Group] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (deadline, next(self._order), mine))
        self._form_soon()
        try:
            return await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.left(mine.result())
            raise

    async def settled(self, group: _Group, work: Work) -> "Copied | PoolError":
        """One of a group hands in its work; returns when all of the group's is over, also when cancelled."""
        mine: asyncio.Future[Copied | PoolError] = asyncio.get_running_loop().create_future()
        group.works.append(work)
        group.waiting.append(mine)
        self._one_less(group)
        try:
            return await mine
        except asyncio.CancelledError:
            # The memory is a worker thread's until then.
            await group.is_over.wait()
            raise

    def left(self, group: _Group) -> None:
        """One of a group hands in nothing."""
        self._one_less(group)

    def _one_less(self, group: _Group) -> None:
        group.missing -= 1
        if group.missing:
            return
        if not group.works:
            self._next(group)
            return
        loop = asyncio.get_running_loop()
        self._free -= 1
        times = CallTimes(time.monotonic())

        def started() -> None:
            if not times.sent_s:
                times.sent_s = time.monotonic()
                loop.call_soon_threadsafe(self._next, group)

        running = loop.run_in_executor(None, _carry_out, group.works, started, times)
        running.add_done_callback(lambda done: self._over(group, times, done))
        if self._together == 1:
            self._next(group)

    def _over(self, group: _Group, times: CallTimes, running: "asyncio.Future[list[Copied | PoolError]]") -> None:
        self._free += 1
        group.is_over.set()
        error = None if running.cancelled() else running.exception()
        for index, mine in enumerate(group.waiting):
            if mine.done():
                continue
            if running.cancelled():
                mine.cancel()
            elif error is not None:
                mine.set_exception(error)
            else:
                mine.set_result(running.result()[index])
        if error is None and not running.cancelled():
            self._told(times, time.monotonic())
        self._next(group)

    def _next(self, group: _Group) -> None:
        """A group has started, or never will: it is the next one's turn."""
        if self._forming is group:
            self._forming = None
        self._form_soon()

    def _form_soon(self) -> None:
        """Let the next ones in, after everybody who comes at the same time has come."""
        if not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._form)

    def _form(self) -> None:
        self._called = False
        if self._forming is not None or self._free <= 0:
            return
        members: list[asyncio.Future[_Group]] = []
        is_behind = self._together > 1 and self._free < self._at_once
        while self._waiting and len(members) < self._together * (1 + is_behind):
            _, _, mine = heapq.heappop(self._waiting)
            if not mine.done():
                members.append(mine)
        if members:
            group = self._forming = _Group(len(members))
            for mine in members:
                mine.set_result(group)


def _carry_out(works: Sequence[Work], started: Callable[[], object], times: CallTimes) -> "list[Copied | PoolError]":
    """In a worker thread: what goes from one pool into another one is one call."""
    times.begun_s = time.monotonic()
    found: dict[int, Copied | PoolError] = {}
    pairs: dict[tuple[int, int], list[int]] = {}
    for index, work in enumerate(works):
        pairs.setdefault((id(work.source), id(work.destination)), []).append(index)
    for indices in pairs.values():
        first = works[indices[0]]
        try:
            done = first.source.copy_all(first.destination, [works[index].copies for index in indices], started)
            found |= zip(indices, done, strict=True)
        except PoolError as error:
            found |= dict.fromkeys(indices, error)
    times.over_s = time.monotonic()
    # Who was refused has sent nothing.
    times.sent_s = times.sent_s or times.over_s
    return [found[index] for index in range(len(works))]
