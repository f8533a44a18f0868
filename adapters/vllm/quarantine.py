"""Blocks that a late mover might still write to: kept from everybody until it has answered.

A load that timed out leaves the engine without KV for it, but the mover may have been stopped between two blocks
and go on later. Invariant: a block that was promised to the mover is not given to another request before the
mover's answer.
"""

from collections.abc import Sequence
from typing import Any

from ...session.arena_writer import SlotWriter
from ...session.records import LoadState


class Quarantine:
    """Holds one reference on each such block of vLLM's BlockPool."""

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool
        self._held: list[tuple[SlotWriter, Sequence[int]]] = []

    def hold(self, slot: SlotWriter, blocks: Sequence[int]) -> None:
        """Keep `blocks`, which some request still owns, beyond that request."""
        self._pool.touch([self._pool.blocks[b] for b in blocks])
        self._held.append((slot, blocks))

    def free_answered(self) -> None:
        """Give back the blocks of loads that were answered after all."""
        still = []
        for slot, blocks in self._held:
            if slot.inbox()[0] is LoadState.NONE:
                still.append((slot, blocks))
            else:
                self._pool.free_blocks([self._pool.blocks[b] for b in blocks])
        self._held = still
