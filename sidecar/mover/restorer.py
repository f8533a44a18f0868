"""Brings the KV of one session to where its new engine has made room for it.

Owns the order of a restore: wait for the destination, check that source and destination are the same session,
compare and copy block by block, check that neither moved meanwhile, answer. Invariant: once the destination was
seen waiting it gets exactly one answer, whatever happens; and DONE only if every position was copied from a source
that was valid before and after. After the answer nothing of it is written any more: the engine may compute into
those blocks.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ...session.arena import ArenaReader, LoadState, Slot, SlotState
from ...session.errors import ArenaError, CorruptError, PoolError, StoreError
from ...session.ids import SessionId
from ...session.layout import PoolLayout
from ...session.manifest import Manifest
from ...session.store import Store
from . import coverage
from .arrivals import Arrivals
from .counters import Counters
from .matching import SessionKv, check_match
from .pools import Copied, Copies, Pool
from .protocol import MoverError, Reason, RestoreResult
from .sources import Sources, key_of
from .sums import Sums
from .turns import Turns

P = ParamSpec("P")
T = TypeVar("T")

POLL_S = 0.0005
POLL_SLOW_S = 0.005
POLL_FAST_FOR_S = 1.0
RUNNING_MAX = 64
# What is read from the store before it is written to a pool.
STORE_STEP_BYTES = 16 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """A restore: from an arena's generation, or from the store when `source` is None.

    `origin` is the session whose KV it is: the very one, or the one that it is a branch of.
    """

    session: SessionId
    origin: SessionId
    source: tuple[Path, int] | None
    to_arena: Path
    to_generation: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where the KV goes: as seen when the engine waited."""

    reader: ArenaReader
    slot: Slot
    pool: Pool
    blocks: tuple[int, ...]
    outputs: list[int]
    deadline: float

    @property
    def tokens(self) -> int:
        return self.slot.prompt_len + len(self.outputs) - 1

    def wanted(self) -> SessionKv:
        """What the KV must be."""
        return _offer(
            self.slot, key_of(self.reader), self.pool.layout, self.pool.fingerprint, self.outputs, self.tokens
        )

    def check(self) -> None:
        """Raise MoverError unless the engine still waits for exactly these blocks."""
        now = self.reader.refresh(self.slot)
        if now is None or now.state is not SlotState.LIVE or now.load is not LoadState.WAITING:
            raise MoverError(Reason.GONE, f"session {self.slot.session}: its new engine waits no longer")
        if now.table_generation != self.slot.table_generation:
            raise MoverError(Reason.GONE, f"session {self.slot.session}: its new engine moved it to other blocks")
        if time.monotonic() >= self.deadline:
            raise MoverError(Reason.DEADLINE, f"session {self.slot.session}: its deadline passed while it was copied")


class Restorer:
    """Runs restores, many at a time; see Order."""

    def __init__(self, sources: Sources, sums: Sums, counters: Counters, store: Store | None) -> None:
        self._sources = sources
        self._sums = sums
        self._counters = counters
        self._store = store
        self._running: set[tuple[Path, SessionId, int]] = set()
        # One for each place that KV is brought to: the host's memory, or a GPU.
        self._turns: dict[str, Turns] = {}
        self._arrivals = Arrivals()

    async def restore(self, order: Order) -> RestoreResult:
        """Carry out one order. Never raises, but for a request that cannot be begun: MoverError."""
        name = (order.to_arena, order.session, order.to_generation)
        if name in self._running:
            raise MoverError(Reason.BUSY, f"session {order.session}: this restore runs already; wait for its answer")
        if len(self._running) >= RUNNING_MAX:
            raise MoverError(Reason.BUSY, f"{RUNNING_MAX} restores run already; try again when one has ended")
        self._running.add(name)
        try:
            return await self._run(order)
        finally:
            self._running.discard(name)
            if all(path != order.to_arena for path, _, _ in self._running):
                self._arrivals.forget(order.to_arena)

    async def _run(self, order: Order) -> RestoreResult:
        began = time.monotonic()
        deadline = began + order.deadline_s
        reader = self._sources.reader(order.to_arena)
        slot: Slot | None = None
        done = Copied(0, 0, 0)
        self._counters.restores += 1
        try:
            slot = await self._waiting(reader, order, deadline)
            began = time.monotonic()
            destination = await self._destination(order, reader, slot, deadline)
            if order.source is None:
                done = await self._from_store(order, destination)
            else:
                done = await self._from_arena(order, destination, order.source)
            destination.check()
        except (MoverError, PoolError, ArenaError, StoreError, OSError) as error:
            return self._failed(reader, slot, error, done, began)
        except BaseException as error:
            # Cancelled, or a fault of ours: the engine must not wait for an answer that would never come.
            self._failed(reader, slot, error, done, began)
            raise
        reader.answer(slot, LoadState.DONE, destination.tokens)
        self._count(done)
        seconds = time.monotonic() - began
        _log.info(
            "event=restored session=%s generation=%d tokens=%d bytes=%d seconds=%.4f",
            order.session,
            order.to_generation,
            destination.tokens,
            done.bytes,
            seconds,
        )
        return RestoreResult(True, destination.tokens, done.bytes, done.verified, done.unverified, seconds)

    def _failed(
        self, reader: ArenaReader, slot: Slot | None, error: BaseException, done: Copied, began: float
    ) -> RestoreResult:
        match error:
            case MoverError():
                reason = error.reason
            case CorruptError():
                reason = Reason.CORRUPT
            case StoreError():
                reason = Reason.STORE
            case PoolError():
                reason = Reason.POOL
            case ArenaError():
                reason = Reason.ARENA
            case _:
                reason = Reason.INTERNAL
        if slot is not None:
            reader.answer(slot, LoadState.FAILED, 0)
        self._counters.restores_failed += 1
        self._counters.fail(reason)
        self._count(done)
        return RestoreResult(
            False,
            0,
            done.bytes,
            done.verified,
            done.unverified,
            time.monotonic() - began,
            reason.value,
            str(error) or type(error).__name__,
        )

    def _count(self, done: Copied) -> None:
        self._counters.bytes_copied += done.bytes
        self._counters.blocks_verified += done.verified
        self._counters.blocks_unverified += done.unverified

    async def _waiting(self, reader: ArenaReader, order: Order, deadline: float) -> Slot:
        """The destination's slot, once its engine waits and has written its table."""
        began = time.monotonic()
        slot: Slot | None = None
        while True:
            # A look at one slot is far cheaper than at all.
            if slot is None:
                slot = self._arrivals.find(reader, order.session, order.to_generation)
            slot = reader.refresh(slot) if slot is not None else None
            if slot is not None:
                if slot.state is not SlotState.LIVE:
                    raise MoverError(Reason.GONE, f"session {order.session}: it ended in its new engine")
                if slot.load is LoadState.WAITING:
                    return slot
                if slot.load is not LoadState.NONE or len(reader.journal(slot)) > slot.resumed:
                    raise MoverError(Reason.GONE, f"session {order.session}: its new engine goes on without waiting")
            now = time.monotonic()
            if now >= deadline:
                raise MoverError(
                    Reason.DESTINATION,
                    f"session {order.session}: its new engine made no room within {order.deadline_s:g} s",
                )
            await asyncio.sleep(POLL_S if now - began < POLL_FAST_FOR_S else POLL_SLOW_S)

    async def _destination(self, order: Order, reader: ArenaReader, slot: Slot, deadline: float) -> _Destination:
        pool = await self._sources.pool(order.to_arena)
        outputs = reader.journal(slot)
        table = reader.table(slot)
        if not outputs:
            raise MoverError(
                Reason.TOKENS, f"session {order.session}: nothing was re-entered, so there is no KV for it"
            )
        count = -(-(slot.prompt_len + len(outputs) - 1) // pool.layout.block_tokens)
        blocks = table.blocks[:count]
        if len(blocks) < count or len(set(blocks)) < count or table.generation != slot.table_generation:
            raise MoverError(
                Reason.TABLE,
                f"session {order.session}: its new engine made room in {len(set(blocks))} of {count} blocks",
            )
        return _Destination(reader, slot, pool, blocks, outputs, deadline)

    async def _from_arena(self, order: Order, to: _Destination, source: tuple[Path, int]) -> Copied:
        path, generation = source
        reader = self._sources.reader(path)
        pool = await self._sources.pool(path)
        slot = reader.find(order.origin, generation)
        if slot is None:
            raise MoverError(Reason.SESSION, f"session {order.origin}: generation {generation} is not in {path}")
        covered = coverage.read(reader, slot)
        offer = _offer(slot, key_of(reader), pool.layout, pool.fingerprint, covered.outputs, covered.kv_len)
        check_match(replace(offer, session=order.session), to.wanted())
        blocks = covered.table.blocks[: len(to.blocks)]
        if len(blocks) < len(to.blocks):
            raise MoverError(Reason.TABLE, f"session {order.session}: its old table has {len(blocks)} blocks only")
        old_blocks = set(blocks)
        moved = [new for old, new in zip(blocks, to.blocks, strict=True) if old != new]
        if pool.identity == to.pool.identity and not old_blocks.isdisjoint(moved):
            raise MoverError(Reason.OVERLAP, f"session {order.session}: old and new blocks overlap in another order")
        sums = self._sums.get((path, order.origin, generation), covered.table.generation, pool.sum_kind)[: len(blocks)]
        done = Copied(0, 0, 0)
        step = max(1, to.pool.pace.step_bytes // pool.layout.block_bytes)
        for at in range(0, len(blocks), step):
            work = Copies(at, blocks[at : at + step], to.blocks[at : at + step], sums[at : at + step])
            async with self._turn(to):
                to.check()
                part = await _in_thread(pool.copy_to, to.pool, work)
            done = Copied(done.bytes + part.bytes, done.verified + part.verified, done.unverified + part.unverified)
            if part.damaged is not None:
                raise MoverError(
                    Reason.CHECKSUM,
                    f"session {order.session}: block {part.damaged} differs from what it was when it filled; "
                    "recomputing from the journal",
                )
        coverage.check_unchanged(reader, covered)
        return done

    def _turn(self, to: _Destination) -> AbstractAsyncContextManager[None]:
        turns = self._turns.get(to.pool.memory)
        if turns is None:
            turns = self._turns[to.pool.memory] = Turns(to.pool.pace.at_once)
        return turns.turn(to.deadline)

    async def _from_store(self, order: Order, to: _Destination) -> Copied:
        if self._store is None:
            raise MoverError(Reason.STORE, "this mover has no store; start it with --store")
        manifest = await asyncio.to_thread(self._store.latest, order.origin)
        if manifest is None:
            raise MoverError(Reason.STORE, f"session {order.origin}: no snapshot of it is stored")
        check_match(replace(_stored(manifest), session=order.session), to.wanted())
        done = Copied(0, 0, 0)
        step = max(1, STORE_STEP_BYTES // manifest.block_bytes)
        for at in range(0, len(to.blocks), step):
            to.check()
            await _in_thread(_load, self._store, manifest, to, range(at, min(at + step, len(to.blocks))))
            count = min(at + step, len(to.blocks))
            done = Copied(count * manifest.block_bytes, count, 0)
        return done


def _offer(
    slot: Slot, key: Mapping[str, Any], layout: PoolLayout, fingerprint: str, outputs: Sequence[int], kv_len: int
) -> SessionKv:
    return SessionKv(
        slot.session,
        key,
        (fingerprint, layout.block_tokens, layout.block_bytes),
        (slot.prompt_len, slot.prompt_hash),
        outputs,
        kv_len,
    )


def _stored(manifest: Manifest) -> SessionKv:
    return SessionKv(
        manifest.session,
        manifest.key,
        (manifest.fingerprint, manifest.block_tokens, manifest.block_bytes),
        (manifest.prompt_len, manifest.prompt_hash),
        manifest.outputs,
        manifest.kv_len,
    )


def _load(store: Store, manifest: Manifest, to: _Destination, ordinals: range) -> None:
    raws = []
    for ordinal in ordinals:
        raw = store.get_chunk(manifest.chunks[ordinal])
        if len(raw) != manifest.block_bytes:
            raise CorruptError(f"chunk {manifest.chunks[ordinal]}: {len(raw)} bytes instead of {manifest.block_bytes}")
        raws.append(raw)
    to.pool.scatter(raws, [to.blocks[ordinal] for ordinal in ordinals])


async def _in_thread(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
    """Run in a worker thread, and never return before the thread has let go of the memory, not even when cancelled."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
