"""Blocks that a late mover might still write to: kept from everybody until it has answered.

A load that timed out leaves the engine without KV for it, but the mover may have been stopped between two blocks
and go on later. Invariant: a block that was promised to the mover is not given to another request before the
mover's answer, or before no mover could be alive that has not given it.
"""

import time
from collections.abc import Sequence
from typing import Any

from ...session.arena_writer import SlotWriter
from ...session.records import LoadState

# A mover that is stopped for longer than any deadline of a restore is gone: its blocks would be lost for good.
HELD_S_MAX = 600.0


class Quarantine:
    """Holds one reference on each such block of vLLM's BlockPool."""

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool
        self._held: list[tuple[SlotWriter, Sequence[int], float]] = []

    def hold(self, slot: SlotWriter, blocks: Sequence[int]) -> None:
        """Keep `blocks`, which some request still owns, beyond that request."""
        self._pool.touch([self._pool.blocks[b] for b in blocks])
        self._held.append((slot, blocks, time.monotonic() + HELD_S_MAX))

    def free_answered(self) -> None:
        """Give back the blocks of loads that were answered after all."""
        if not self._held:
            return
        still = []
        for slot, blocks, until_s in self._held:
            if slot.inbox()[0] is LoadState.NONE and time.monotonic() < until_s:
                still.append((slot, blocks, until_s))
            else:
                self._pool.free_blocks([self._pool.blocks[b] for b in blocks])
        self._held = still
