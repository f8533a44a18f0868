"""A node's simulated mover and courier: restores from pools, disk and elsewhere, and what is brought elsewhere.

Owns one node's restores and the order in which its snapshots leave. The backlog, its urgencies and the account of the
network's share are the real ones; the stores, the copying and its faults are simulated. Each restore answers the engine
once. A call fails as the real client's does.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.session.records import LoadState
from midstream.sidecar.mover.lineage import Lineage
from midstream.sidecar.mover.protocol import (
    MoverError,
    Reason,
    RestoreResult,
    SnapshotResult,
    StoredResult,
    VerifyResult,
)
from midstream.sidecar.replicas.backlog import Backlog, Shape
from midstream.sidecar.replicas.budget import Account
from midstream.sidecar.replicas.urgency import most_urgent

from .engine import Kv, Run, SimArena, SimEngine
from .network import Network
from .stores import BLOCK_BYTES, BLOCK_TOKENS, Snapshot, SnapshotStore

_POLL_S = 0.01
# What the real peers' clients wait for an answer.
_ASK_S = 2.0


class SimMover:
    """`place_of`: the arena at a path, its engine if it lives, and whether its pool is held."""

    def __init__(
        self,
        network: Network,
        host: str,
        chance: random.Random,
        fault_rate: float,
        disk: SnapshotStore | None,
        elsewhere: Sequence[SnapshotStore],
        place_of: Callable[[Path], "tuple[SimArena, SimEngine | None, bool] | None"],
        key_of: Callable[[Path], dict[str, str]],
        bytes_per_s: int,
        look_s: float,
        own: SnapshotStore,
        peers: Mapping[str, SnapshotStore],
    ) -> None:
        self._network = network
        self._host = host
        self._chance = chance
        self._fault_rate = fault_rate
        self._disk = disk
        self._elsewhere = elsewhere
        self._place_of = place_of
        self._key_of = key_of
        self._look_s = look_s
        self._account = Account(bytes_per_s)
        # What other nodes have brought into the memory of this one; and those nodes' memories.
        self._own = own
        self._peers = peers
        self._lineage = Lineage()
        self._backlogs = {store.name: Backlog() for store in elsewhere}
        self.disturbed = 0

    # ---- asked by the coordinator

    async def restore(
        self,
        session: SessionId,
        *,
        origin: SessionId,
        source: tuple[Path, int] | None,
        to_arena: Path,
        to_generation: int,
        deadline_s: float,
        from_replica: bool = False,
        from_memory: bool = False,
    ) -> RestoreResult:
        self._maybe_unreachable()
        place = self._place_of(to_arena)
        if place is None or place[1] is None:
            raise MoverError(Reason.ARENA, "no engine is there")
        arena, engine, _ = place
        run = await self._waiting(arena, session, to_generation, deadline_s)
        try:
            kv = await self._fetched(session, run, source, from_replica)
        except MoverError as error:
            engine.answer(run, None)
            return RestoreResult(False, reason=error.reason.value, error=str(error))
        if run.load is not LoadState.WAITING:
            return RestoreResult(False, reason=Reason.GONE.value, error="it waits no longer")
        engine.answer(run, kv)
        return RestoreResult(True, kv.kv_len)

    async def verify(self, arena: Path, session: SessionId, generation: int) -> VerifyResult:
        raise MoverError(Reason.SESSION, "no pool is adopted here")

    async def stored(self, session: SessionId) -> StoredResult:
        self._maybe_unreachable()
        found = None if self._disk is None else self._disk.latest(session)
        return StoredResult(False) if found is None else found.told()

    async def replicated(self, session: SessionId) -> StoredResult:
        self._maybe_unreachable()
        best = await self._best_elsewhere(session)
        return StoredResult(False) if best is None else best.told()

    async def snapshot(self, arena: Path, session: SessionId | None = None) -> SnapshotResult:
        self._maybe_unreachable()
        await asyncio.sleep(self._chance.choice((0.002, 0.02)))
        self.observe(arena)
        return SnapshotResult(1, 0, 0, 0)

    async def finish(self, session: SessionId, generation: int) -> None:
        self._maybe_unreachable()
        if self._disk is not None:
            self._disk.finish(session, generation)

    async def bring_to(self, session: SessionId, to: str, within_s: float) -> dict[str, Any]:
        """Bring the latest snapshot of a session into another node's memory. Raises Refused."""
        store = self._peers[to]
        snapshot = None if self._disk is None else self._disk.latest(session)
        if snapshot is None:
            raise Refused("no_snapshot", "nothing is stored of it")
        size_bytes = -(-snapshot.kv.kv_len // BLOCK_TOKENS) * BLOCK_BYTES
        wait_s = self._account.reserve(size_bytes, self._network.loop.now_s)
        if wait_s > within_s or self._is_cut(store) or not self._network.is_powered(store.host):
            await asyncio.sleep(min(wait_s, _ASK_S))
            raise Refused("unreachable", f"{to} does not take it")
        await asyncio.sleep(wait_s + self._network.latency_s(self._host, store.host))
        store.put(snapshot)
        return {"generation": snapshot.generation, "kv_len": snapshot.kv.kv_len, "size_bytes": size_bytes}

    # ---- what it does by itself

    def observe(self, path: Path) -> None:
        """Store what there is of the sessions of an arena."""
        place = self._place_of(path)
        if place is None or self._disk is None:
            return
        now_s = self._network.loop.now_s
        for (session, generation), run in list(place[0].runs.items()):
            kv = run.kv()
            known = self._disk.latest(session)
            if kv is not None and (known is None or known.rank < (generation, kv.kv_len)):
                recomputed = self._lineage.is_again(run.slot())
                made = Snapshot(session, generation, kv, self._key_of(path), now_s, recomputed=recomputed)
                self._disk.put(made)

    async def bring(self) -> None:
        """Bring what is missing elsewhere, the most urgent first, within the network's share. Until cancelled."""
        if self._disk is None or not self._elsewhere:
            return
        while True:
            await asyncio.sleep(self._look_s)
            for store in self._elsewhere:
                await self._bring_to(store)

    async def _bring_to(self, store: SnapshotStore) -> None:
        assert self._disk is not None
        loop = self._network.loop
        backlog = self._backlogs[store.name]
        backlog.see(self._disk.heads(), loop.now_s)
        until_s = loop.now_s + self._look_s
        shapes = {
            head.session: Shape(found.kv.prompt_len, BLOCK_TOKENS, BLOCK_BYTES)
            for head in self._disk.heads()
            if (found := self._disk.latest(head.session)) is not None
        }
        while loop.now_s < until_s:
            chosen = most_urgent(backlog.behind(shapes, loop.now_s))
            if chosen is None:
                break
            session = SessionId(chosen.session)
            snapshot = self._disk.latest(session)
            if snapshot is None:
                break  # the disk was lost meanwhile
            wait_s = self._account.reserve(max(chosen.missing_bytes, BLOCK_BYTES), loop.now_s)
            await asyncio.sleep(wait_s + self._network.latency_s(self._host, store.host))
            if self._is_cut(store) or not self._network.is_powered(store.host):
                backlog.lost()
                break
            store.put(snapshot)
            backlog.published(session, snapshot.generation, snapshot.kv.kv_len, loop.now_s)
        if self._is_cut(store):
            return
        for head in backlog.over(loop.now_s):
            store.finish(head.session, head.generation)
            backlog.told(head.session)

    # ---- inside

    async def _waiting(self, arena: SimArena, session: SessionId, generation: int, within_s: float) -> Run:
        deadline_s = self._network.loop.now_s + within_s
        while self._network.loop.now_s < deadline_s:
            run = arena.run(session, generation)
            if run is not None and run.load is LoadState.WAITING:
                return run
            if run is not None:
                raise MoverError(Reason.GONE, "it does not wait")
            await asyncio.sleep(_POLL_S)
        raise MoverError(Reason.DESTINATION, "no room was made")

    async def _fetched(self, session: SessionId, run: Run, source: tuple[Path, int] | None, replica: bool) -> Kv:
        await asyncio.sleep(self._chance.choice((0.002, 0.01, 0.05)))
        if self._chance.random() < self._fault_rate:
            raise MoverError(self._chance.choice([Reason.CHECKSUM, Reason.INTERNAL]), "a fault")
        if source is not None:
            return self._of_pool(session, run, *source)
        if replica:
            snapshot = await self._best_elsewhere(session)
        else:
            snapshot = None if self._disk is None else self._disk.latest(session)
        if snapshot is None:
            raise MoverError(Reason.STORE, "nothing is stored of it")
        if snapshot.recomputed:
            self._lineage.note(session, run.marker.generation)
        return _cut(snapshot.kv, run)

    def _of_pool(self, session: SessionId, run: Run, path: Path, generation: int) -> Kv:
        place = self._place_of(path)
        if place is None or not place[2]:
            raise MoverError(Reason.POOL, "nobody holds it")
        old = place[0].run(session, generation)
        kv = None if old is None else old.kv()
        if kv is None:
            raise MoverError(Reason.SESSION, "it is not there")
        if old is not None and self._lineage.is_again(old.slot()):
            self._lineage.note(session, run.marker.generation)
        return _cut(kv, run)

    async def _best_elsewhere(self, session: SessionId) -> Snapshot | None:
        """The latest of those that answer, the nearest of equals."""
        found = [self._own.latest(session)] + [await self._asked(store, session) for store in self._elsewhere]
        return max((s for s in found if s is not None), key=lambda s: s.rank, default=None)

    async def _asked(self, store: SnapshotStore, session: SessionId) -> Snapshot | None:
        if self._is_cut(store) or not self._network.is_powered(store.host):
            await asyncio.sleep(_ASK_S)
            return None
        there_s = self._network.latency_s(self._host, store.host)
        await asyncio.sleep(there_s + self._network.latency_s(store.host, self._host))
        return store.latest(session)

    def _is_cut(self, store: SnapshotStore) -> bool:
        return self._network.is_cut(self._host, store.host) or self._network.is_cut(store.host, self._host)

    def _maybe_unreachable(self) -> None:
        if self._chance.random() < self._fault_rate:
            self.disturbed += 1
            raise MoverError(self._chance.choice([Reason.UNREACHABLE, Reason.DEADLINE]), "it is down")


def _cut(kv: Kv, run: Run) -> Kv:
    """As much of it as the run asks for. MoverError where it is not of the same outputs, or too little."""
    count = len(run.outputs)
    if kv.prompt_len != run.question.prompt_len or kv.question != run.question.number:
        raise MoverError(Reason.PROMPT, "it is of another prompt")
    if len(kv.outputs) < count:
        raise MoverError(Reason.INCOMPLETE, "not so many positions have KV")
    if list(kv.outputs[:count]) != run.outputs:
        raise MoverError(Reason.TOKENS, "other tokens were journaled")
    return Kv(kv.question, kv.prompt_len, kv.outputs[:count], kv.again[: count - 1])
