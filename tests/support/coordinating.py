"""A coordinator over arenas that tests write themselves, and a mover that says what it is told to."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from midstream.proxy.coordinator import Placement, Reason, SessionFacts
from midstream.session.arena import create_arena
from midstream.session.arena_writer import ArenaWriter, SlotWriter
from midstream.session.ids import SessionId
from midstream.session.key import REQUIRED
from midstream.sidecar.coordinator import CoordinatorSettings, SidecarCoordinator
from midstream.sidecar.metrics import Metrics
from midstream.sidecar.mover.protocol import MoverError, RestoreResult, SnapshotResult, StoredResult, VerifyResult
from midstream.sidecar.supervise import WorkerState
from midstream.sidecar.workers import Epoch, Workers

S = SessionId("5" * 32)
HASH = "ab" * 16
PROMPT_LEN = 5
KEY = {name: name for name in REQUIRED}
T = TypeVar("T")


@dataclass
class FakeMover:
    """Says what a test has it say."""

    verified: VerifyResult | MoverError = field(default_factory=lambda: VerifyResult(1000, 1000, 0, 0, 0))
    found: StoredResult | MoverError = field(default_factory=lambda: StoredResult(False))
    in_memory: StoredResult | MoverError = field(default_factory=lambda: StoredResult(False))
    elsewhere: StoredResult | MoverError = field(default_factory=lambda: StoredResult(False))
    restored: RestoreResult | MoverError = field(default_factory=lambda: RestoreResult(True, seconds=0.1))
    restores: list[tuple[tuple[Path, int] | None, Path, int]] = field(default_factory=list)
    from_memory: list[bool] = field(default_factory=list)
    from_replica: list[bool] = field(default_factory=list)
    # How often the network was asked.
    asked_elsewhere: int = 0
    # Whose KV each restore was of.
    origins: list[SessionId] = field(default_factory=list)
    finished: list[tuple[SessionId, int]] = field(default_factory=list)
    during: asyncio.Event | None = None
    # The answers of restores come when this is set.
    answering: asyncio.Event | None = None

    async def restore(
        self,
        session: SessionId,
        *,
        origin: SessionId | None = None,
        source: tuple[Path, int] | None,
        to_arena: Path,
        to_generation: int,
        deadline_s: float,
        from_memory: bool = False,
        from_replica: bool = False,
    ) -> RestoreResult:
        self.from_memory.append(from_memory)
        self.from_replica.append(from_replica)
        self.restores.append((source, to_arena, to_generation))
        self.origins.append(origin or session)
        if self.answering is not None:
            await self.answering.wait()
        return said(self.restored)

    async def verify(self, arena: Path, session: SessionId, generation: int) -> VerifyResult:
        if self.during is not None:
            await self.during.wait()
        return said(self.verified)

    async def stored(self, session: SessionId) -> StoredResult:
        return said(self.found)

    async def kept(self, session: SessionId) -> StoredResult:
        return said(self.in_memory)

    async def replicated(self, session: SessionId) -> StoredResult:
        self.asked_elsewhere += 1
        return said(self.elsewhere)

    async def snapshot(self, arena: Path, session: SessionId | None = None) -> SnapshotResult:
        return SnapshotResult(1, 0, 0, 0)

    async def finish(self, session: SessionId, generation: int) -> None:
        self.finished.append((session, generation))


def said(what: T | MoverError) -> T:
    """An answer, or the error that it is."""
    if isinstance(what, MoverError):
        raise what
    return what


class Engine:
    """One epoch's writer; every session's slot by generation."""

    def __init__(self, epoch: Epoch) -> None:
        assert epoch.arena_path is not None
        self.epoch = epoch
        self.writer = ArenaWriter.open(epoch.arena_path)
        self.newest: SlotWriter | None = None

    def admit(self, placement: Placement, *tokens: int) -> SlotWriter:
        """Take a placement's session up, and write tokens of its own."""
        marker = placement.marker
        outputs = marker.resume.outputs if marker.resume is not None else ()
        slot = self.writer.admit(marker.session, marker.generation, PROMPT_LEN, HASH, outputs)
        assert slot is not None
        slot.set_blocks([1, 2, 3])
        slot.append_tokens(tokens)
        self.newest = slot
        return slot

    def finish(self, finish: str) -> None:
        """End the session that was admitted last."""
        assert self.newest is not None
        self.newest.finish(finish)


class Rig:
    """A coordinator with workers that start and die at a test's word."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.engines: dict[str, Engine] = {}
        self.mover = FakeMover()
        self.metrics = Metrics()
        self.let_go: list[tuple[str, int]] = []
        self.suspected: list[tuple[str, int, Reason]] = []
        self.workers = Workers(let_go=lambda epoch: self.let_go.append(epoch.id))
        stores, memory, replicas = (settings.pop(name, False) for name in ("stores", "memory", "replicas"))
        self.coordinator = SidecarCoordinator(
            self.workers,
            self.mover,
            self.metrics,
            CoordinatorSettings(**{"takeover_timeout_s": 5.0, "load_timeout_s": 0.2, **settings}),
            stores=stores,
            memory=self.mover if memory else None,
            replicas=self.mover if replicas else None,
            suspect=lambda *what: self.suspected.append(what),
        )

    def start(
        self,
        name: str,
        number: int = 1,
        *,
        adopted: bool = False,
        key: dict[str, str] | None = None,
        inexact: Sequence[str] = (),
        pools: int = 1,
    ) -> Engine:
        """An engine that is ready, with a pool for each of its ranks."""
        known = {w.name: w for w in self.workers.all()}
        worker = known.get(name) or self.workers.add(name, f"http://{name}")
        arena = self.folder / f"{name}-{number}.arena"
        create_arena(arena, slot_count=8, page_count=64)
        engine = Engine(self.workers.begin_epoch(worker, number, arena))
        self.workers.became(worker, WorkerState.STARTING)
        names = [f"{name}/{number}/{rank}" for rank in range(pools)]
        facts = {"engine": "vllm", "key": key or KEY, "pools": names, "adopted": adopted, "inexact": list(inexact)}
        engine.writer.publish(facts)
        self.engines[name] = engine
        self.workers.became(worker, WorkerState.READY)
        self.coordinator.workers_changed()
        return engine

    def start_bare(self, name: str) -> None:
        """An engine without the plugin."""
        worker = self.workers.add(name, f"http://{name}")
        self.workers.begin_epoch(worker, 1, None)
        self.workers.became(worker, WorkerState.READY)

    def die(self, engine: Engine, state: WorkerState = WorkerState.DEAD) -> None:
        self.workers.became(self.workers.get(engine.epoch.worker), state)
        self.coordinator.epoch_lost(engine.epoch, Reason.PROCESS_DEATH)

    async def over(
        self, last: Placement, *delivered: int, reason: Reason = Reason.PROCESS_DEATH, facts: SessionFacts | None = None
    ) -> Placement:
        return await self.coordinator.take_over(facts or asked(), last, reason, delivered)

    def told(self) -> dict[str, Any]:
        return self.coordinator.sessions()[-1]


def asked(stream: bool = True, **body: Any) -> SessionFacts:
    return SessionFacts(S, "/v1/completions", body, stream)


def covering(outputs: int) -> StoredResult:
    """KV of so many positions that a session can go on with `outputs` outputs."""
    return StoredResult(True, 1, PROMPT_LEN, HASH, PROMPT_LEN + outputs - 1, outputs)


async def running(rig: Rig, *tokens: int, facts: SessionFacts | None = None) -> tuple[Engine, Placement]:
    """A session on w0 that has journaled these tokens."""
    engine = rig.start("w0")
    placement = await rig.coordinator.admit(facts or asked())
    engine.admit(placement, *tokens)
    return engine, placement
