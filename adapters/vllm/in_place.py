"""Sessions that come back to the pool that their engine left: whose blocks are kept for whom, and for how long.

Owns the reservations of one engine (`reservations.py`) from when its block pool is there until nobody comes back any
more: the sidecar removes the old arena then; if it died, a limit ends it. Without an adopted pool there are none, and
everybody is answered accordingly. Called by the engine core's one thread.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...session.arena import ArenaReader, SlotState
from ...session.ids import SessionId
from ..guard import log
from .reservations import Reservations

CHECK_S = 1.0
# Longer than any session waits for its worker: blocks of those who never come are the engine's capacity.
RESERVED_S_MAX = 1200.0


class InPlace:
    """`old` is the arena of the epoch before; `lost` counts sessions that do not find their blocks."""

    def __init__(self, block_pool: Any, old: Path, lost: Callable[[], object]) -> None:
        self._pool = block_pool
        self._old = old
        self._lost = lost
        self._reservations: Reservations | None = Reservations(block_pool, _tables(old))
        self._until_s = time.monotonic() + RESERVED_S_MAX
        self._checked_s = 0.0
        for _ in range(self._reservations.lost):
            lost()
        log.info("midstream: adopted pool, blocks of %d sessions reserved", len(self._reservations))

    def holds(self, session: SessionId) -> bool:
        """Whether blocks are reserved for a session."""
        return self._reservations is not None and self._reservations.table(session) is not None

    def offer(self, session: SessionId, count: int) -> bool:
        """Have the next `count` blocks that are allocated be the session's own."""
        if self._reservations is not None and self._reservations.offer(session, count):
            return True
        self._lost()
        return False

    def settle(self, session: SessionId, given: list[int]) -> bool:
        """After the allocation: whether the session has all of its old blocks, so that nothing is to be copied."""
        return self._reservations is not None and self.holds(session) and self._reservations.settle(session, given)

    def release(self, session: SessionId) -> None:
        """The session needs its reserved blocks no more."""
        if self._reservations is not None:
            self._reservations.release(session)

    def is_short_of(self, blocks: int) -> bool:
        """Whether so many blocks are not free, while some are reserved."""
        return self._reservations is not None and blocks > self._pool.get_num_free_blocks()

    def step(self) -> list[SessionId]:
        """In each step: whose offers were not taken, and must be made again."""
        if self._reservations is None:
            return []
        withdrawn = self._reservations.withdraw()
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_S:
            self._checked_s = now_s
            if now_s > self._until_s or not self._old.exists():
                self._reservations.release_all()
                self._reservations = None
        return withdrawn


def _tables(old: Path) -> dict[SessionId, tuple[int, ...]]:
    """The blocks of all sessions that may come back, each of its newest owner."""
    reader = ArenaReader(old)
    try:
        newest = {}
        for slot in sorted(reader.slots(), key=lambda s: s.generation):
            if slot.state is SlotState.LIVE and reader.kv_len(slot):
                newest[slot.session] = tuple(reader.table(slot).blocks)
        return newest
    finally:
        reader.close()
