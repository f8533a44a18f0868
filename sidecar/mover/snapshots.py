"""Writes snapshots of live sessions to the store, while their engines go on.

Owns what is stored of whom, and when. Invariant: a snapshot is published only if the session still had, after its
blocks were read, the table that it had before; each full block is read and written once. A store that fails is news
once, is left alone for a while, and is never the reason for anything else to stop.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from ...session.arena import ArenaReader, Slot, SlotState
from ...session.errors import PoolError, StoreError
from ...session.ids import SessionId
from ...session.manifest import Manifest
from ...session.store import Draft, Store
from . import coverage
from .counters import Counters
from .coverage import Covered
from .lineage import Lineage
from .pools import BlockDamaged, Pool
from .protocol import MoverError, Reason, SnapshotResult
from .sources import Sources, key_of
from .sums import Owner, Sums

RETRY_S = 10.0
ROUND_S = 0.05
SESSIONS_MAX = 65536
OVER = 1 << 32
# Blocks are compressed and written by so many threads: one does less than a disk, and half the processors are others'.
WRITERS_MAX = 8
# How a session ends that nobody goes on with; anything else may be taken up elsewhere.
ENDINGS = frozenset({"stop", "length"})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Policy:
    """When snapshots are taken by themselves: every `every_s` seconds (0: never), after `tail_tokens` new positions."""

    every_s: float = 0.0
    tail_tokens: int = 16


@dataclass(slots=True)
class _Written:
    """What is stored of a session: the names of its full blocks, up to where, and when it was looked at."""

    table_generation: int
    names: list[str] = field(default_factory=list)
    kv_len: int = 0
    at: float = 0.0


class Snapshotter:
    """Takes snapshots, one session at a time."""

    def __init__(
        self,
        sources: Sources,
        sums: Sums,
        counters: Counters,
        store: Store,
        policy: Policy,
        lineage: Lineage | None = None,
    ) -> None:
        self._sources = sources
        self._lineage = lineage if lineage is not None else Lineage()
        self._sums = sums
        self._counters = counters
        self._store = store
        self._policy = policy
        self._written: dict[Owner, _Written] = {}
        self._live: dict[Path, list[Slot]] = {}
        self._finished: deque[tuple[SessionId, int]] = deque(maxlen=SESSIONS_MAX)
        # Who has each session now, oldest first; an older owner's blocks may be somebody else's by now.
        self._owners: OrderedDict[SessionId, int] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()
        self._writers = ThreadPoolExecutor(writer_count(), thread_name_prefix="writer")
        self._failing_until = 0.0
        self._failing = False

    def seen(self, path: Path, slots: list[Slot]) -> None:
        """These sessions are live in an arena now."""
        self._live[path] = slots
        for slot in slots:
            self._own(slot.session, slot.generation)

    def unseen(self, path: Path) -> None:
        """An arena is not followed any more."""
        self._live.pop(path, None)

    def ended(self, path: Path, slot: Slot) -> None:
        """A session is no longer live in an arena."""
        self._written.pop((path, slot.session, slot.generation), None)
        if slot.state is SlotState.FINISHED and slot.finish in ENDINGS:
            self.finish(slot.session, slot.generation)

    def stored_tokens(self, owner: Owner) -> int:
        """How many positions of a session are stored."""
        written = self._written.get(owner)
        return written.kv_len if written is not None else 0

    def finish(self, session: SessionId, generation: int) -> None:
        """A session is over: what is stored of it may go first, unless it is of a newer generation."""
        self._finished.append((session, generation))
        if self._owners.get(session, 0) <= generation:
            self._own(session, OVER)

    def release(self, path: Path) -> None:
        """An arena that is not needed any more."""
        self.unseen(path)
        for owner in [owner for owner in self._written if owner[0] == path]:
            del self._written[owner]

    async def run(self) -> None:
        """Store what the policy asks for, and mark what is over, until cancelled."""
        while True:
            try:
                await self._round()
            except StoreError as error:
                self._store_failed(error)
            except Exception:
                self._counters.watch_errors += 1
                _log.exception("event=snapshots_failed")
            await asyncio.sleep(ROUND_S)

    async def _round(self) -> None:
        while self._finished:
            session, generation = self._finished.popleft()
            await asyncio.to_thread(self._finish, session, generation)
        if not self._policy.every_s:
            return
        for path, slots in list(self._live.items()):
            for slot in slots:
                now = time.monotonic()
                written = self._written.get((path, slot.session, slot.generation))
                if now < self._failing_until or (written is not None and now - written.at < self._policy.every_s):
                    continue
                try:
                    if not self._sources.is_untouched(path):
                        # Known and said; nothing of it will be stored for as long as its engine lives.
                        break
                    await self._take(path, slot, self._policy.tail_tokens)
                except MoverError as error:
                    self._drop(error)
                except StoreError:
                    # Said and counted where it happened; the next one is tried when the pause is over.
                    continue

    async def snapshot(self, path: Path, session: SessionId | None) -> SnapshotResult:
        """Store all live sessions of an arena, or one, now. Raises MoverError."""
        reader = self._sources.reader(path)
        if session is None:
            slots = [slot for slot in reader.slots() if slot.state is SlotState.LIVE]
        else:
            found = reader.find(session)
            if found is None:
                raise MoverError(Reason.SESSION, f"session {session} is not in {path}")
            slots = [found]
        stored = unchanged = dropped = kv_tokens = 0
        for slot in slots:
            try:
                kv_len = await self._take(path, slot, 1)
            except StoreError as error:
                raise MoverError(Reason.STORE, str(error)) from error
            except MoverError as error:
                self._drop(error)
                if session is not None:
                    raise
                dropped += 1
            else:
                stored += kv_len > 0
                unchanged += kv_len == 0
                kv_tokens += kv_len
        return SnapshotResult(stored, unchanged, dropped, kv_tokens)

    async def _take(self, path: Path, slot: Slot, new_tokens_min: int) -> int:
        """Store one session; returns the positions stored, or 0 if fewer than `new_tokens_min` are new."""
        async with self._one_at_a_time:
            if self._owners.get(slot.session, 0) > slot.generation:
                return 0
            self._sources.check_untouched(path)
            reader = self._sources.reader(path)
            pool = await self._sources.pool(path)
            owner = (path, slot.session, slot.generation)
            covered = coverage.read(reader, slot)
            written = self._written.get(owner)
            if written is None or written.table_generation != covered.table.generation:
                written = self._written[owner] = _Written(covered.table.generation)
            written.at = time.monotonic()
            # Less than the prompt is nothing that a session could go on from.
            if covered.kv_len < slot.prompt_len or covered.kv_len - written.kv_len < new_tokens_min:
                return 0
            needed = -(-covered.kv_len // pool.layout.block_tokens)
            if len(covered.table.blocks) < needed:
                raise MoverError(Reason.TABLE, f"session {slot.session}: its table is shorter than its journal")
            sums = list(self._sums.get(owner, covered.table.generation, pool.sum_kind))
            try:
                async with _draft(self._store) as draft:
                    names = await asyncio.to_thread(
                        _put_blocks, draft, self._writers, pool, covered, written.names, sums
                    )
                    coverage.check_unchanged(reader, covered)
                    self._sources.check_untouched(path)
                    manifest = _manifest(reader, pool, covered, names, recomputed=self._lineage.is_again(covered.slot))
                    await asyncio.to_thread(draft.publish, manifest)
            except StoreError as error:
                # What was stored before may be what is missing: the next snapshot writes all of it.
                del self._written[owner]
                self._store_failed(error)
                raise
            self._store_works()
            written.names = names[: covered.kv_len // pool.layout.block_tokens]
            written.kv_len = covered.kv_len
            self._counters.snapshots += 1
            self._counters.snapshot_bytes += len(names) * pool.layout.block_bytes
            return covered.kv_len

    def _own(self, session: SessionId, generation: int) -> None:
        self._owners[session] = max(generation, self._owners.get(session, 0))
        if len(self._owners) > SESSIONS_MAX:
            self._owners.popitem(last=False)

    def _finish(self, session: SessionId, generation: int) -> None:
        latest = self._store.latest(session)
        if latest is not None and latest.generation <= generation:
            self._store.finish(session)

    def _drop(self, error: MoverError) -> None:
        self._counters.snapshots_dropped += 1
        self._counters.fail(error.reason)

    def _store_failed(self, error: StoreError) -> None:
        self._failing_until = time.monotonic() + RETRY_S
        self._counters.fail(Reason.STORE)
        if not self._failing:
            self._failing = True
            _log.error("event=snapshots_stopped serving=on error=%s", error)

    def _store_works(self) -> None:
        if self._failing:
            self._failing = False
            _log.info("event=snapshots_go_on")


@contextlib.asynccontextmanager
async def _draft(store: Store) -> AsyncIterator[Draft]:
    """A draft, begun and left in worker threads: leaving one may remove files, and wait for who writes others."""
    with contextlib.ExitStack() as stack:
        draft = await asyncio.to_thread(lambda: stack.enter_context(store.begin()))
        try:
            yield draft
        finally:
            await asyncio.to_thread(stack.close)


def writer_count() -> int:
    """How many threads write snapshots on this machine."""
    return max(1, min(WRITERS_MAX, (os.cpu_count() or 1) // 2))


def _put_blocks(
    draft: Draft, writers: ThreadPoolExecutor, pool: Pool, covered: Covered, known: list[str], sums: list[int]
) -> list[str]:
    """Store the blocks of [0, kv_len) that are not stored yet, in a worker thread; returns all their names in order."""
    full = covered.kv_len // pool.layout.block_tokens
    blocks = covered.table.blocks[: -(-covered.kv_len // pool.layout.block_tokens)]
    names: list[str] = []
    missing = []
    for ordinal in range(len(blocks)):
        kept = ordinal < min(len(known), full) and draft.keep(known[ordinal])
        names.append(known[ordinal] if kept else "")
        if not kept:
            missing.append(ordinal)
    expected = [sums[ordinal] for ordinal in missing if ordinal < min(len(sums), full)]
    try:
        put = _put_all(draft, writers, pool.gather([blocks[o] for o in missing], expected))
        for ordinal, name in zip(missing, put, strict=True):
            names[ordinal] = name
    except BlockDamaged as damaged:
        raise MoverError(
            Reason.CHECKSUM,
            f"session {covered.slot.session}: block {missing[damaged.index]} differs from what it was when it filled",
        ) from damaged
    except PoolError as error:
        raise MoverError(Reason.POOL, f"session {covered.slot.session}: {error}") from error
    return names


def _put_all(draft: Draft, writers: ThreadPoolExecutor, raws: Iterator[bytes]) -> list[str]:
    """Store blocks, a few at a time, and return their names in order; when this returns or raises, nobody writes."""
    names: list[str] = []
    running: deque[Future[str]] = deque()
    try:
        for raw in raws:
            if len(running) > 2 * writer_count():
                names.append(running.popleft().result())
            running.append(writers.submit(draft.put_chunk, raw))
        names += [putting.result() for putting in running]
    finally:
        for putting in running:
            putting.cancel()
        wait(running)
    return names


def _manifest(reader: ArenaReader, pool: Pool, covered: Covered, names: list[str], *, recomputed: bool) -> Manifest:
    slot = covered.slot
    return Manifest(
        session=slot.session,
        generation=slot.generation,
        key=key_of(reader),
        fingerprint=pool.fingerprint,
        block_tokens=pool.layout.block_tokens,
        block_bytes=pool.layout.block_bytes,
        prompt_len=slot.prompt_len,
        prompt_hash=slot.prompt_hash,
        kv_len=covered.kv_len,
        # What a restored session goes on with: the outputs up to the one that has no KV yet.
        outputs=tuple(covered.outputs[: covered.kv_len - slot.prompt_len + 1]),
        chunks=tuple(names),
        created_at=time.time(),
        ranks=pool.rank_count,
        step=covered.step,
        recomputed=recomputed,
    )
