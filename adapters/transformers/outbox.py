"""The bounded way from the decode thread to one client's handler.

Owns back-pressure: when the handler does not take, the outbox fills up, and the engine leaves its session alone (and no
other) until there is room again. Ending pieces always fit.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from .output import Piece

CAPACITY = 64


class Outbox:
    """Pieces of one session: the decode thread puts, one coroutine of `loop` takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_room: Callable[[], None]) -> None:
        self._loop = loop
        self._on_room = on_room
        self._lock = threading.Lock()
        self._pieces: deque[Piece] = deque()
        self._filled = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether the session has to wait for its client."""
        return len(self._pieces) >= CAPACITY

    def put(self, piece: Piece) -> None:
        """Hand a piece over (decode thread)."""
        with self._lock:
            self._pieces.append(piece)
            first = len(self._pieces) == 1
        if first:
            try:
                self._loop.call_soon_threadsafe(self._filled.set)
            except RuntimeError:
                # The loop has been closed: nobody will take any more.
                self._pieces.clear()

    async def take(self) -> list[Piece]:
        """All pieces that are there, at least one."""
        while True:
            await self._filled.wait()
            with self._lock:
                pieces = list(self._pieces)
                self._pieces.clear()
                self._filled.clear()
            if pieces:
                if len(pieces) >= CAPACITY:
                    self._on_room()
                return pieces
