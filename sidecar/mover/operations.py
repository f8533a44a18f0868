"""What each request of the mover's socket means: fields checked, the right part asked, its result as an answer."""

import asyncio
from typing import Any

from ...session.arena import SlotState
from ...session.errors import StoreError
from ...session.ids import SessionId
from ...session.store import Store
from . import coverage
from .counters import Counters
from .memory_saver import MemorySaver
from .memory_tier import MemoryTier
from .orders import Order
from .protocol import (
    MoverError,
    Op,
    Reason,
    StoredResult,
    VerifyResult,
    object_field,
    path_field,
    result_fields,
    seconds_field,
    session_field,
    whole_field,
)
from .restorer import Restorer, SnapshotReader
from .server import Handler
from .snapshots import Snapshotter
from .sources import Sources
from .sums import Sums
from .watcher import Watcher


class Operations:
    """The mover's parts, as operations."""

    def __init__(
        self,
        sources: Sources,
        sums: Sums,
        counters: Counters,
        watcher: Watcher,
        restorer: Restorer,
        store: Store | None,
        snapshotter: Snapshotter | None,
        tier: MemoryTier | None = None,
        saver: MemorySaver | None = None,
        replica: SnapshotReader | None = None,
    ) -> None:
        self._sources = sources
        self._sums = sums
        self._counters = counters
        self._watcher = watcher
        self._restorer = restorer
        self._store = store
        self._snapshotter = snapshotter
        self._tier = tier
        self._saver = saver
        self._replica = replica

    def handlers(self) -> dict[Op, Handler]:
        """One handler for every operation."""
        return {
            Op.WATCH: self._watch,
            Op.UNWATCH: self._unwatch,
            Op.SEAL: self._seal,
            Op.RELEASE: self._release,
            Op.RESTORE: self._restore,
            Op.VERIFY: self._verify,
            Op.SOUND: self._sound,
            Op.SNAPSHOT: self._snapshot,
            Op.STORED: self._stored,
            Op.KEPT: self._kept,
            Op.REPLICATED: self._replicated,
            Op.FINISH: self._finish,
            Op.STATUS: self._status,
        }

    async def _watch(self, message: dict[str, Any]) -> dict[str, Any]:
        worker = message.get("worker", "")
        if not isinstance(worker, str) or len(worker) > 64:
            raise MoverError(Reason.REQUEST, f"worker is {worker!r:.80}; give its name")
        if self._tier is not None:
            # What a mover before this one has kept has sums from when it filled: none is taken anew of these blocks.
            await self._tier.settled()
        self._watcher.watch(path_field(message, "arena"), worker)
        return {}

    async def _unwatch(self, message: dict[str, Any]) -> dict[str, Any]:
        path = path_field(message, "arena")
        if self._snapshotter is not None:
            self._snapshotter.unseen(path)
        if self._saver is not None:
            self._saver.unseen(path)
        return {"unwatched": self._watcher.unwatch(path)}

    async def _seal(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"sealed": await self._watcher.seal(path_field(message, "arena"))}

    async def _release(self, message: dict[str, Any]) -> dict[str, Any]:
        path = path_field(message, "arena")
        self._watcher.unwatch(path)
        for owner in self._sums.owners(path):
            self._sums.drop(owner)
        if self._snapshotter is not None:
            self._snapshotter.release(path)
        if self._saver is not None:
            self._saver.unseen(path)
        return {"released": self._sources.release(path)}

    async def _restore(self, message: dict[str, Any]) -> dict[str, Any]:
        source, to = object_field(message, "from"), object_field(message, "to")
        session = session_field(message)
        stored, kept, replica = (source.get(name) is True for name in ("store", "memory", "replica"))
        order = Order(
            session,
            session_field(source) if "session" in source else session,
            None if stored or kept or replica else (path_field(source, "arena"), whole_field(source, "generation")),
            path_field(to, "arena"),
            whole_field(to, "generation"),
            seconds_field(message, "deadline_s"),
            from_memory=kept,
            from_replica=replica,
        )
        return result_fields(await self._restorer.restore(order))

    async def _verify(self, message: dict[str, Any]) -> dict[str, Any]:
        path, session = path_field(message, "arena"), session_field(message)
        self._sources.check_untouched(path)
        reader = self._sources.reader(path)
        pool = await self._sources.pool(path)
        slot = reader.find(session, whole_field(message, "generation"))
        if slot is None:
            raise MoverError(Reason.SESSION, f"session {session} is not in {path}")
        covered = coverage.read(reader, slot)
        block_tokens = pool.layout.block_tokens
        count = -(-covered.kv_len // block_tokens)
        owner = (path, session, slot.generation)
        sums = list(self._sums.get(owner, covered.table.generation, pool.sum_kind))[:count]
        found = await asyncio.to_thread(pool.sum_blocks, covered.table.blocks[: len(sums)])
        coverage.check_unchanged(reader, covered)
        self._sources.check_untouched(path)
        damaged = [ordinal for ordinal, value in enumerate(found) if value != sums[ordinal]]
        if damaged:
            self._counters.fail(Reason.CHECKSUM)
        return result_fields(
            VerifyResult(
                tokens=damaged[0] * block_tokens if damaged else covered.kv_len,
                verified_tokens=min((damaged[0] if damaged else len(sums)) * block_tokens, covered.kv_len),
                blocks_verified=len(sums) - len(damaged),
                blocks_unverified=count - len(sums),
                blocks_damaged=len(damaged),
            )
        )

    async def _sound(self, message: dict[str, Any]) -> dict[str, Any]:
        self._sources.check_untouched(path_field(message, "arena"))
        return {}

    async def _snapshot(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._snapshotter is None:
            raise MoverError(Reason.STORE, "this mover has no store; start it with --store")
        session = session_field(message) if message.get("session") is not None else None
        return result_fields(await self._snapshotter.snapshot(path_field(message, "arena"), session))

    async def _stored(self, message: dict[str, Any]) -> dict[str, Any]:
        return result_fields(await _latest(self._store, session_field(message)))

    async def _replicated(self, message: dict[str, Any]) -> dict[str, Any]:
        return result_fields(await _latest(self._replica, session_field(message)))

    async def _kept(self, message: dict[str, Any]) -> dict[str, Any]:
        session = session_field(message)
        return result_fields(StoredResult(False) if self._tier is None else await self._tier.kept(session))

    async def _finish(self, message: dict[str, Any]) -> dict[str, Any]:
        session, generation = session_field(message), whole_field(message, "generation")
        if self._snapshotter is not None:
            self._snapshotter.finish(session, generation)
        if self._saver is not None:
            self._saver.finish(session, generation)
        return {}

    async def _status(self, _message: dict[str, Any]) -> dict[str, Any]:
        numbers: dict[str, Any] = self._counters.as_fields() | {
            "sums": self._sums.count,
            "arenas": self._sources.arena_count,
            "arenas_watched": len(self._watcher.watched),
            "pools": self._sources.pool_count,
            "sessions_live": self._watcher.live_sessions(),
        }
        if self._store is not None:
            figures = self._store.figures()
            numbers |= {
                "store_bytes": figures.size_bytes,
                "store_snapshots": figures.snapshots,
                "store_errors": figures.errors,
                "store_corrupt": figures.corrupt,
                "store_evicted": figures.evicted,
            }
        if self._tier is not None and self._saver is not None:
            numbers |= self._tier.status() | self._saver.behind()
        return numbers | self._lag()

    def _lag(self) -> dict[str, int]:
        """How far sums and snapshots are behind, over all watched live sessions."""
        blocks = tokens = 0
        for path in self._watcher.watched:
            try:
                reader = self._sources.reader(path)
            except MoverError:
                continue
            # Whoever asks wants to know at once, and not when a GPU has been opened.
            pool = self._sources.mapped(path)
            if pool is None:
                continue
            for slot in reader.slots():
                if slot.state is not SlotState.LIVE:
                    continue
                try:
                    covered = coverage.read(reader, slot)
                except MoverError:
                    continue
                owner = (path, slot.session, slot.generation)
                summed = len(self._sums.get(owner, covered.table.generation, pool.sum_kind))
                # A block may have been summed since its positions were counted.
                blocks += max(covered.kv_len // pool.layout.block_tokens - summed, 0)
                if self._snapshotter is not None:
                    tokens = max(tokens, covered.kv_len - self._snapshotter.stored_tokens(owner))
        return {"lag_blocks": blocks, "lag_tokens_max": tokens}


async def _latest(store: SnapshotReader | None, session: SessionId) -> StoredResult:
    if store is None:
        return StoredResult(False)
    try:
        latest = await asyncio.to_thread(store.latest, session)
    except StoreError as error:
        raise MoverError(Reason.STORE, str(error)) from error
    if latest is None:
        return StoredResult(False)
    return StoredResult(
        True,
        latest.generation,
        latest.prompt_len,
        latest.prompt_hash,
        latest.kv_len,
        len(latest.outputs),
        dict(latest.key),
        latest.recomputed,
    )
