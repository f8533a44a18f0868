"""What the mover does in Python for each session and each block, beside what a GPU does: counted, so that it shows here
when it grows, whatever the machine.

`pytest -s` prints the counts, and times for who wants to compare them on one machine.
"""

import asyncio
import contextlib
import mmap
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.session.arena import LoadState
from midstream.session.held import HolderClient
from midstream.sidecar.mover import way
from midstream.sidecar.mover.counters import Counters
from midstream.sidecar.mover.device import Devices
from midstream.sidecar.mover.memory_area import MemoryArea
from midstream.sidecar.mover.memory_saver import MemorySaver, SavePolicy
from midstream.sidecar.mover.memory_tier import MemoryTier
from midstream.sidecar.mover.operations import Operations
from midstream.sidecar.mover.protocol import Op
from midstream.sidecar.mover.restorer import Restorer
from midstream.sidecar.mover.sources import Sources
from midstream.sidecar.mover.sums import Sums
from midstream.sidecar.mover.suspects import Suspects
from midstream.sidecar.mover.watcher import Watcher
from support.idle_gpu import SESSION_BLOCKS, SESSION_TOKENS, CallCount, Idle, IdleWorker, session_of
from support.memory_rig import mapped

SESSIONS = 32
# The generation whose calls are counted, which takes longer.
COUNTED = 100
# Calls of functions of midstream in the thread of the event loop: a tenth more than there were when this was written.
RESTORE_CALLS_MAX = 185
LOOK_CALLS_MAX = 285
BLOCK_CALLS_MAX = 30
BLOCKS = SESSIONS * SESSION_BLOCKS


class Bench:
    """A mover in this process, a worker whose blocks have sums, and one to which its sessions go."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = Idle(monkeypatch)
        self.old, self.new = (IdleWorker(folder, name, self.gpu, SESSIONS) for name in ("old", "new"))
        self.old.run()
        self.sums, self.counters = Sums(), Counters()
        # The holder is never asked: pools are this process's own.
        self.holder = HolderClient(folder / "nobody")
        self.sources = Sources(self.holder, Devices(pytest.fail), Suspects(folder / "suspects"))
        self.restorer = Restorer(self.sources, self.sums, self.counters, None)
        self.watcher = Watcher(self.sources, self.sums, self.counters)
        operations = Operations(self.sources, self.sums, self.counters, self.watcher, self.restorer, None, None)
        self.ask = operations.handlers()

    async def sum(self) -> None:
        """Sum all blocks."""
        self.watcher.watch(self.old.arena, "old")
        while self.sums.count < BLOCKS:
            self.watcher._next_look.clear()
            await self.watcher.turn(self.old.arena)

    async def restore(self, generation: int) -> tuple[int, float]:
        """All sessions at once; how many functions were called for that, and seconds of processors."""
        slots = self.new.wait(generation)
        requests = [
            {
                "session": session_of(index),
                "from": {"arena": str(self.old.arena), "generation": 1},
                "to": {"arena": str(self.new.arena), "generation": generation},
                "deadline_s": 30,
            }
            for index in range(SESSIONS)
        ]
        called, began = CallCount(), time.process_time()
        with called if generation == COUNTED else contextlib.nullcontext():
            answers = await asyncio.gather(*(self.ask[Op.RESTORE](request) for request in requests))
        took_s = time.process_time() - began
        assert [answer["blocks_verified"] for answer in answers] == [SESSION_BLOCKS] * SESSIONS
        # Whatever made way for them goes on.
        await asyncio.wait_for(self.restorer.way.make(), way.WAY_S_MAX / 2)
        for slot in slots:
            assert slot.inbox() == (LoadState.DONE, SESSION_TOKENS)
            slot.finish("abort")
        return called.count, took_s


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, monkeypatch)
    yield made
    for worker in (made.old, made.new):
        worker.writer.close()


async def test_many_restores_at_once_are_few_calls_of_the_driver_and_little_python(bench: Bench) -> None:
    await bench.sum()
    took_s = min([(await bench.restore(generation))[1] for generation in range(2, 12)])
    bench.gpu.driver.called.clear()
    called, _ = await bench.restore(COUNTED)
    launches = bench.gpu.driver.called["cuLaunchKernel"]
    calls = bench.gpu.driver.called.total()
    print(f"\n{SESSIONS} restores: {called / SESSIONS:.0f} calls each, {launches} launches with {calls} calls of the")
    print(f"driver; {1000 * took_s:.2f} ms of processors at least, {1e6 * took_s / SESSIONS:.0f} us each")
    assert 5 <= launches <= 8
    # Parameters, the kernel, sums, whether it is over.
    assert calls == 4 * launches
    assert called / SESSIONS < RESTORE_CALLS_MAX


async def test_a_look_at_sums_takes_no_more_python_for_more_blocks(bench: Bench) -> None:
    with CallCount() as called:
        await bench.sum()
    launches = bench.gpu.driver.called["cuLaunchKernel"]
    print(f"\n{BLOCKS} sums: {called.count / launches:.0f} calls a look, {launches} looks")
    # As much as one look may sum, in one launch each.
    assert launches == -(-BLOCKS // 500)
    assert called.count / launches < LOOK_CALLS_MAX


async def test_a_block_goes_out_to_tier_1_with_little_python(bench: Bench) -> None:
    # Only records are ever written there.
    fd = os.memfd_create("area")
    os.truncate(fd, BLOCKS * (2 << 20) * 5 // 4)
    memory = mmap.mmap(fd, 0)
    os.close(fd)
    area = mapped(memory)
    tier = MemoryTier(bench.holder, len(memory))
    tier.open(area, MemoryArea(area.view))
    tier._pinned = True
    saver = MemorySaver(bench.sources, bench.sums, bench.counters, tier, SavePolicy(1 << 50))
    bench.watcher._followers = (saver,)
    await bench.sum()
    bench.gpu.driver.called.clear()
    began = time.process_time()
    with CallCount() as called:
        running = asyncio.create_task(saver.run())
        while tier.figures.blocks_saved < BLOCKS:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    took_s = time.process_time() - began
    launches, copies = bench.gpu.driver.called["cuLaunchKernel"], bench.gpu.driver.called["cuMemcpyDtoHAsync"]
    print(f"\n{BLOCKS} blocks out: {called.count / BLOCKS:.1f} calls each, {launches} launches, {copies} copies;")
    print(f"{1e6 * took_s / BLOCKS:.1f} us of processors each, counting included")
    # A staging area each, its sums, and as few pieces as where extents end allows.
    assert launches == BLOCKS // 32
    assert copies <= 3 * launches
    assert called.count / BLOCKS < BLOCK_CALLS_MAX
    assert tier.figures.blocks_dropped == 0
