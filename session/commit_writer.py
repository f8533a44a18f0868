"""A rank's side of an arena: its commit record, and nothing else.

Invariant: a step is committed only if every step before it was, by this very process. One that failed, or was never
seen here, ends the commits of this rank for good: what it would have written is missing, whatever comes after.
"""

from collections.abc import Callable
from pathlib import Path

from .arena import ArenaMap
from .commits import FIRST_STEP, RANKS_MAX, commit_cell, commit_offset, following, probe_offset
from .errors import ArenaError

# Stores a number of 8 bytes at an offset of the arena, as soon as what was begun before it is done.
Store = Callable[[int, int], None]


class CommitWriter:
    """Writes the commit record of one rank. `store_in` makes a way to store for memory that others compute in."""

    def __init__(self, path: Path, rank: int, store_in: Callable[[ArenaMap], Store] | None = None) -> None:
        if not 0 <= rank < RANKS_MAX:
            raise ArenaError(f"arena {path}: rank {rank} has no commit record there; use at most {RANKS_MAX} ranks")
        self._map = ArenaMap(path)
        self._rank = rank
        self._store = self._at_once if store_in is None else store_in(self._map)
        self._next: int | None = FIRST_STEP
        self._last: int | None = None

    def store_probe(self, number: int) -> None:
        """Store a number where nobody reads it but `read_probe`."""
        self._store(probe_offset(self._rank), number)

    def read_probe(self) -> int:
        """What was stored there."""
        offset = probe_offset(self._rank)
        return int.from_bytes(self._map.view[offset : offset + 8], "little")

    def commit(self, step: int) -> bool:
        """All KV that this rank had to write up to and in `step` is written; False where that is not known."""
        if self._next is None:
            return False
        if step == self._last:
            return True
        if step != self._next:
            self.stop()
            return False
        self._store(commit_offset(self._rank, step), commit_cell(self._rank, step))
        self._last, self._next = step, following(step)
        return True

    def stop(self) -> None:
        """A step failed: nothing is committed any more."""
        self._next = None

    @property
    def stopped(self) -> bool:
        """Whether nothing is committed any more."""
        return self._next is None

    def close(self) -> None:
        """Unmap; the record stays."""
        self._map.close()

    def _at_once(self, offset: int, cell: int) -> None:
        self._map.view[offset : offset + 8] = cell.to_bytes(8, "little")
