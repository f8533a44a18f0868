"""Tier 1 inside one process: a watcher and a saver whose turns a test takes, and an area in its own memory."""

import asyncio
import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path

import pytest

from midstream.session.arena_writer import SlotWriter
from midstream.session.held import HolderClient
from midstream.session.ids import SessionId
from midstream.sidecar.mover.counters import Counters
from midstream.sidecar.mover.device import Devices
from midstream.sidecar.mover.memory_area import MemoryArea
from midstream.sidecar.mover.memory_map import MappedArea
from midstream.sidecar.mover.memory_saver import MemorySaver, SavePolicy
from midstream.sidecar.mover.memory_tier import MemoryTier
from midstream.sidecar.mover.orders import Order
from midstream.sidecar.mover.protocol import RestoreResult
from midstream.sidecar.mover.restorer import Restorer
from midstream.sidecar.mover.sources import Sources
from midstream.sidecar.mover.sums import Sums
from midstream.sidecar.mover.suspects import Suspects
from midstream.sidecar.mover.watcher import Watcher
from midstream.sidecar.mover.way import Way
from support.mover_rig import Worker

PROMPT = [5, 6, 7, 8, 9, 10]
# Extents of 64 KiB with 56 blocks of the rig's pools each.
EXTENT_BYTES = 64 << 10
SLABS_PER_EXTENT = 56
RECORD_BYTES = 136
PLENTY = 8_000_000_000


def memory_of(extents: int) -> bytearray:
    """Memory for so many extents."""
    return bytearray(4096 + extents * EXTENT_BYTES)


def mapped(memory: bytearray | mmap.mmap) -> MappedArea:
    """An area in a test's own memory."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return MappedArea(memoryview(memory), address, -1, was_kept=False)


def session(number: int) -> SessionId:
    """The id of a session."""
    return SessionId(f"{number:032x}")


def outputs(count: int, first: int = 100) -> list[int]:
    """So many output tokens."""
    return list(range(first, first + count))


class MemoryBench:
    """`memory` may be what another bench has left."""

    def __init__(
        self,
        folder: Path,
        holder: HolderClient,
        memory: bytearray,
        *,
        tail_tokens: int = 0,
        bytes_per_s: int = PLENTY,
        sources: type[Sources] = Sources,
    ) -> None:
        self.memory = memory
        self.sums, self.counters = Sums(), Counters()
        self.suspects = Suspects(folder / "suspects")
        self.sources = sources(holder, Devices(pytest.fail), self.suspects)
        self.tier = MemoryTier(holder, len(memory))
        area = mapped(memory)
        self.area = MemoryArea(area.view)
        self.tier.open(area, self.area)
        policy = SavePolicy(bytes_per_s, tail_tokens)
        self.way = Way()
        self.saver = MemorySaver(self.sources, self.sums, self.counters, self.tier, policy, self.way)
        self.watcher = Watcher(self.sources, self.sums, self.counters, self.saver)
        self.restorer = Restorer(self.sources, self.sums, self.counters, None, self.tier)

    def watch(self, *workers: Worker) -> None:
        """Follow them."""
        for worker in workers:
            self.watcher.watch(worker.arena, worker.arena.stem)

    async def look(self, worker: Worker) -> None:
        """Sum what has filled, whatever the pace."""
        self.watcher._not_before.clear()
        await self.watcher.turn(worker.arena)

    async def turn(self, worker: Worker) -> int:
        """Sum what has filled, and keep it; how many blocks were."""
        await self.look(worker)
        return await self.saver.turn(worker.arena)

    def kept(self, number: int) -> int:
        """How many positions of a session are kept."""
        chain = self.tier.index.get(session(number))
        return 0 if chain is None else chain.kv_len

    async def restore(self, worker: Worker, number: int, generation: int = 2, **origin: SessionId) -> RestoreResult:
        """From memory to where it waits."""
        mine = session(number)
        order = Order(mine, origin.get("origin", mine), None, worker.arena, generation, 5.0, from_memory=True)
        return await asyncio.wait_for(self.restorer.restore(order), 20)


def run(worker: Worker, number: int, count: int, blocks: Sequence[int], generation: int = 1) -> SlotWriter:
    """A session with so many outputs."""
    return worker.run(session(number), PROMPT, outputs(count), blocks, generation)
