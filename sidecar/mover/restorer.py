"""Brings the KV of one session to where its new engine has made room for it.

Owns the order of a restore: wait for the destination, check that source and destination are the same session,
compare and copy block by block, check that neither moved meanwhile and that no fault of a GPU came between, answer.
Invariant: once the destination was seen waiting it gets exactly one answer, whatever happens; and DONE only if every
position was copied from a source that was valid before and after. After the answer nothing of it is written any more:
the engine may compute into those blocks.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from ...session.arena import ArenaReader, LoadState, Slot
from ...session.errors import ArenaError, CorruptError, PoolError, StoreError
from ...session.ids import SessionId
from ...session.manifest import Manifest
from ...session.store import Store
from . import coverage
from .arrivals import Arrivals
from .counters import Counters
from .groups import Groups, Work
from .matching import SessionKv, check_match
from .orders import Destination, Order, Origin, Steps, destination_of, steps_of
from .pools import Copied, Pool
from .protocol import MoverError, Reason, RestoreResult
from .sources import Sources
from .sums import Sums

P = ParamSpec("P")
T = TypeVar("T")

RUNNING_MAX = 64
# Whoever waits for KV is answered first, and the log is written after that.
LOG_AFTER_S = 0.02
# What is read from the store before it is written to a pool, by how many threads, and how much of it one reads in a go.
STORE_STEP_BYTES = 64 << 20
READERS_MAX = 16
READ_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class Restorer:
    """Runs restores, many at a time; see Order."""

    def __init__(self, sources: Sources, sums: Sums, counters: Counters, store: Store | None) -> None:
        self._sources = sources
        self._sums = sums
        self._counters = counters
        self._store = store
        self._running: set[tuple[Path, SessionId, int]] = set()
        # One for each place that KV is brought to: the host's memory, or a GPU.
        self._groups: dict[str, Groups] = {}
        self._arrivals = Arrivals()
        # Reading is checksums and decompression: one thread reads a tenth of what a link brings onto a GPU.
        self._readers = ThreadPoolExecutor(READERS_MAX, thread_name_prefix="reader")

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

    async def _run(self, order: Order) -> RestoreResult:
        began = time.monotonic()
        deadline = began + order.deadline_s
        reader = self._sources.reader(order.to_arena)
        slot: Slot | None = None
        done = Copied(0, 0, 0)
        self._counters.restores += 1
        try:
            slot = await self._arrivals.waiting(reader, order.session, order.to_generation, deadline)
            began = time.monotonic()
            if order.source is not None:
                self._sources.check_untouched(order.source[0])
            pool = await self._sources.pool_of(reader)
            if order.source is None:
                destination = destination_of(order, reader, slot, pool, deadline)
                done = await self._from_store(order, destination)
            else:
                destination, done = await self._from_arena(order, order.source, reader, slot, pool, deadline)
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
        text = "event=restored session=%s generation=%d tokens=%d bytes=%d seconds=%.4f"
        values = (order.session, order.to_generation, destination.tokens, done.bytes, seconds)
        asyncio.get_running_loop().call_later(LOG_AFTER_S, _log.info, text, *values)
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

    async def _from_arena(
        self, order: Order, source: tuple[Path, int], reader: ArenaReader, slot: Slot, pool: Pool, deadline: float
    ) -> tuple[Destination, Copied]:
        """Compare and copy, step by step; what is to be copied is looked up when it is this restore's turn."""
        from_reader = self._sources.reader(source[0])
        origin = Origin(from_reader, await self._sources.pool_of(from_reader), source[1])
        groups = self._groups.get(pool.memory)
        if groups is None:
            groups = self._groups[pool.memory] = Groups(pool.pace.together, pool.pace.at_once)
        step = max(1, pool.pace.step_bytes // pool.layout.block_bytes)
        steps: Steps | None = None
        done = Copied(0, 0, 0)
        while steps is None or not steps.over:
            async with groups.place(deadline) as place:
                if steps is None:
                    to = destination_of(order, reader, slot, pool, deadline)
                    steps = steps_of(order, origin, to, self._sums)
                steps.to.check()
                part = await place.copy(Work(origin.pool, pool, steps.next(step)))
            done = Copied(done.bytes + part.bytes, done.verified + part.verified, done.unverified + part.unverified)
            if part.damaged is not None:
                raise MoverError(
                    Reason.CHECKSUM,
                    f"session {order.session}: block {part.damaged} differs from what it was when it filled; "
                    "recomputing from the journal",
                )
        coverage.check_unchanged(origin.reader, steps.covered)
        self._sources.check_untouched(source[0])
        return steps.to, done

    async def _from_store(self, order: Order, to: Destination) -> Copied:
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
            await _in_thread(_load, self._readers, self._store, manifest, to, range(at, min(at + step, len(to.blocks))))
            count = min(at + step, len(to.blocks))
            done = Copied(count * manifest.block_bytes, count, 0)
        return done


def _stored(manifest: Manifest) -> SessionKv:
    return SessionKv(
        manifest.session,
        manifest.key,
        (manifest.fingerprint, manifest.block_tokens, manifest.block_bytes),
        (manifest.prompt_len, manifest.prompt_hash),
        manifest.outputs,
        manifest.kv_len,
        manifest.ranks,
    )


def _load(readers: ThreadPoolExecutor, store: Store, manifest: Manifest, to: Destination, ordinals: range) -> None:
    """Bring blocks from the store to their places, in a worker thread, and read them in several others."""
    count = max(1, READ_BYTES // manifest.block_bytes)
    parts = [ordinals[at : at + count] for at in range(0, len(ordinals), count)]
    read = [readers.submit(_read, store, manifest, part) for part in parts]
    try:
        raws = [raw for reading in read for raw in reading.result()]
    finally:
        for reading in read:
            reading.cancel()
    to.pool.scatter(raws, [to.blocks[ordinal] for ordinal in ordinals])


def _read(store: Store, manifest: Manifest, ordinals: range) -> list[bytes]:
    raws = []
    for ordinal in ordinals:
        raw = store.get_chunk(manifest.chunks[ordinal])
        if len(raw) != manifest.block_bytes:
            raise CorruptError(f"chunk {manifest.chunks[ordinal]}: {len(raw)} bytes instead of {manifest.block_bytes}")
        raws.append(raw)
    return raws


async def _in_thread(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
    """Run in a worker thread, and never return before the thread has let go of the memory, not even when cancelled."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
