"""Brings the KV of one session to where its new engine has made room for it.

Owns the order of a restore: wait for the destination, check that source and destination are the same session,
compare and copy block by block, check that neither moved meanwhile and that no fault of a GPU came between, answer.
Invariant: once the destination was seen waiting it gets exactly one answer, whatever happens; and DONE only if every
position was copied from a source that was valid before and after. After the answer nothing of it is written any more:
the engine may compute into those blocks. Where the source turned out to be unfit and memory has the session, too, the
engine's answer comes ANSWER_LATER_S after that to the sidecar, which may take the session elsewhere meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from ...session.arena import ArenaReader, LoadState, Slot
from ...session.errors import ArenaError, CorruptError, PoolError, StoreError
from ...session.ids import SessionId
from ...session.manifest import Manifest
from . import coverage
from .arrivals import Arrivals
from .burst import Burst, CallTimes
from .counters import Counters
from .groups import Groups, Work
from .lineage import Lineage
from .matching import SessionKv, check_match
from .memory_source import Offer, key_digest
from .memory_tier import MemoryTier
from .orders import Destination, Order, Origin, Steps, destination_of, steps_of
from .pools import Copied, Copies, Pool
from .protocol import MoverError, Reason, RestoreResult
from .sources import Sources
from .sums import Sums
from .way import Way

P = ParamSpec("P")
T = TypeVar("T")

RUNNING_MAX = 64
# Whoever waits for KV is answered first, and the log is written after that.
LOG_AFTER_S = 0.02
# What is read from the store before it is written to a pool, by how many threads, and how much of it one reads in a go.
STORE_STEP_BYTES = 64 << 20
READERS_MAX = 16
READ_BYTES = 1 << 20
# What is copied from memory in one call, so that the more urgent need not wait for long, and how many calls at once:
# one is on the link while the other one is begun or ended.
MEMORY_STEP_BYTES = 512 << 20
MEMORY_AT_ONCE = 2
ANSWER_LATER_S = 0.25
# What says that the KV is no good where it was looked for, and nothing of where it was to go.
_UNFIT = frozenset({Reason.CHECKSUM, Reason.POOL, Reason.FAULT, Reason.FINISHED, Reason.SESSION, Reason.CORRUPT})

_log = logging.getLogger(__name__)


class SnapshotReader(Protocol):
    """What a restore needs of a store (session/store.py), be it this mover's own or elsewhere."""

    def latest(self, session: SessionId) -> Manifest | None:
        """See Store.latest."""
        ...

    def get_chunk(self, name: str) -> bytes:
        """See Store.get_chunk."""
        ...


class Restorer:
    """Runs restores, many at a time; see Order."""

    def __init__(
        self,
        sources: Sources,
        sums: Sums,
        counters: Counters,
        store: SnapshotReader | None,
        tier: MemoryTier | None = None,
        replica: SnapshotReader | None = None,
        lineage: Lineage | None = None,
    ) -> None:
        self._sources = sources
        self._lineage = lineage if lineage is not None else Lineage()
        self._sums = sums
        self._counters = counters
        self._store = store
        self._tier = tier
        self._replica = replica
        self._late: dict[tuple[Path, SessionId, int], Callable[[], None]] = {}
        self._running: set[tuple[Path, SessionId, int]] = set()
        # What can wait makes way for those whose session waits.
        self.way = Way()
        # The account of all that run now.
        self._burst = Burst(0.0)
        # One for each place that KV is brought to: the host's memory, or a GPU.
        self._groups: dict[str, Groups] = {}
        self._arrivals = Arrivals()
        # Reading is checksums and decompression: one thread reads a tenth of what a link brings onto a GPU.
        self._readers = ThreadPoolExecutor(READERS_MAX, thread_name_prefix="reader")
        # A network that hangs holds threads of its own, and nobody's who reads from the disk.
        self._replica_readers = ThreadPoolExecutor(READERS_MAX, thread_name_prefix="replica")

    async def restore(self, order: Order) -> RestoreResult:
        """Carry out one order. Never raises, but for a request that cannot be begun: MoverError."""
        name = (order.to_arena, order.session, order.to_generation)
        if name in self._running:
            raise MoverError(Reason.BUSY, f"session {order.session}: this restore runs already; wait for its answer")
        if len(self._running) >= RUNNING_MAX:
            raise MoverError(Reason.BUSY, f"{RUNNING_MAX} restores run already; try again when one has ended")
        if not self._running:
            self._burst = Burst(time.monotonic())
        self._running.add(name)
        # It is this one that answers now.
        self._late.pop(name, None)
        try:
            return await self._run(order)
        finally:
            self._running.discard(name)
            if not self._running and self._burst.calls:
                told = self._burst.told(time.monotonic())
                asyncio.get_running_loop().call_later(LOG_AFTER_S, _log.info, "%s", told)

    def close(self) -> None:
        """Nobody is placed anew any more: engines that wait are told at once."""
        for answer in list(self._late.values()):
            answer()

    async def _run(self, order: Order) -> RestoreResult:
        began = time.monotonic()
        deadline = began + order.deadline_s
        reader = self._sources.reader(order.to_arena)
        slot: Slot | None = None
        done = Copied(0, 0, 0)
        self._counters.restores += 1
        # What comes from a disk takes longer than anything should make way for.
        is_quick, is_on_way = order.source is not None or order.from_memory, False
        try:
            slot = await self._arrivals.waiting(reader, order.session, order.to_generation, deadline)
            began = time.monotonic()
            self._burst.came(began)
            if is_quick:
                self.way.enter()
                is_on_way = True
            if order.source is not None:
                self._sources.check_untouched(order.source[0])
            pool = await self._sources.pool_of(reader)
            if order.source is None:
                destination = destination_of(order, reader, slot, pool, deadline)
                copying = self._from_memory if order.from_memory else self._from_store
                done = await copying(order, destination)
            else:
                destination, done = await self._from_arena(order, order.source, reader, slot, pool, deadline)
            copied = time.monotonic()
            destination.check()
        except (MoverError, PoolError, ArenaError, StoreError, OSError) as error:
            return self._failed(order, reader, slot, error, done, began)
        except BaseException as error:
            # Cancelled, or a fault of ours: the engine must not wait for an answer that would never come.
            self._failed(order, reader, slot, error, done, began)
            raise
        finally:
            if is_on_way:
                self.way.leave()
        reader.answer(slot, LoadState.DONE, destination.tokens)
        self._count(done)
        ended = time.monotonic()
        seconds = ended - began
        self._burst.answer_s += ended - copied
        self._burst.size_bytes += done.bytes
        text = "event=restored session=%s generation=%d tokens=%d bytes=%d seconds=%.4f"
        values = (order.session, order.to_generation, destination.tokens, done.bytes, seconds)
        asyncio.get_running_loop().call_later(LOG_AFTER_S, _log.info, text, *values)
        return RestoreResult(True, destination.tokens, done.bytes, done.verified, done.unverified, seconds)

    def _failed(
        self, order: Order, reader: ArenaReader, slot: Slot | None, error: BaseException, done: Copied, began: float
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
        kept_tokens = self._kept_tokens(order, reason)
        if slot is not None and kept_tokens:
            self._answer_later(order, reader, slot)
        elif slot is not None:
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
            kept_tokens,
        )

    def _kept_tokens(self, order: Order, reason: Reason) -> int:
        """How many positions a session could go on from in memory, where that is the next place to look."""
        if self._tier is None or reason not in _UNFIT or (order.source is None and not order.from_memory):
            return 0
        return self._tier.kept_tokens(order.origin)

    def _answer_later(self, order: Order, reader: ArenaReader, slot: Slot) -> None:
        name = (order.to_arena, order.session, order.to_generation)

        def answer() -> None:
            if self._late.pop(name, None) is None:
                return
            try:
                now = reader.refresh(slot)
                # The place may be another session's by now.
                if now is not None and now.load is LoadState.WAITING:
                    reader.answer(slot, LoadState.FAILED, 0)
            except Exception:
                # The others that wait are told all the same; this one waits until its time is over, and recomputes.
                self._counters.fail(Reason.INTERNAL)
                _log.exception("event=not_answered session=%s generation=%d", order.session, order.to_generation)

        self._late[name] = answer
        asyncio.get_running_loop().call_later(ANSWER_LATER_S, answer)

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
        old = from_reader.find(order.origin, source[1])
        if old is not None and self._lineage.is_again(old):
            self._lineage.note(order.session, order.to_generation)
        groups = self._groups.get(pool.memory)
        if groups is None:
            groups = self._groups[pool.memory] = Groups(pool.pace.together, pool.pace.at_once, self._called)
        _, _, block_bytes = pool.form
        step = max(1, pool.pace.step_bytes // block_bytes)
        steps: Steps | None = None
        done = Copied(0, 0, 0)
        while steps is None or not steps.over:
            async with groups.place(deadline) as place:
                planned = time.monotonic()
                if steps is None:
                    to = destination_of(order, reader, slot, pool, deadline)
                    steps = steps_of(order, origin, to, self._sums)
                steps.to.check()
                work = Work(origin.pool, pool, steps.next(step))
                self._burst.plan_s += time.monotonic() - planned
                part = await place.copy(work)
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

    def _called(self, times: CallTimes, seen_s: float) -> None:
        self._burst.call(times, seen_s)

    async def _from_memory(self, order: Order, to: Destination) -> Copied:
        """Copy what is kept in memory, a step at a time, and compare each block with its sum as it arrives."""
        if self._tier is None:
            raise MoverError(Reason.STORE, "this mover keeps nothing in memory; start it with --memory-bytes")
        with self._tier.reading(order.origin) as offer:
            if offer is None:
                raise MoverError(Reason.STORE, f"session {order.origin}: nothing of it is kept in memory")
            if self._is_kept_again(order.origin, offer.chain.generation):
                self._lineage.note(order.session, order.to_generation)
            wanted = to.wanted()
            # Of a key the digest is kept. The newest output has no KV yet, so nothing is kept of it either.
            count = min(len(to.outputs) - 1, len(offer.kv.outputs))
            known = replace(wanted, outputs=to.outputs[:count], key={"key": key_digest(wanted.key)})
            check_match(replace(offer.kv, session=order.session), known)
            blocks = offer.blocks[: len(to.blocks)]
            if any(kept.kind is not to.pool.sum_kind for kept in blocks):
                raise MoverError(Reason.LAYOUT, f"session {order.session}: its sums are of another kind of memory")
            place = f"{to.pool.memory} from memory"
            groups = self._groups.setdefault(place, Groups(1, MEMORY_AT_ONCE, self._called))
            done = await self._by_steps(groups, offer, to, [kept.sum for kept in blocks], self._tier)
            self._tier.figures.restores += 1
            return done

    def _is_kept_again(self, session: SessionId, generation: int) -> bool:
        """Whether what memory has of an owner was computed again; of one whose arena is gone that is forgotten."""
        records = (reader.find(session, generation) for reader in self._sources.readers())
        return self._lineage.descends(session, generation) or any(
            slot is not None and self._lineage.is_again(slot) for slot in records
        )

    async def _by_steps(
        self, groups: Groups, offer: Offer, to: Destination, sums: list[int], tier: MemoryTier
    ) -> Copied:
        done = Copied(0, 0, 0)
        places = tier.places(offer.blocks[: len(sums)])
        step = max(1, MEMORY_STEP_BYTES // to.pool.layout.block_bytes)
        for at in range(0, len(sums), step):
            part = slice(at, at + step)
            async with groups.place(to.deadline) as place:
                to.check()
                copies = Copies(at, places[part], to.blocks[part], sums[part])
                copied = await place.copy(Work(offer.source, to.pool, copies))
            if copied.damaged is not None:
                tier.corrupt(offer, copied.damaged)
                raise MoverError(
                    Reason.CORRUPT,
                    f"session {to.slot.session}: block {copied.damaged} in memory differs from what was put there",
                )
            done = Copied(done.bytes + copied.bytes, done.verified + copied.verified, 0)
        return done

    async def _from_store(self, order: Order, to: Destination) -> Copied:
        store, readers = (self._replica, self._replica_readers) if order.from_replica else (self._store, self._readers)
        if store is None:
            flag = "--replicas" if order.from_replica else "--store"
            raise MoverError(Reason.STORE, f"this mover has no such store; start it with {flag}")
        manifest = await asyncio.to_thread(store.latest, order.origin)
        if manifest is None:
            raise MoverError(Reason.STORE, f"session {order.origin}: no snapshot of it is stored")
        if manifest.recomputed:
            self._lineage.note(order.session, order.to_generation)
        check_match(replace(_stored(manifest), session=order.session), to.wanted())
        done = Copied(0, 0, 0)
        step = max(1, STORE_STEP_BYTES // manifest.block_bytes)
        for at in range(0, len(to.blocks), step):
            to.check()
            await _in_thread(_load, readers, store, manifest, to, range(at, min(at + step, len(to.blocks))))
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


def _load(
    readers: ThreadPoolExecutor, store: SnapshotReader, manifest: Manifest, to: Destination, ordinals: range
) -> None:
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


def _read(store: SnapshotReader, manifest: Manifest, ordinals: range) -> list[bytes]:
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
