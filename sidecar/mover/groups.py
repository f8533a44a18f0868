"""Who is prepared next, and what is carried out together: the order of all copies into one memory.

Many restores come at once, and what each costs beside the copy itself decides how long the last one takes. So they are
let in a few at a time, the most urgent first; what those have prepared is one call in a worker thread; and the next few
are let in as soon as that call has started its work, so that they are prepared while a GPU copies, but not while the
thread that starts it needs the interpreter. Invariant: every place that was given is used or given back, also by one
who was cancelled; nobody who has handed in work goes on before that work is over. Belongs to one event loop.
"""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from ...session.errors import PoolError
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
    over: "asyncio.Future[list[Copied | PoolError]] | None" = None


class Place:
    """The right to hand in work, once."""

    def __init__(self, groups: "Groups", group: _Group) -> None:
        self._groups = groups
        self._group = group
        self._used = False

    async def copy(self, work: Work) -> Copied:
        """Have it carried out with that of the others; never returns before it is over. Raises PoolError."""
        self._used = True
        index = len(self._group.works)
        self._group.works.append(work)
        done = (await self._groups.settled(self._group))[index]
        if isinstance(done, PoolError):
            raise done
        return done

    def leave(self) -> None:
        """Give the place back if nothing was handed in."""
        if not self._used:
            self._used = True
            self._groups.left(self._group)


class Groups:
    """Lets in `together` at a time, and has at most `at_once` calls running."""

    def __init__(self, together: int, at_once: int) -> None:
        self._together = together
        self._free = at_once
        self._waiting: list[tuple[float, int, asyncio.Future[_Group]]] = []
        self._order = itertools.count()
        self._forming: _Group | None = None
        self._called = False

    @contextlib.asynccontextmanager
    async def place(self, deadline: float) -> AsyncIterator[Place]:
        """A place: the earliest deadline first, and of equal ones who came first."""
        mine: asyncio.Future[_Group] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (deadline, next(self._order), mine))
        self._form_soon()
        try:
            group = await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.left(mine.result())
            raise
        place = Place(self, group)
        try:
            yield place
        finally:
            place.leave()

    async def settled(self, group: _Group) -> "list[Copied | PoolError]":
        """One more of a group has handed in its work; returns when all of it is over, also when cancelled."""
        loop = asyncio.get_running_loop()
        if group.over is None:
            group.over = loop.create_future()
        over = group.over
        self._one_less(group)
        try:
            return await asyncio.shield(over)
        except asyncio.CancelledError:
            # The memory is a worker thread's until then.
            await asyncio.wait({over})
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
        running = loop.run_in_executor(
            None, _carry_out, group.works, lambda: loop.call_soon_threadsafe(self._next, group)
        )
        running.add_done_callback(lambda done: self._over(group, done))
        if self._together == 1:
            self._next(group)

    def _over(self, group: _Group, running: "asyncio.Future[list[Copied | PoolError]]") -> None:
        self._free += 1
        assert group.over is not None
        if running.cancelled():
            group.over.cancel()
        elif (error := running.exception()) is not None:
            group.over.set_exception(error)
        else:
            group.over.set_result(running.result())
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
        while self._waiting and len(members) < self._together:
            _, _, mine = heapq.heappop(self._waiting)
            if not mine.done():
                members.append(mine)
        if members:
            group = self._forming = _Group(len(members))
            for mine in members:
                mine.set_result(group)


def _carry_out(works: Sequence[Work], started: Callable[[], object]) -> "list[Copied | PoolError]":
    """In a worker thread: what goes from one pool into another one is one call. `started` is called at least once."""
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
    return [found[index] for index in range(len(works))]
