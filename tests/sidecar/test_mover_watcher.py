"""How the mover looks at an arena: what has filled in all its sessions is summed together, at the pool's pace."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midstream.session.errors import PoolError
from midstream.session.ids import SessionId
from midstream.sidecar.mover.counters import Counters
from midstream.sidecar.mover.device import Devices
from midstream.sidecar.mover.host_pool import HostPool
from midstream.sidecar.mover.pools import Pace, Pool
from midstream.sidecar.mover.protocol import MoverError, Reason
from midstream.sidecar.mover.sources import Sources
from midstream.sidecar.mover.sums import Sums
from midstream.sidecar.mover.suspects import Suspect, Suspects
from midstream.sidecar.mover.watcher import Watcher
from support.mover_rig import Processes, Worker

PROMPT = [5, 6, 7, 8, 9, 10]


class Calls:
    """The calls that were made to sum blocks; `between` is what happens while the last of them runs."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []
        self.between: list[object] = []
        self.fails = False


class Noted(HostPool):
    """A host pool with a pace of its own that notes what it is asked for."""

    calls: Calls

    def sum_blocks(self, blocks: Sequence[int]) -> list[int]:
        self.calls.blocks.append(list(blocks))
        if self.calls.fails:
            raise PoolError("it cannot be read; look at it")
        values = super().sum_blocks(blocks)
        for action in self.calls.between:
            assert callable(action)
            action()
        return values


class Bench:
    """A watcher of one arena, whose turns a test takes."""

    def __init__(self, folder: Path, processes: Processes, pace: Pace, **options: float) -> None:
        holder = processes.start_holder()
        self.worker = Worker(folder, "one", holder)
        self.calls = calls = Calls()

        class Paced(Sources):
            async def pool(self, path: Path) -> Pool:
                found = await super().pool(path)
                assert isinstance(found, HostPool)
                noted = Noted(found.name, found.layout, found.fingerprint, found.view, found.identity, pace=pace)
                Noted.calls = calls
                return noted

        self.sums, self.counters = Sums(), Counters()
        self.suspects = Suspects(folder / "suspects")
        sources = Paced(holder, Devices(pytest.fail), self.suspects)
        self.watcher = Watcher(sources, self.sums, self.counters, **options)
        self.watcher.watch(self.worker.arena, "one")

    def run(self, number: int, blocks: Sequence[int], outputs: int = 15) -> None:
        self.worker.run(SessionId(f"{number:032x}"), PROMPT, list(range(100, 100 + outputs)), blocks)

    async def turn(self) -> None:
        await self.watcher.turn(self.worker.arena)


HOST = Pace(look_s=0.0, behind_s=0.0, look_bytes=1 << 20, step_bytes=1 << 20, together=1, at_once=1)
BLOCK_BYTES = 1024


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.stop()


async def test_what_filled_in_all_sessions_is_summed_in_one_call(processes: Processes, tmp_path: Path) -> None:
    bench = Bench(tmp_path, processes, HOST)
    for number in (1, 2, 3):
        bench.run(number, range(10 * number, 10 * number + 6))
    await bench.turn()
    assert bench.calls.blocks == [[block for n in (10, 20, 30) for block in range(n, n + 5)]]
    assert bench.sums.count == bench.counters.blocks_summed == 15
    bench.worker.close()


async def test_a_call_has_no_more_than_a_look_may_and_a_pause_comes_after_it(
    processes: Processes, tmp_path: Path
) -> None:
    pace = replace(HOST, look_s=30.0, behind_s=0.05, look_bytes=7 * BLOCK_BYTES)
    bench = Bench(tmp_path, processes, pace)
    for number in (1, 2, 3):
        bench.run(number, range(10 * number, 10 * number + 6))
    began = time.monotonic()
    while bench.sums.count < 15:
        await bench.turn()
    assert time.monotonic() - began >= 0.1
    assert [len(blocks) for blocks in bench.calls.blocks] == [5, 5, 5]
    # Nothing was left over: now the pause is the long one.
    bench.run(4, range(40, 46))
    await asyncio.sleep(0.1)
    await bench.turn()
    assert len(bench.calls.blocks) == 3
    bench.worker.close()


async def test_what_a_look_has_left_over_is_not_left_until_the_next_poll(processes: Processes, tmp_path: Path) -> None:
    pace = replace(HOST, look_s=30.0, behind_s=0.002, look_bytes=5 * BLOCK_BYTES)
    bench = Bench(tmp_path, processes, pace, poll_s=30.0)
    for number in (1, 2, 3, 4):
        bench.run(number, range(10 * number, 10 * number + 6))
    running = asyncio.create_task(bench.watcher.run())
    for _ in range(2000):
        if bench.sums.count >= 20:
            break
        await asyncio.sleep(0.005)
    assert [len(blocks) for blocks in bench.calls.blocks] == [5, 5, 5, 5]
    # With nothing to do it does not go round and round.
    turns, turn = list[Path](), bench.watcher.turn

    async def noted(path: Path) -> None:
        turns.append(path)
        await turn(path)

    bench.watcher.turn = noted  # type: ignore[method-assign]
    await asyncio.sleep(0.1)
    assert len(turns) <= 2
    running.cancel()
    bench.worker.close()


async def test_the_arena_of_a_dead_writer_is_not_looked_at_once_it_was_sealed(
    processes: Processes, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, processes, HOST)
    bench.run(1, range(6), outputs=17)
    await bench.watcher.seal(bench.worker.arena)
    assert [len(blocks) for blocks in bench.calls.blocks] == [6]
    bench.run(2, range(10, 16))
    await bench.turn()
    assert len(bench.calls.blocks) == 1
    # Somebody else's at the same place is followed from its beginning.
    bench.watcher.unwatch(bench.worker.arena)
    bench.watcher.watch(bench.worker.arena, "one")
    await bench.turn()
    assert [len(blocks) for blocks in bench.calls.blocks] == [6, 5]
    bench.worker.close()


async def test_a_session_with_more_than_a_look_may_have_takes_several(processes: Processes, tmp_path: Path) -> None:
    bench = Bench(tmp_path, processes, replace(HOST, look_bytes=2 * BLOCK_BYTES))
    bench.run(1, range(6))
    for _ in range(3):
        await bench.turn()
    assert bench.calls.blocks == [[0, 1], [2, 3], [4]]
    bench.worker.close()


async def test_a_session_that_moved_meanwhile_gets_no_sums_and_the_others_theirs(
    processes: Processes, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, processes, HOST)
    slot = bench.worker.run(SessionId("1" * 32), PROMPT, list(range(15)), range(6))
    bench.run(2, range(10, 16))
    bench.calls.between = [lambda: slot.set_blocks(range(30, 36))]
    await bench.turn()
    assert (bench.sums.count, bench.counters.sums_dropped) == (5, 5)
    assert [owner[1] for owner in bench.sums.owners(bench.worker.arena)] == [SessionId(f"{2:032x}")]
    bench.worker.close()


async def test_what_is_not_watched_any_more_gets_no_sums_but_is_still_sealed(
    processes: Processes, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, processes, HOST)
    bench.run(1, range(6), outputs=17)
    bench.calls.between = [lambda: bench.watcher.unwatch(bench.worker.arena)]
    await bench.turn()
    assert bench.sums.count == 0
    # Five full blocks, and the tail.
    assert await bench.watcher.seal(bench.worker.arena) == 6
    assert bench.sums.count == 6
    bench.worker.close()


async def test_a_tail_is_sealed_though_its_full_blocks_are_being_summed(processes: Processes, tmp_path: Path) -> None:
    bench = Bench(tmp_path, processes, HOST)
    bench.run(1, range(6), outputs=17)
    together = asyncio.Barrier(2)
    took = asyncio.to_thread

    async def slowly(*work: Any) -> Any:
        found = await took(*work)
        if getattr(work[0], "__name__", "") == "sum_blocks":
            await together.wait()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "to_thread", slowly)
        # Both have taken their sums before either has added them.
        await asyncio.gather(bench.turn(), bench.watcher.seal(bench.worker.arena))
    assert sorted(len(blocks) for blocks in bench.calls.blocks) == [5, 6]
    assert bench.sums.count == bench.counters.blocks_summed == 6
    bench.worker.close()


async def test_a_pool_that_cannot_be_read_is_a_named_reason(processes: Processes, tmp_path: Path) -> None:
    bench = Bench(tmp_path, processes, HOST)
    bench.run(1, range(6))
    bench.calls.fails = True
    with pytest.raises(MoverError, match="cannot be read") as caught:
        await bench.turn()
    assert caught.value.reason is Reason.POOL
    bench.calls.fails = False
    await bench.turn()
    assert bench.sums.count == 5
    bench.worker.close()


async def test_what_a_fault_may_have_touched_is_not_read_any_more(processes: Processes, tmp_path: Path) -> None:
    bench = Bench(tmp_path, processes, HOST)
    bench.run(1, range(10, 16))
    await bench.turn()
    before = len(bench.calls.blocks)
    assert before > 0
    status = bench.worker.arena.stat()
    bench.suspects.add([Suspect(bench.worker.arena, (status.st_dev, status.st_ino), "GPU-1")])
    bench.run(2, range(20, 26))
    await bench.turn()
    assert bench.watcher.live_sessions() == 2
    with pytest.raises(MoverError) as caught:
        await bench.watcher.seal(bench.worker.arena)
    assert caught.value.reason is Reason.FAULT
    assert len(bench.calls.blocks) == before
    bench.worker.close()
