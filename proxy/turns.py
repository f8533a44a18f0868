"""Whose takeover is sent to a worker next, when many sessions come to it at once.

An engine's front end works on all requests that it has by turns, so that of thirty that come together not one is
through with it before nearly all are; its core has nothing to do meanwhile, and too much afterwards. Sent a few at a
time, the first ones decode while the last ones are read. Invariant: nobody waits for one who is slow: a turn ends with
the head of the answer, or after a while. It bounds no work of the engine, which goes on with all of them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

# For each process that reads requests.
AT_ONCE = 3
# Longer than a front end takes to read a prompt of some ten thousand tokens.
LONGEST_S = 0.05


class Turns:
    """The turns at each worker."""

    def __init__(self) -> None:
        # A worker that nobody waits for is forgotten.
        self._of_workers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def at(self, worker: str, front_ends: int = 1) -> AsyncIterator[None]:
        """One's turn at a worker, first come, first served; over with the block, or before that after a while."""
        turns = self._of_workers.setdefault(worker, asyncio.Semaphore(AT_ONCE * front_ends))
        await turns.acquire()
        mine = _Turn(turns)
        ending = asyncio.get_running_loop().call_later(LONGEST_S, mine.end)
        try:
            yield
        finally:
            ending.cancel()
            mine.end()


class _Turn:
    """One turn that was given, and is given back once."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._over = False

    def end(self) -> None:
        """Give it back, unless it was."""
        if not self._over:
            self._over = True
            self._turns.release()
