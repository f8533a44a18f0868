"""Whose turn it is to be saved, of the sessions that leave one node.

Owns the order. Invariants: one has its turn at a time, the most urgent of those that wait and of equals the first, so
no tail waits for the first snapshot of another session; but whoever takes longer than `alone_s` goes on beside the
next one, so no session keeps all others of a node that has a deadline.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import IntEnum
from itertools import count

ALONE_S = 10.0


class Urgency(IntEnum):
    """What is to be saved: the smaller, the more urgent."""

    TAIL = 0
    MORE = 1
    FIRST = 2


class Turns:
    """Of one node."""

    def __init__(self, alone_s: float = ALONE_S) -> None:
        self._alone_s = alone_s
        self._is_taken = False
        self._waiting: list[tuple[Urgency, int, asyncio.Future[None]]] = []
        self._numbers = count()

    @asynccontextmanager
    async def turn(self, urgency: Urgency) -> AsyncIterator[None]:
        """Wait for it; it is over when the block is, and for others after `alone_s` at the latest."""
        await self._take(urgency)
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._give_on()

        timer = asyncio.get_running_loop().call_later(self._alone_s, end)
        try:
            yield
        finally:
            timer.cancel()
            end()

    async def _take(self, urgency: Urgency) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (urgency, next(self._numbers), given))
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                # It had come just then.
                self._give_on()
            raise

    def _give_on(self) -> None:
        while self._waiting:
            _, _, given = heapq.heappop(self._waiting)
            if not given.done():
                given.set_result(None)
                return
        self._is_taken = False
