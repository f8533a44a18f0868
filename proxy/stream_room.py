"""How many bytes all kept streams may take together, and each of them.

Owns the count. Invariant: streams that nobody reads never take more than the bound: they wait (`tell`) until there is
room again. A stream whose reader has had everything never waits, it keeps less: all of these together have a half of
the room at most, divided evenly, so that the other half is there for streams that lose their reader.
"""

import asyncio
from collections.abc import Callable

# Those who wait are woken together: often enough, but not by each event that somebody drops.
_WAKE_AT = 7 / 8


class Room:
    """The room of all streams. `reclaim` drops what is needed least, and says whether there was anything."""

    def __init__(self, bytes_max: int, stream_bytes_max: int, reclaim: Callable[[], bool]) -> None:
        self.held_bytes = 0
        self.stream_bytes_max = stream_bytes_max
        self._bytes_max = bytes_max
        self._reclaim = reclaim
        self._waiting: set[asyncio.Event] = set()
        self._share_bytes = 0
        self.share_among(1)

    @property
    def share_bytes(self) -> int:
        """How much a stream may keep of what its reader has had."""
        return self._share_bytes if self.held_bytes <= self._bytes_max else 0

    def share_among(self, count: int) -> None:
        """So many streams are kept."""
        self._share_bytes = min(self.stream_bytes_max, self._bytes_max // max(1, count)) // 2

    def has(self, size_bytes: int) -> bool:
        """Whether so much more fits, if need be in place of something that is needed less."""
        while self.held_bytes + size_bytes > self._bytes_max:
            if not self._reclaim():
                return False
        return True

    def take(self, size_bytes: int) -> None:
        """So much more is kept."""
        self.held_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """So much less is kept."""
        self.held_bytes -= size_bytes
        if self._waiting and self.held_bytes <= self._bytes_max * _WAKE_AT:
            waiting, self._waiting = self._waiting, set()
            for event in waiting:
                event.set()

    def tell(self, event: asyncio.Event) -> None:
        """Set an event when there is room again."""
        self._waiting.add(event)

    def forget(self, event: asyncio.Event) -> None:
        """Nobody waits for that event any more."""
        self._waiting.discard(event)
