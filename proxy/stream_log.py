"""What is kept of one stream: its newest events, as they were sent. Pure.

Invariant: the events that are there follow each other without a gap, and the newest is always among them unless nothing
is. It decides nothing about how much is kept, and does not know who reads.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice


class StreamLog:
    """The events `first` to `last`; there are none when `first` is one more than `last`."""

    __slots__ = ("_events", "last", "size_bytes")

    def __init__(self) -> None:
        self._events: deque[bytes] = deque()
        self.last = 0
        self.size_bytes = 0

    @property
    def first(self) -> int:
        """The number of the oldest event that is there, or of the next one to come."""
        return self.last - len(self._events) + 1

    def append(self, events: Iterable[bytes]) -> None:
        """Events that follow those that are there."""
        for event in events:
            self._events.append(event)
            self.last += 1
            self.size_bytes += len(event)

    def has_after(self, position: int) -> bool:
        """Whether all that follows an event is there: nothing does after the last one."""
        return self.first - 1 <= position <= self.last

    def after(self, position: int, bytes_max: int) -> tuple[bytes, int]:
        """The events after a position that fit in so many bytes, but at least one if there is any, and where they end.

        Ask only for what `has_after` says is there.
        """
        taken: list[bytes] = []
        size_bytes = 0
        for event in islice(self._events, position - self.first + 1, None):
            size_bytes += len(event)
            if taken and size_bytes > bytes_max:
                break
            taken.append(event)
        return b"".join(taken), position + len(taken)

    def trim(self, position: int, bytes_max: int) -> int:
        """Drop the oldest of the events up to a position until all are at most `bytes_max`; how many bytes that was."""
        before = self.size_bytes
        while self.size_bytes > bytes_max and self._events and self.first <= position:
            self.size_bytes -= len(self._events.popleft())
        return before - self.size_bytes
