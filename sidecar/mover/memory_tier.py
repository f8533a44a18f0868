"""Tier 1: what is kept of sessions' KV in host memory, as the rest of the mover sees it.

Owns the area and its index from when they are open; before that, and where they cannot be had, nothing is kept and
nothing is found. Invariants: what is offered is one unbroken chain of one session's blocks; a slab that is being read
is not given to anybody else. Belongs to one event loop. Blocks come here by `memory_saver.py`, and go by `restorer.py`.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...session.errors import PoolError
from ...session.held import HolderClient
from ...session.ids import SessionId
from . import memory_map
from .matching import SessionKv
from .memory_area import MemoryArea, Slab
from .memory_index import Chain, Kept, MemoryIndex
from .memory_map import MappedArea
from .memory_records import Record
from .memory_source import MemorySource, Offer
from .pools import HostBlocks, Pool, SumKind
from .protocol import StoredResult

# What nobody has any more is kept for as long as a takeover may wait for a worker.
ORPHANS_S = 600.0
# A holder that was started anew does not have the area.
KEEP_EVERY_S = 2.0
# Memory that cannot be had, or a holder that is not there, is asked for again after so long, and ever later.
AGAIN_S = 1.0
AGAIN_S_MAX = 300.0
# Who asks right after a start waits for the index this long.
OPEN_S = 3.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Figures:
    """What is counted; all of it only grows.

    `calls` took `copy_s` together, which may overlap; what the event loop did for them were `look_s` and `enter_s`.
    """

    blocks_saved: int = 0
    bytes_saved: int = 0
    blocks_dropped: int = 0
    blocks_damaged: int = 0
    blocks_corrupt: int = 0
    sessions_evicted: int = 0
    restores: int = 0
    calls: int = 0
    look_s: float = 0.0
    copy_s: float = 0.0
    enter_s: float = 0.0


class MemoryTier:
    """The tier of one mover; `size_bytes` is that of the area."""

    def __init__(self, holder: HolderClient, size_bytes: int) -> None:
        self._holder = holder
        self._size_bytes = size_bytes
        self._mapped: MappedArea | None = None
        self._area: MemoryArea | None = None
        self.index = MemoryIndex(self._forgotten, self._freed)
        self.figures = Figures()
        self._stop = threading.Event()
        # What was kept before is known, or that nothing was.
        self._settled = asyncio.Event()
        self._pinning: asyncio.Task[None] | None = None
        self._pinned: bool | None = None
        self._too_large: set[tuple[str, int, int]] = set()
        self._sequence = 0

    # ---- life

    async def run(self) -> None:
        """Open it, and have the holder keep it, until cancelled."""
        said, pause_s = False, AGAIN_S
        while True:
            try:
                mapped = await self._opened()
            except (PoolError, OSError, ValueError) as error:
                if not said:
                    _log.error("event=no_tier1 serving=on error=%s", error)
                said = True
                self._settled.set()
            else:
                await self._kept_by_holder(mapped)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_S_MAX)

    async def _opened(self) -> MappedArea:
        """Make or find the memory, and go on with what is in it. Raises PoolError, OSError or ValueError."""
        began = time.monotonic()
        if not await asyncio.to_thread(memory_map.is_kept, self._holder):
            self._settled.set()
        mapped = await asyncio.to_thread(memory_map.mapped_area, self._holder, self._size_bytes, self._stop)
        area = await asyncio.to_thread(MemoryArea, mapped.view)
        self.open(mapped, area)
        _log.info(
            "event=tier1_opened bytes=%d kept=%s sessions=%d blocks=%d torn=%d seconds=%.2f",
            area.size_bytes, mapped.was_kept, len(self.index.chains), area.slabs_used, area.torn,
            time.monotonic() - began,
        )  # fmt: skip
        return mapped

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
        self._settled.set()

    async def settled(self) -> None:
        """Returns when it is known what was kept before, or after OPEN_S."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), OPEN_S)

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
        await self.settled()
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

    def room(self, chain: Chain, ordinal: int, count: int) -> list[Slab]:
        """Room for blocks of a chain from `ordinal` on, or for as many as there is when all of less worth have gone.

        No room at all for a session that begins, if what it has already would not fit: little of it is of little use.
        """
        area, form = self._area, chain.story.form
        assert area is not None
        free, victims = area.free(form), self.index.victims(chain)
        if not ordinal and chain.wanted > free:
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
        self._write(chain, ordinal, kept)
        if kept.positions == chain.story.form[1]:
            self.index.add(chain, kept)
        else:
            self.index.set_tail(chain, kept)
        self.figures.blocks_saved += 1
        self.figures.bytes_saved += chain.story.form[2]

    def renew(self, chain: Chain, ordinal: int, owner: tuple[int, int]) -> None:
        """A kept block is the session's under another owner, too, with the same sum."""
        kept = replace(chain.full[ordinal], owner=owner)
        self._write(chain, ordinal, kept)
        self.index.renew(chain, ordinal, kept)

    def known_sums(self, session: SessionId, owner: tuple[int, int]) -> dict[SumKind, list[int]]:
        """The sums of a session's first blocks, of one kind, as far as they were taken under this owner."""
        chain = self.index.get(session)
        if chain is None or not chain.full:
            return {}
        kind = chain.full[0].kind
        same = itertools.takewhile(lambda kept: (kept.owner, kept.kind) == (owner, kind), chain.full)
        return {kind: sums} if (sums := [kept.sum for kept in same]) else {}

    def _write(self, chain: Chain, ordinal: int, kept: Kept) -> None:
        assert self._area is not None
        self._sequence += 1
        record = Record(
            chain.story, *kept.owner, ordinal, self._sequence, kept.positions, kept.kind, kept.sum, kept.chain,
            kept.tokens,
        )  # fmt: skip
        self._area.write(kept.slab, record)

    def finish(self, session: SessionId, generation: int) -> None:
        """A session is over: its slabs are free at once, unless a newer generation has it."""
        chain = self.index.get(session)
        if chain is not None and chain.generation <= generation:
            self.index.drop(chain)

    def status(self) -> dict[str, int | float]:
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
            "tier1_calls": figures.calls,
            "tier1_look_s": round(figures.look_s, 4),
            "tier1_copy_s": round(figures.copy_s, 4),
            "tier1_enter_s": round(figures.enter_s, 4),
        }

    def _forgotten(self, slabs: Sequence[Slab]) -> None:
        assert self._area is not None
        self._area.forget(slabs)

    def _freed(self, slabs: Sequence[Slab]) -> None:
        assert self._area is not None
        self._area.give(slabs)

    def _forget_orphans(self) -> None:
        now = time.monotonic()
        for chain in self.index.chains:
            if not chain.live and now - chain.left_s > ORPHANS_S:
                self.index.drop(chain)
