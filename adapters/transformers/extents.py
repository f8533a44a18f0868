"""Which blocks of a pool are free: contiguous runs, first fit. Pure.

A session gets one run of blocks for its whole life, so that its keys and values are plain strided views of the pool and
attention copies nothing. Invariant: free runs are sorted, disjoint and never adjacent; a block is either in one of them
or somebody's. Who that somebody is, is not known here.
"""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """The blocks `start, start + 1, ..., start + count - 1` of a pool."""

    start: int
    count: int

    @property
    def end(self) -> int:
        """The first block after the run."""
        return self.start + self.count

    @property
    def blocks(self) -> range:
        """The run as a block table."""
        return range(self.start, self.end)

    @classmethod
    def of_table(cls, blocks: tuple[int, ...]) -> "Run | None":
        """The run that a block table describes; None when it is empty or not contiguous."""
        if not blocks or blocks != tuple(range(blocks[0], blocks[0] + len(blocks))):
            return None
        return cls(blocks[0], len(blocks))


class Extents:
    """The free runs of a pool of `block_count` blocks."""

    def __init__(self, block_count: int) -> None:
        self.block_count = block_count
        self._free: list[Run] = [Run(0, block_count)] if block_count else []

    @property
    def free_count(self) -> int:
        """Blocks that are free, all runs together."""
        return sum(run.count for run in self._free)

    def take(self, count: int) -> Run | None:
        """The first free run of `count` blocks, no longer free; None when there is none."""
        for index, run in enumerate(self._free):
            if run.count >= count:
                rest = Run(run.start + count, run.count - count)
                self._free[index : index + 1] = [rest] if rest.count else []
                return Run(run.start, count)
        return None

    def reserve(self, wanted: Run) -> bool:
        """Take exactly these blocks; False (and nothing changed) unless all of them are free."""
        index = self._index_before(wanted.start)
        if wanted.count < 1 or index < 0 or self._free[index].end < wanted.end:
            return False
        run = self._free[index]
        left = Run(run.start, wanted.start - run.start)
        right = Run(wanted.end, run.end - wanted.end)
        self._free[index : index + 1] = [part for part in (left, right) if part.count]
        return True

    def give(self, run: Run) -> None:
        """Make a run free again. ValueError when a block of it is free already: two owners would share it next."""
        if run.count < 1 or run.start < 0 or run.end > self.block_count:
            raise ValueError(f"{run} is not in a pool of {self.block_count} blocks")
        index = self._index_before(run.start)
        before = self._free[index] if index >= 0 else None
        after = self._free[index + 1] if index + 1 < len(self._free) else None
        if (before is not None and before.end > run.start) or (after is not None and after.start < run.end):
            raise ValueError(f"{run} is free already")
        first, last, merged = index + 1, index + 1, run
        if before is not None and before.end == run.start:
            first, merged = index, Run(before.start, before.count + merged.count)
        if after is not None and after.start == run.end:
            last, merged = index + 2, Run(merged.start, merged.count + after.count)
        self._free[first:last] = [merged]

    def _index_before(self, block: int) -> int:
        """Index of the last free run that starts at or before `block`; -1 when there is none."""
        return bisect_right(self._free, block, key=lambda run: run.start) - 1
