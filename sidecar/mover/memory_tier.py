"""Tier 1: what is kept of sessions' KV in host memory, as the rest of the mover sees it.

Owns the area and its index from when they are open; before that, and where they cannot be had, nothing is kept and
nothing is found. Invariants: what is offered is one unbroken chain of one session's blocks; a slab that is being read
is not given to anybody else. Belongs to one event loop. Blocks come here by `memory_saver.py`, and go by `restorer.py`.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...session.errors import PoolError
from ...session.held import HolderClient
from ...session.ids import SessionId
from . import memory_map
from .matching import SessionKv
from .memory_area import MemoryArea, Slab
from .memory_index import Chain, Kept, MemoryIndex
from .memory_map import MappedArea
from .memory_records import Record, Story
from .pools import Copied, Copies, HostBlocks, Pool
from .protocol import StoredResult

# What nobody has any more is kept for as long as a takeover may wait for a worker.
ORPHANS_S = 600.0
# A holder that was started anew does not have the area.
KEEP_EVERY_S = 2.0
# Who asks right after a start waits for the index this long.
OPEN_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Figures:
    """What is counted; all of it only grows."""

    blocks_saved: int = 0
    bytes_saved: int = 0
    blocks_dropped: int = 0
    blocks_damaged: int = 0
    blocks_corrupt: int = 0
    sessions_evicted: int = 0
    restores: int = 0


class MemorySource:
    """Kept blocks as a source of copies: their numbers are places in the area."""

    def __init__(self, mapped: MappedArea, block_bytes: int) -> None:
        self._mapped = mapped
        self._block_bytes = block_bytes

    def copy_all(self, destination: Pool, works: Sequence[Copies], started: Callable[[], object]) -> list[Copied]:
        """Copy for several sessions, and compare what has arrived with the sums. Raises PoolError."""
        return [self._copied(destination, work, started) for work in works]

    def _copied(self, destination: Pool, work: Copies, started: Callable[[], object]) -> Copied:
        places = HostBlocks(self._mapped.view, self._mapped.address, work.sources, self._block_bytes)
        found = destination.load(places, work.destinations, started)
        pairs = enumerate(zip(found, work.expected, strict=True))
        damaged = next((index for index, (one, other) in pairs if one != other), None)
        if damaged is not None:
            return Copied(0, damaged, 0, work.first + damaged)
        return Copied(len(found) * self._block_bytes, len(found), 0)


@dataclass(frozen=True, slots=True)
class Offer:
    """What is kept of a session while somebody reads it."""

    chain: Chain
    blocks: tuple[Kept, ...]
    kv: SessionKv
    source: MemorySource


class MemoryTier:
    """The tier of one mover; `size_bytes` is that of the area."""

    def __init__(self, holder: HolderClient, size_bytes: int) -> None:
        self._holder = holder
        self._size_bytes = size_bytes
        self._mapped: MappedArea | None = None
        self._area: MemoryArea | None = None
        self.index = MemoryIndex(self._freed)
        self.figures = Figures()
        self._stop = threading.Event()
        self._opened = asyncio.Event()
        self._pinning: asyncio.Task[None] | None = None
        self._pinned: bool | None = None
        self._too_large: set[tuple[str, int, int]] = set()
        self._sequence = 0

    # ---- life

    async def run(self) -> None:
        """Open it, and have the holder keep it, until cancelled."""
        began = time.monotonic()
        try:
            mapped = await asyncio.to_thread(memory_map.mapped_area, self._holder, self._size_bytes, self._stop)
            area = await asyncio.to_thread(MemoryArea, mapped.view)
        except (PoolError, OSError, ValueError) as error:
            _log.error("event=no_tier1 serving=on error=%s", error)
            self._opened.set()
            await asyncio.Event().wait()
        else:
            self.open(mapped, area)
            _log.info(
                "event=tier1_opened bytes=%d kept=%s sessions=%d blocks=%d torn=%d seconds=%.2f",
                area.size_bytes, mapped.was_kept, len(self.index.chains), area.slabs_used, area.torn,
                time.monotonic() - began,
            )  # fmt: skip
            await self._kept_by_holder(mapped)

    def close(self) -> None:
        """Nothing more is opened or pinned; what runs in a thread ends soon."""
        self._stop.set()

    def forget(self) -> None:
        """Nobody will go on with any session: the memory is to be free when this process ends."""
        self._stop.set()
        if self._mapped is not None:
            with contextlib.suppress(PoolError):
                self._holder.drop(memory_map.NAME)

    def open(self, mapped: MappedArea, area: MemoryArea) -> None:
        """Go on with what an area holds."""
        self._mapped, self._area = mapped, area
        self._sequence = max((record.sequence for _, record in area.found), default=0)
        self.index.take_over(area.found, time.monotonic())
        area.found = []
        self._opened.set()

    async def _kept_by_holder(self, mapped: MappedArea) -> None:
        lost = False
        while not self._stop.is_set():
            try:
                await asyncio.to_thread(memory_map.keep, self._holder, mapped.fd, len(mapped.view))
            except PoolError as error:
                if not lost:
                    _log.warning("event=tier1_not_held error=%s", error)
                lost = True
            else:
                lost = False
            self._forget_orphans()
            await asyncio.sleep(KEEP_EVERY_S)
        await asyncio.Event().wait()

    # ---- what is kept

    async def kept(self, session: SessionId) -> StoredResult:
        """What a restore from here would begin with; waits a little for a tier that is being opened."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._opened.wait(), OPEN_S)
        chain = self.index.get(session)
        if chain is None or not self.kept_tokens(session):
            return StoredResult(False)
        story = chain.story
        outputs = chain.kv_len - story.prompt_len + 1
        return StoredResult(True, chain.generation, story.prompt_len, story.prompt_hash, chain.kv_len, outputs)

    def kept_tokens(self, session: SessionId) -> int:
        """How many positions of a session are kept; 0 where that is less than its prompt, which is of no use."""
        chain = self.index.get(session)
        return 0 if chain is None or chain.kv_len < chain.story.prompt_len else chain.kv_len

    @contextlib.contextmanager
    def reading(self, session: SessionId) -> Iterator[Offer | None]:
        """What is kept of a session, which stays where it is meanwhile; None if there is nothing."""
        chain, area, mapped = self.index.get(session), self._area, self._mapped
        if chain is None or not chain.blocks or area is None or mapped is None:
            yield None
            return
        self.index.read(chain)
        try:
            story = chain.story
            kv = SessionKv(
                story.session,
                {"key": story.key},
                story.form,
                (story.prompt_len, story.prompt_hash),
                chain.outputs,
                chain.kv_len,
                story.ranks,
            )
            yield Offer(chain, tuple(chain.blocks), kv, MemorySource(mapped, story.form[2]))
        finally:
            self.index.have_read(chain)

    def places(self, blocks: Sequence[Kept]) -> list[int]:
        """Where blocks lie in the area."""
        assert self._area is not None
        return [self._area.offset(kept.slab) for kept in blocks]

    def corrupt(self, offer: Offer, ordinal: int) -> None:
        """A kept block differs from its sum: it and all after it are let go."""
        self.figures.blocks_corrupt += 1
        _log.error("event=tier1_corrupt session=%s block=%d", offer.chain.story.session, ordinal)
        if not offer.chain.dropped:
            self.index.cut(offer.chain, ordinal)

    # ---- what comes in

    def ready_for(self, pool: Pool) -> bool:
        """Whether blocks of a pool can be kept now. The first pool on a GPU has the area pinned."""
        area, mapped = self._area, self._mapped
        if area is None or mapped is None:
            return False
        if not area.fits(pool.form):
            if pool.form not in self._too_large:
                self._too_large.add(pool.form)
                _log.error(
                    "event=tier1_too_small bytes=%d block_bytes=%d serving=on; set tier1.bytes to more",
                    area.size_bytes, pool.layout.block_bytes,
                )  # fmt: skip
            return False
        if pool.gpus and self._pinned is None and self._pinning is None:
            self._pinning = asyncio.create_task(self._pin(mapped, min(pool.gpus)))
        return not pool.gpus or self._pinned is True

    async def _pin(self, mapped: MappedArea, gpu: str) -> None:
        began = time.monotonic()
        try:
            await asyncio.to_thread(memory_map.pin, mapped.address, len(mapped.view), gpu, self._stop)
        except PoolError as error:
            self._pinned = False
            _log.error("event=no_tier1 gpu=%s serving=on error=%s", gpu, error)
        else:
            self._pinned = True
            _log.info("event=tier1_pinned bytes=%d seconds=%.2f", len(mapped.view), time.monotonic() - began)

    def room(self, chain: Chain, count: int) -> list[Slab]:
        """Room for blocks of a chain, or for as many as there is when all that are worth less have gone.

        None for a session that begins, if what it has already would not fit: little of it is of little use.
        """
        area, form = self._area, chain.story.form
        assert area is not None
        free, victims = area.free(form), self.index.victims(chain)
        if not chain.full and chain.wanted > free:
            able = sum(len(victim.blocks) for victim in victims if victim.story.form == form)
            if chain.wanted > free + able:
                return []
        slabs = area.take(form, count)
        for victim in victims if len(slabs) < count else ():
            self.index.drop(victim)
            self.figures.sessions_evicted += 1
            slabs += area.take(form, count - len(slabs))
            if len(slabs) == count:
                break
        return slabs

    def give_back(self, slabs: Sequence[Slab]) -> None:
        """Room that was not used."""
        self._freed(slabs)

    def host_blocks(self, slabs: Sequence[Slab], block_bytes: int) -> HostBlocks:
        """The places of slabs."""
        assert self._area is not None
        assert self._mapped is not None
        offsets = [self._area.offset(slab) for slab in slabs]
        return HostBlocks(self._mapped.view, self._mapped.address, offsets, block_bytes)

    def keep(self, chain: Chain, ordinal: int, kept: Kept) -> None:
        """A block of a chain lies whole in its slab."""
        assert self._area is not None
        self._sequence += 1
        self._area.write(
            kept.slab,
            Record(
                chain.story, chain.generation, ordinal, self._sequence, kept.positions, kept.kind, kept.sum, kept.chain,
                kept.tokens,
            ),
        )  # fmt: skip
        if kept.positions == chain.story.form[1]:
            self.index.add(chain, kept)
        else:
            self.index.set_tail(chain, kept)
        self.figures.blocks_saved += 1
        self.figures.bytes_saved += chain.story.form[2]

    def finish(self, session: SessionId, generation: int) -> None:
        """A session is over: its slabs are free at once, unless a newer generation has it."""
        chain = self.index.get(session)
        if chain is not None and chain.generation <= generation:
            self.index.drop(chain)

    def status(self) -> dict[str, int]:
        """Figures by name."""
        area, figures = self._area, self.figures
        return {
            "tier1_bytes": 0 if area is None else area.size_bytes,
            "tier1_bytes_used": 0 if area is None else area.bytes_used,
            "tier1_blocks": 0 if area is None else area.slabs_used,
            "tier1_sessions": len(self.index.chains),
            "tier1_blocks_saved": figures.blocks_saved,
            "tier1_bytes_saved": figures.bytes_saved,
            "tier1_blocks_dropped": figures.blocks_dropped,
            "tier1_blocks_damaged": figures.blocks_damaged,
            "tier1_blocks_corrupt": figures.blocks_corrupt,
            "tier1_sessions_evicted": figures.sessions_evicted,
            "tier1_restores": figures.restores,
        }

    def _freed(self, slabs: Sequence[Slab]) -> None:
        assert self._area is not None
        self._area.give(slabs)

    def _forget_orphans(self) -> None:
        now = time.monotonic()
        for chain in self.index.chains:
            if not chain.live and now - chain.left_s > ORPHANS_S:
                self.index.drop(chain)


def key_digest(key: Mapping[str, Any]) -> str:
    """What stands for a compatibility key in the index."""
    text = json.dumps(dict(key), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def story_of(kv: SessionKv) -> Story:
    """What the kept blocks of a session have in common."""
    return Story(kv.session, kv.block_form, kv.ranks, key_digest(kv.key), *kv.prompt)
