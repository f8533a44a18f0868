"""Work that can wait makes way for sessions that wait for their KV.

Owns how many of these there are, and how long others make way. Invariant: bounded, so that however many sessions are
restored one after the other, blocks are summed and kept all the same. Belongs to one event loop.
"""

import asyncio
import contextlib

# Many restores at once are over by then; whatever takes longer waits for a disk or a link.
WAY_S_MAX = 0.1


class Way:
    """Free while no session waits for nothing but its KV."""

    def __init__(self) -> None:
        self._sessions = 0
        self._free = asyncio.Event()
        self._free.set()

    def enter(self) -> None:
        """One more session waits."""
        self._sessions += 1
        self._free.clear()

    def leave(self) -> None:
        """One of them has been answered."""
        self._sessions -= 1
        if not self._sessions:
            self._free.set()

    async def make(self) -> None:
        """Return when none of them waits, or after WAY_S_MAX."""
        if not self._free.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAY_S_MAX):
                    await self._free.wait()
