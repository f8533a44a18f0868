"""Waits for lifelines to break, all of a sidecar's in one thread, and tells the event loop.

Owns the thread and the mappings of the files that it watches. Invariants: a cell's end is told once; nothing is told of
a file that was let go of; what is mapped is unmapped by the thread alone, which may be looking at it. One wait of the
kernel's takes in all words; where there is none (before Linux 5.16, or in some sandboxes), or for more words than it
takes, they are looked at every few milliseconds. Whose death matters is not decided here.
"""

import asyncio
import ctypes
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..session import futex
from ..session.lifeline import Hold, Holder, LifelineFile

# Cells that were taken since the last look; and a second chance, should a wake-up ever get lost.
LOOK_EVERY_S = 0.25
POLL_S = 0.005
_END_WITHIN_S = 5.0
_LOG = logging.getLogger("midstream.lifelines")


class Watched:
    """One file that is being watched, until `close`."""

    def __init__(self, file: LifelineFile, on_broken: Callable[[Holder], None], ring: Callable[[], None]) -> None:
        self.file = file
        self.is_closed = False
        self._on_broken = on_broken
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._told: set[int] = set()

    def close(self) -> None:
        """Nothing is told of it any more."""
        self.is_closed = True
        self._ring()

    def look(self) -> list[tuple[int, int]]:
        """Tell what is new; returns the words that may yet break, with their values. In the watching thread."""
        held = []
        for hold, address, value in self.file.look():
            if hold is Hold.HELD:
                held.append((address, value))
            elif address not in self._told:
                self._told.add(address)
                with suppress(RuntimeError):  # the loop has been closed
                    self._loop.call_soon_threadsafe(self._tell, self.file.holder(address))
        return held

    def _tell(self, holder: Holder) -> None:
        if not self.is_closed:
            self._on_broken(holder)


class LifelineWatch:
    """All lifelines that a sidecar watches. Call it from the event loop."""

    def __init__(self, *, can_wait: bool = True) -> None:
        """`can_wait`: whether to try the kernel's wait for many words."""
        self._can_wait = can_wait and futex.is_supported()
        self._lock = threading.Lock()
        self._watched: list[Watched] = []
        # A word of this process: what is added or closed is looked at without delay.
        self._bell = ctypes.c_uint32(0)
        self._is_over = False
        self._thread: threading.Thread | None = None

    def add(self, path: Path, on_broken: Callable[[Holder], None]) -> Watched:
        """Watch a file: `on_broken` is called in the event loop for each cell whose process begins to end, or has.

        LifelineError when it is none.
        """
        watched = Watched(LifelineFile(path), on_broken, self._ring)
        with self._lock:
            self._watched.append(watched)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lifelines", daemon=True)
            self._thread.start()
        self._ring()
        return watched

    def close(self) -> None:
        """End the thread; nothing is told any more."""
        with self._lock:
            for watched in self._watched:
                watched.is_closed = True
        self._is_over = True
        self._ring()
        if self._thread is not None:
            self._thread.join(_END_WITHIN_S)

    def _ring(self) -> None:
        with self._lock:
            self._bell.value = (self._bell.value + 1) % 2**32
        if self._can_wait:
            futex.wake_all(ctypes.addressof(self._bell))

    def _run(self) -> None:
        while True:
            # Read before the look: what changes during it ends the wait at once.
            bell = self._bell.value
            words = [word for watched in self._current() for word in watched.look()]
            if self._is_over and not self._watched:
                return
            self._wait([(ctypes.addressof(self._bell), bell), *words])

    def _current(self) -> list[Watched]:
        with self._lock:
            closed = [watched for watched in self._watched if watched.is_closed]
            self._watched = [watched for watched in self._watched if not watched.is_closed]
            current = list(self._watched)
        for watched in closed:
            watched.file.close()
        return current

    def _wait(self, words: list[tuple[int, int]]) -> None:
        if self._can_wait and len(words) <= futex.WAIT_MAX:
            try:
                futex.wait_any(words, LOOK_EVERY_S)
                return
            except OSError as error:
                _LOG.info("event=lifelines_polled every_s=%g reason=%s", POLL_S, error)
                self._can_wait = False
        time.sleep(POLL_S if len(words) > 1 else LOOK_EVERY_S)
