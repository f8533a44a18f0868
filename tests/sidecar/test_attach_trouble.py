"""An attached worker is followed on whatever fails around it, and an offer that failed is made again."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from midstream.session.arena import create_arena
from midstream.session.ticket import worker_dir, write_ticket
from midstream.sidecar import attach
from midstream.sidecar.attach import Attached
from midstream.sidecar.supervise import WorkerState
from midstream.sidecar.workers import Worker, Workers
from support.attached_engine import AttachedEngine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "POLL_S", 0.02)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AttachedEngine]:
    async with AttachedEngine(worker_dir(tmp_path, "w0")).reachable() as reachable:
        yield reachable


class FullTmpfs:
    """Offers places as the sidecar does, when there is room."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_full = True
        self.asked: list[int] = []

    async def offer(self, worker: Worker, number: int) -> Path:
        self.asked.append(number)
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        arena = self.folder / f"{number}.arena"
        arena.unlink(missing_ok=True)
        create_arena(arena, slot_count=2, page_count=4)
        place = {"MIDSTREAM_WORKER": "w0", "MIDSTREAM_EPOCH": str(number), "MIDSTREAM_ARENA": str(arena)}
        write_ticket(self.folder, place)
        return arena


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_on_a_full_tmpfs_an_engine_is_served_and_its_place_is_offered_later(
    tmp_path: Path, engine: AttachedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    full = FullTmpfs(worker_dir(tmp_path, "w0"))
    let_go: list[int] = []
    workers = Workers(let_go=lambda epoch: let_go.append(epoch.number))
    worker = workers.add("w0", engine.url)
    workers.became(worker, WorkerState.STARTING)
    attached = Attached(
        worker,
        workers,
        tmp_path,
        full.offer,
        on_lost=lambda epoch, reason: None,
        on_state=lambda: None,
        on_orphan=lambda name: None,
    )
    task = asyncio.create_task(attached.follow())
    try:
        await until(lambda: len(full.asked) > 3)
        assert set(full.asked) == {1}
        assert caplog.text.count("event=no_offer") == 1
        full.is_full = False
        await until(lambda: (full.folder / "ticket.json").exists())
        full.is_full = True
        await engine.start()
        await until(lambda: worker.state is WorkerState.READY and worker.current is not None)
        assert worker.current is not None
        # The place that the engine claimed is still its own, though the next could not be offered.
        await until(lambda: full.asked.count(2) > 3)
        assert (worker.current.number, worker.current.dead, let_go) == (1, False, [])
        assert worker.current.arena_path is not None
        assert worker.current.arena_path.exists()
        full.is_full = False
        await until(lambda: (full.folder / "2.arena").exists())
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
