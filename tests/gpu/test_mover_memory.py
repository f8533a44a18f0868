"""Tier 1 of pools in VRAM, through a real mover and a real holder."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from midstream.session.arena import LoadState
from midstream.session.held import HolderClient, map_pool
from midstream.session.ids import SessionId
from midstream.session.layout import PoolMeta
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.mover.device import Devices
from midstream.sidecar.mover.device_pool import DevicePool, open_device_pool
from midstream.sidecar.mover.memory_area import MemoryArea
from midstream.sidecar.mover.memory_map import NAME
from midstream.sidecar.mover.pools import HostBlocks
from support.device_rig import DeviceWorker, block_bytes, write_bytes
from support.memory_rig import mapped
from support.mover_rig import Processes, layout_of

pytestmark = pytest.mark.gpu

SESSION = SessionId("1" * 32)
PROMPT = [5, 6, 7, 8, 9, 10]
OUTPUTS = list(range(100, 140))
# All positions but the newest, and those of full blocks.
POSITIONS = len(PROMPT) + len(OUTPUTS) - 1
FULL = POSITIONS // 4
SIZE = 64 << 20
MEMORY = ("--poll-s", "0.005", "--memory-bytes", str(SIZE))


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
    client = MoverClient(processes.start_mover(*MEMORY))
    yield client
    await client.close()


@pytest.fixture
def old(tmp_path: Path, holder: HolderClient) -> Iterator[DeviceWorker]:
    worker = DeviceWorker(tmp_path, "old", holder)
    yield worker
    worker.close()


@pytest.fixture
def new(tmp_path: Path, holder: HolderClient) -> Iterator[DeviceWorker]:
    worker = DeviceWorker(tmp_path, "new", holder, layout=layout_of(300, gap_bytes=64))
    yield worker
    worker.close()


async def until(mover: MoverClient, name: str, value: int) -> None:
    for _ in range(6000):
        if (await mover.status()).get(name, 0) >= value:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} did not become {value}: {await mover.status()}")


async def test_blocks_in_vram_are_kept_and_come_back_after_pool_and_mover_are_lost(
    mover: MoverClient, processes: Processes, old: DeviceWorker, new: DeviceWorker
) -> None:
    old.run(SESSION, PROMPT, OUTPUTS, range(31, 19, -1))
    await mover.watch(old.arena, "old")
    await until(mover, "tier1_blocks_saved", FULL)
    assert "event=tier1_pinned" in processes.log()
    write_bytes(old.address, b"\xee" * old.layout.end)
    assert processes.mover is not None
    processes.mover.kill()
    await asyncio.to_thread(processes.mover.wait)
    await asyncio.to_thread(processes.start_mover, *MEMORY)
    kept = await mover.kept(SESSION)
    assert (kept.found, kept.kv_len) == (True, 4 * FULL)
    room = list(range(60, 60 + FULL))
    others = [block_bytes(new.address, new.layout, block) for block in (59, 60 + FULL)]
    slot = new.wait(SESSION, PROMPT, OUTPUTS[: kept.outputs], room)
    result = await mover.restore(
        SESSION, source=None, to_arena=new.arena, to_generation=2, deadline_s=20, from_memory=True
    )
    assert (result.ok, result.blocks_verified, result.blocks_unverified) == (True, FULL, 0), result
    assert slot.inbox() == (LoadState.DONE, 4 * FULL)
    assert new.right([*PROMPT, *OUTPUTS], range(4 * FULL), room) == list(range(4 * FULL))
    assert [block_bytes(new.address, new.layout, block) for block in (59, 60 + FULL)] == others


async def test_a_bit_that_fell_over_in_memory_is_found_on_the_card(
    mover: MoverClient, holder: HolderClient, old: DeviceWorker, new: DeviceWorker
) -> None:
    old.run(SESSION, PROMPT, OUTPUTS, range(20, 32))
    await mover.watch(old.arena, "old")
    await until(mover, "tier1_blocks_saved", FULL)
    fd, _ = holder.get(NAME)
    view = memoryview(map_pool(fd, SIZE))
    area = MemoryArea(view)
    [slab] = [slab for slab, record in area.found if record.ordinal == 5]
    view[area.offset(slab) + 777] ^= 16
    slot = new.wait(SESSION, PROMPT, OUTPUTS[:30], range(60, 72))
    result = await mover.restore(
        SESSION, source=None, to_arena=new.arena, to_generation=2, deadline_s=20, from_memory=True
    )
    assert (result.ok, result.reason, result.kept_tokens) == (False, "corrupt", 20)
    await asyncio.sleep(0.4)
    assert slot.inbox() == (LoadState.FAILED, 0)
    os.close(fd)


async def test_tails_are_kept_with_every_token(
    processes: Processes, holder: HolderClient, old: DeviceWorker, new: DeviceWorker
) -> None:
    client = MoverClient(processes.start_mover(*MEMORY, "--memory-tail-tokens", "1"))
    await client.watch(old.arena, "old")
    said, blocks = OUTPUTS[:7], list(range(20, 32))
    slot = old.run(SESSION, PROMPT, said, blocks)
    for token in range(200, 209):
        old.decode(slot, PROMPT, said, blocks, token)
    tokens = len(PROMPT) + len(said) - 1
    for _ in range(1000):
        if (await client.kept(SESSION)).kv_len == tokens:
            break
        await asyncio.sleep(0.01)
    new.wait(SESSION, PROMPT, said, range(60, 72))
    result = await client.restore(
        SESSION, source=None, to_arena=new.arena, to_generation=2, deadline_s=20, from_memory=True
    )
    assert (result.ok, result.tokens) == (True, tokens), result
    assert new.right([*PROMPT, *said], range(tokens), range(60, 72)) == list(range(tokens))
    await client.close()


@pytest.fixture
def devices() -> Iterator[Devices]:
    """The GPUs as a mover in this process has them."""
    opened = Devices(lambda text: pytest.fail(text))
    yield opened
    opened.close()


def _opened(devices: Devices, holder: HolderClient, name: str) -> DevicePool:
    fd, body = holder.get(name)
    pool = open_device_pool(devices, name, fd, PoolMeta.from_json(body))
    os.close(fd)
    return pool


def test_what_is_saved_is_what_is_there_in_pinned_memory_or_not(
    devices: Devices, holder: HolderClient, old: DeviceWorker, new: DeviceWorker
) -> None:
    old.run(SESSION, PROMPT, OUTPUTS, range(20, 32))
    one, other = _opened(devices, holder, "old/1/0"), _opened(devices, holder, "new/1/0")
    size = old.layout.block_bytes
    memory = bytearray(20 * size)
    area = mapped(memory)
    blocks, at = list(range(20, 31)), [3, 4, 5, 0, 19, 18, 7, 8, 9, 10, 11]
    places = HostBlocks(area.view, area.address, [number * size for number in at], size)
    assert one.save(blocks, places) == one.sum_blocks(blocks)
    for block, number in zip(blocks, at, strict=True):
        assert memory[number * size : (number + 1) * size] == block_bytes(old.address, old.layout, block)
    room = list(range(100, 111))
    assert other.load(places, room, lambda: None) == one.sum_blocks(blocks) == other.sum_blocks(room)
