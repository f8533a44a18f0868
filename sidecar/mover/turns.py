"""Whose turn it is: at most so many at once, and of those who wait the most urgent first. Pure but for the event loop.

Invariant: a turn that was taken is given back exactly once, also by one who was cancelled while waiting or just when
its turn came. Belongs to one event loop.
"""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator


class Turns:
    """Turns for `at_once` at a time."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @contextlib.asynccontextmanager
    async def turn(self, deadline: float) -> AsyncIterator[None]:
        """A turn: the earliest deadline first, and of equal ones who came first."""
        await self._take(deadline)
        try:
            yield
        finally:
            self._give()

    async def _take(self, deadline: float) -> None:
        if self._free > 0:
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (deadline, next(self._order), mine))
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():
                self._give()
            raise

    def _give(self) -> None:
        while self._waiting:
            _, _, next_one = heapq.heappop(self._waiting)
            if not next_one.done():
                next_one.set_result(None)
                return
        self._free += 1
