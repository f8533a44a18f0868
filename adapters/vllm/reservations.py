"""In place: the blocks of the epoch before, kept out of the free list until their sessions come back for them.

Owns which blocks are reserved and for whom. Invariant: a reserved block is never handed to anybody but its session,
and a block that several sessions share is handed to none of them (they get copies) until one is left. Works on
vLLM's BlockPool by three of its parts: `blocks[id].ref_cnt`, `free_block_queue` (popleft, remove, prepend_n) and
`free_blocks`.

vLLM takes new blocks from the front of its free list, so a session is given its own old blocks by putting them
there, in order, just before the scheduler allocates for it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...session.ids import SessionId


class Reservations:
    """Reserved blocks of sessions that have not come back yet."""

    def __init__(self, block_pool: Any, tables: Mapping[SessionId, Sequence[int]]) -> None:
        """Reserve all blocks of `tables` that are free now; a session with a block that is not free is left out."""
        self._pool = block_pool
        self._tables: dict[SessionId, tuple[int, ...]] = {}
        self._holds: Counter[int] = Counter()
        self._offers: dict[SessionId, list[int]] = {}
        self.lost = 0
        for session, table in tables.items():
            if all(self._reservable(block) for block in table):
                self._tables[session] = tuple(table)
                for block in table:
                    self._hold(block)
            else:
                self.lost += 1

    def __len__(self) -> int:
        return len(self._tables)

    def table(self, session: SessionId) -> tuple[int, ...] | None:
        """The reserved blocks of a session, or None."""
        return self._tables.get(session)

    def offer(self, session: SessionId, count: int) -> bool:
        """Arrange the free list so that the next `count` blocks taken from it are the session's first `count`."""
        self._take_offer_back(session)
        table = self._tables.get(session)
        if table is None or len(table) < count:
            return False
        front: list[Any] = []
        mine: list[int] = []
        for block_id in table[:count]:
            block = self._pool.blocks[block_id]
            if self._holds[block_id] == 1:
                mine.append(block_id)
            elif self._pool.free_block_queue.num_free_blocks:
                # Shared with another session that has not come back: the mover copies it into a free one.
                block = self._pool.free_block_queue.popleft()
            else:
                self._pool.free_block_queue.prepend_n(front)
                self._offers[session] = mine
                self._take_offer_back(session)
                return False
            block.ref_cnt = 0
            front.append(block)
        self._pool.free_block_queue.prepend_n(front)
        self._offers[session] = mine
        return True

    def settle(self, session: SessionId, given: Sequence[int]) -> bool:
        """After the allocation: True if the session owns exactly its old blocks now, so nothing is to be copied."""
        table = self._tables[session]
        offered = self._offers.pop(session, [])
        taken = set(offered) & set(given)
        for block_id in taken:
            del self._holds[block_id]
        self._tables[session] = tuple(b for b in table if b not in taken)
        self._offers[session] = [b for b in offered if b not in taken]
        self._take_offer_back(session)
        return tuple(given) == table[: len(given)]

    def withdraw(self) -> list[SessionId]:
        """Take back what was offered and not allocated; returns the sessions that must be offered again."""
        offered = list(self._offers)
        for session in offered:
            self._take_offer_back(session)
        return [session for session in offered if session in self._tables]

    def release(self, session: SessionId) -> None:
        """The session needs its reserved blocks no more."""
        self._take_offer_back(session)
        for block_id in self._tables.pop(session, ()):
            if block_id not in self._holds:
                continue
            self._holds[block_id] -= 1
            if self._holds[block_id] == 0:
                del self._holds[block_id]
                self._pool.free_blocks([self._pool.blocks[block_id]])

    def release_all(self) -> None:
        """Nobody comes back any more."""
        self.withdraw()
        for session in list(self._tables):
            self.release(session)

    def _reservable(self, block_id: int) -> bool:
        if block_id in self._holds:
            return True
        return 0 < block_id < len(self._pool.blocks) and self._pool.blocks[block_id].ref_cnt == 0

    def _hold(self, block_id: int) -> None:
        if not self._holds[block_id]:
            block = self._pool.blocks[block_id]
            self._pool.free_block_queue.remove(block)
            block.ref_cnt = 1
        self._holds[block_id] += 1

    def _take_offer_back(self, session: SessionId) -> None:
        """Reserve again what was offered and not taken; what somebody else was given costs its sessions their KV."""
        offered = self._offers.pop(session, [])
        given_away = [block_id for block_id in offered if self._pool.blocks[block_id].ref_cnt]
        # All others first: a session that loses its KV below gives back only what is reserved.
        for block_id in offered:
            block = self._pool.blocks[block_id]
            if block.ref_cnt == 0:
                self._pool.free_block_queue.remove(block)
                block.ref_cnt = 1
        for block_id in given_away:
            self.lost += 1
            del self._holds[block_id]
            for owner in [s for s, table in self._tables.items() if block_id in table]:
                self.release(owner)
