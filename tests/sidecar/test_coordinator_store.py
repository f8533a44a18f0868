"""A takeover asks the store only where no KV is held: a disk that hangs keeps nobody from memory that is there."""

import asyncio
from pathlib import Path

from midstream.proxy.coordinator import Reason, SessionFacts
from midstream.session.arena import create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.ids import SessionId
from midstream.session.key import REQUIRED
from midstream.sidecar.choice import Tier
from midstream.sidecar.coordinator import CoordinatorSettings, SidecarCoordinator
from midstream.sidecar.metrics import Metrics
from midstream.sidecar.mover.protocol import RestoreResult, StoredResult, VerifyResult
from midstream.sidecar.supervise import WorkerState
from midstream.sidecar.workers import Workers

S = SessionId("5" * 32)
KEY = {name: name for name in REQUIRED}


class HangingStore:
    """A mover whose disk never answers."""

    async def restore(
        self,
        session: SessionId,
        *,
        origin: SessionId | None = None,
        source: tuple[Path, int] | None,
        to_arena: Path,
        to_generation: int,
        deadline_s: float,
    ) -> RestoreResult:
        return RestoreResult(True, seconds=0.1)

    async def verify(self, arena: Path, session: SessionId, generation: int) -> VerifyResult:
        return VerifyResult(100, 100, 1, 0, 0)

    async def stored(self, session: SessionId) -> StoredResult:
        await asyncio.Event().wait()
        raise AssertionError

    async def finish(self, session: SessionId, generation: int) -> None:
        return None


async def test_a_session_with_held_kv_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    workers = Workers(let_go=lambda epoch: None)
    coordinator = SidecarCoordinator(workers, HangingStore(), Metrics(), CoordinatorSettings(), stores=True)
    writers: dict[str, ArenaWriter] = {}
    for name in ("a", "b"):
        worker = workers.add(name, f"http://{name}")
        arena = tmp_path / f"{name}.arena"
        create_arena(arena, slot_count=4, page_count=16)
        workers.begin_epoch(worker, 1, arena)
        writers[name] = ArenaWriter.open(arena)
        writers[name].publish({"engine": "vllm", "key": KEY, "pools": [f"{name}/1/0"]})
        workers.became(worker, WorkerState.READY)
    facts = SessionFacts(S, "/v1/completions", {}, stream=True)
    first = await coordinator.admit(facts)
    slot = writers[first.worker].admit(S, first.marker.generation, 5, "ab" * 16)
    assert slot is not None
    assert slot.set_blocks([1, 2])
    assert slot.append_tokens([7, 8])
    lost = workers.get(first.worker)
    assert lost.current is not None
    workers.became(lost, WorkerState.DEAD)
    coordinator.epoch_lost(lost.current, Reason.PROCESS_DEATH)
    async with asyncio.timeout(5):
        placed = await coordinator.take_over(facts, first, Reason.PROCESS_DEATH, (7,))
    assert placed.worker != first.worker
    assert placed.marker.resume is not None
    assert placed.marker.resume.kv.value == Tier.HELD.value
    coordinator.ended(facts, "cancelled")
    for writer in writers.values():
        writer.close()
