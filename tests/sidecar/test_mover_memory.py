"""Tier 1 through a real mover and a real holder: it outlives the mover, and is free when nobody will go on with it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from midstream.session.arena import LoadState
from midstream.session.errors import PoolError
from midstream.session.held import HolderClient, map_pool
from midstream.sidecar.mover import memory_map
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.mover.memory_area import MemoryArea
from midstream.sidecar.mover.memory_map import NAME
from midstream.sidecar.mover.protocol import RestoreResult
from support.memory_rig import PROMPT, outputs, run, session
from support.mover_rig import Processes, Worker

SIZE = 2 << 20
OPTIONS = ("--poll-s", "0.005", "--memory-bytes", str(SIZE))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.stop()
    assert "Traceback" not in started.log()


@pytest.fixture
def holder(processes: Processes) -> HolderClient:
    return processes.start_holder()


@pytest.fixture
async def mover(processes: Processes, holder: HolderClient) -> AsyncIterator[MoverClient]:
    client = MoverClient(processes.start_mover(*OPTIONS))
    yield client
    await client.close()


@pytest.fixture
def old(tmp_path: Path, holder: HolderClient) -> Iterator[Worker]:
    worker = Worker(tmp_path, "old", holder)
    yield worker
    worker.close()


@pytest.fixture
def new(tmp_path: Path, holder: HolderClient) -> Iterator[Worker]:
    worker = Worker(tmp_path, "new", holder, block_count=48, gap_bytes=100)
    yield worker
    worker.close()


async def until(mover: MoverClient, name: str, value: int) -> None:
    for _ in range(500):
        if (await mover.status()).get(name) == value:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} did not become {value}: {await mover.status()}")


async def from_memory(mover: MoverClient, new: Worker, generation: int = 2) -> RestoreResult:
    return await mover.restore(
        session(1), source=None, to_arena=new.arena, to_generation=generation, deadline_s=5, from_memory=True
    )


async def kill_and_start(processes: Processes, *options: str) -> None:
    assert processes.mover is not None
    processes.mover.kill()
    await asyncio.to_thread(processes.mover.wait)
    await asyncio.to_thread(processes.start_mover, *options)


async def test_it_outlives_pool_and_mover(mover: MoverClient, processes: Processes, old: Worker, new: Worker) -> None:
    run(old, 1, 11, [1, 2, 3, 4])
    await mover.watch(old.arena, "old")
    await until(mover, "tier1_blocks_saved", 4)
    old.view[:] = b"\xee" * old.size
    await kill_and_start(processes, *OPTIONS)
    kept = await mover.kept(session(1))
    assert (kept.found, kept.kv_len, kept.outputs, kept.prompt_len) == (True, 16, 11, len(PROMPT))
    slot = new.wait(session(1), PROMPT, outputs(11), [9, 8, 7, 6])
    assert (await from_memory(mover, new)).ok
    assert slot.inbox() == (LoadState.DONE, 16)
    assert len(new.right([*PROMPT, *outputs(11)], range(16), [9, 8, 7, 6])) == 16
    status = await mover.status()
    assert (status["tier1_restores"], status["tier1_bytes"], status["tier1_sessions"]) == (1, SIZE, 1)
    await mover.finish(session(1), 2)
    await until(mover, "tier1_blocks", 0)


async def test_a_damaged_block_of_a_held_pool_is_answered_before_the_engine_is_told(
    mover: MoverClient, old: Worker, new: Worker
) -> None:
    run(old, 1, 12, [1, 2, 3, 4, 5])
    await mover.watch(old.arena, "old")
    await until(mover, "tier1_blocks_saved", 4)
    old.view[old.layout.spans(2)[0][0]] ^= 1
    slot = new.wait(session(1), PROMPT, outputs(12), [9, 8, 7, 6, 5])
    began = time.monotonic()
    result = await mover.restore(session(1), source=(old.arena, 1), to_arena=new.arena, to_generation=2, deadline_s=5)
    assert (result.ok, result.reason, result.kept_tokens) == (False, "checksum", 16)
    assert slot.inbox() == (LoadState.NONE, 0) or time.monotonic() - began > 0.25
    # The session was placed anew, with what is kept.
    again = new.wait(session(1), PROMPT, outputs(11), [19, 18, 17, 16], 3)
    assert (await from_memory(mover, new, 3)).ok
    assert again.inbox() == (LoadState.DONE, 16)
    for _ in range(500):
        if slot.inbox() != (LoadState.NONE, 0):
            break
        await asyncio.sleep(0.01)
    assert slot.inbox() == (LoadState.FAILED, 0)


async def test_without_tier_1_a_damaged_block_is_told_at_once(
    processes: Processes, mover: MoverClient, old: Worker, new: Worker
) -> None:
    await kill_and_start(processes, "--poll-s", "0.005")
    run(old, 1, 12, [1, 2, 3, 4, 5])
    await mover.watch(old.arena, "old")
    await until(mover, "blocks_summed", 4)
    old.view[old.layout.spans(2)[0][0]] ^= 1
    slot = new.wait(session(1), PROMPT, outputs(12), [9, 8, 7, 6, 5])
    result = await mover.restore(session(1), source=(old.arena, 1), to_arena=new.arena, to_generation=2, deadline_s=5)
    assert (result.ok, result.reason, result.kept_tokens) == (False, "checksum", 0)
    assert slot.inbox() == (LoadState.FAILED, 0)
    assert not (await mover.kept(session(1))).found
    slot.finish("abort")
    new.wait(session(1), PROMPT, outputs(11), [19, 18, 17, 16], 3)
    assert (await from_memory(mover, new, 3)).reason == "store"


async def test_a_new_holder_is_given_the_memory_again(
    processes: Processes, holder: HolderClient, mover: MoverClient, old: Worker
) -> None:
    await until(mover, "tier1_bytes", SIZE)
    run(old, 1, 11, [1, 2, 3, 4])
    await mover.watch(old.arena, "old")
    await until(mover, "tier1_blocks_saved", 4)
    assert processes.holder is not None
    processes.holder.kill()
    await asyncio.to_thread(processes.holder.wait)
    processes.holder_path.unlink()
    await asyncio.to_thread(processes.start_holder)
    for _ in range(800):
        if any(pool.name == NAME for pool in await asyncio.to_thread(holder.list)):
            break
        await asyncio.sleep(0.01)
    fd, _ = await asyncio.to_thread(holder.get, NAME)
    assert len(MemoryArea(memoryview(map_pool(fd, SIZE))).found) == 4


@pytest.mark.parametrize("size", [4096, 1 << 60])
async def test_memory_that_cannot_be_had_is_said_once_and_everything_else_goes_on(
    processes: Processes, mover: MoverClient, old: Worker, new: Worker, size: int
) -> None:
    await kill_and_start(processes, "--poll-s", "0.005", "--memory-bytes", str(size))
    run(old, 1, 11, [1, 2, 3, 4])
    await mover.watch(old.arena, "old")
    await until(mover, "blocks_summed", 4)
    assert not (await mover.kept(session(1))).found
    new.wait(session(1), PROMPT, outputs(11), [9, 8, 7, 6])
    result = await mover.restore(session(1), source=(old.arena, 1), to_arena=new.arena, to_generation=2, deadline_s=5)
    assert result.ok
    assert processes.log().count("event=no_tier1") == 1
    assert "tier1.bytes" in processes.log()


async def test_a_holder_that_comes_later_is_found(tmp_path: Path, old: Worker, processes: Processes) -> None:
    assert processes.holder is not None
    processes.holder.kill()
    await asyncio.to_thread(processes.holder.wait)
    processes.holder_path.unlink()
    client = MoverClient(await asyncio.to_thread(processes.start_mover, *OPTIONS))
    assert not (await client.kept(session(1))).found
    await asyncio.to_thread(processes.start_holder)
    await until(client, "tier1_bytes", SIZE)
    assert processes.log().count("event=no_tier1") == 1
    await client.close()


async def test_with_another_size_it_begins_anew(processes: Processes, mover: MoverClient, old: Worker) -> None:
    run(old, 1, 11, [1, 2, 3, 4])
    await mover.watch(old.arena, "old")
    await until(mover, "tier1_blocks_saved", 4)
    await kill_and_start(processes, "--memory-bytes", str(2 * SIZE))
    await until(mover, "tier1_bytes", 2 * SIZE)
    assert not (await mover.kept(session(1))).found


async def test_a_mover_that_is_told_to_end_frees_the_memory(
    processes: Processes, holder: HolderClient, mover: MoverClient
) -> None:
    await until(mover, "tier1_bytes", SIZE)
    assert NAME in [pool.name for pool in await asyncio.to_thread(holder.list)]
    assert processes.mover is not None
    processes.mover.terminate()
    assert await asyncio.to_thread(processes.mover.wait, 10) == 0
    assert NAME not in [pool.name for pool in await asyncio.to_thread(holder.list)]


async def test_a_second_mover_does_not_touch_it(
    tmp_path: Path, processes: Processes, holder: HolderClient, mover: MoverClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(mover, "tier1_bytes", SIZE)
    monkeypatch.setattr(memory_map, "LOCK_S", 0.2)
    with pytest.raises(PoolError, match="another process has the memory"):
        await asyncio.to_thread(memory_map.mapped_area, holder, SIZE, threading.Event())
    await until(mover, "tier1_bytes", SIZE)
