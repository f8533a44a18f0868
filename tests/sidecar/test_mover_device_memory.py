"""Blocks between a pool on a GPU and memory of the host: which bytes go where, in how many pieces.

The GPU here keeps a number for each block, as in test_mover_device_pool.py, and brings numbers over its link.
"""

import contextlib
import ctypes
import os
import queue
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from midstream.session import vram
from midstream.session.errors import PoolError
from midstream.session.layout import Plane, PoolLayout, PoolMeta, cuda_memory
from midstream.sidecar.mover import device_pool
from midstream.sidecar.mover.device import Device, Job, Pieces, Side
from midstream.sidecar.mover.device_lanes import Urgency
from midstream.sidecar.mover.device_pool import DevicePool
from midstream.sidecar.mover.host_pool import HostPool
from midstream.sidecar.mover.pools import BlockDamaged, Copies, HostBlocks
from midstream.sidecar.mover.rank_pools import RankPools
from support.memory_rig import mapped

FORM = PoolLayout(40, 16, (Plane(0, 64, 64), Plane(40 * 64, 32, 32)))
BYTES = 96
POOL_AT = 1 << 30
# How far staging areas are apart.
AREA = 1 << 20


def pinned() -> dict[str, Any]:
    """Memory of this process."""
    memory = bytearray(40 * BYTES)
    return {"memory": memory, "view": memoryview(memory), "address": mapped(memory).address}


class Card:
    """A GPU with one pool and two staging areas; `pieces` is what crossed its link, `together` how much at once."""

    ordinal, gpu = 0, "GPU-0"

    def __init__(self) -> None:
        self.memory: dict[int, list[int]] = {POOL_AT: [100 + n for n in range(40)], AREA: [0] * 40, 2 * AREA: [0] * 40}
        self.pieces: list[tuple[int, int]] = []
        self.together = self.taken = 0
        # Of each staging area its memory here.
        self.pinned = {address: SimpleNamespace(device_address=address, **pinned()) for address in (AREA, 2 * AREA)}
        self._areas: queue.Queue[int] = queue.Queue()
        self._lock = threading.RLock()
        self._came, self.expected = threading.Condition(self._lock), 1
        for address in (AREA, 2 * AREA):
            self._areas.put(address)

    def run(
        self,
        source: Side,
        destination: Side,
        job: Job,
        urgency: Urgency,
        started: Callable[[], object] = lambda: None,
        *,
        up: Pieces = (),
        down: Pieces = (),
    ) -> "array[int]":
        assert len(job.sources) == len(job.destinations) >= len(job.expected)
        assert (bool(up), bool(down)) == (urgency is Urgency.RESTORE, urgency is Urgency.BACKGROUND)
        for address, area, number in self._blocks(up):
            self.memory[area][number] = int.from_bytes(ctypes.string_at(address, 8), "little")
        started()
        old, new = self.memory[source.address], self.memory[destination.address]
        for block, to in zip(job.sources, job.destinations, strict=True):
            new[to] = old[block]
        for address, area, number in self._blocks(down):
            ctypes.memmove(address, self.memory[area][number].to_bytes(8, "little") * (BYTES // 8), BYTES)
        return array("Q", (old[block] for block in job.sources[: len(job.expected)]))

    @contextlib.contextmanager
    def staging(self, urgency: Urgency) -> Iterator[Any]:
        address = self._areas.get(timeout=10)
        with self._lock:
            self.taken += 1
            self.together = max(self.together, self.taken)
            self._came.notify_all()
            # Where another one is to come at the same time it does, however busy this machine is.
            self._came.wait_for(lambda: self.together >= self.expected, 10)
        try:
            yield self.pinned[address]
        finally:
            with self._lock:
                self.taken -= 1
            self._areas.put(address)

    def _blocks(self, pieces: Pieces) -> Iterator[tuple[int, int, int]]:
        """Of each block its address in memory, and its place in which staging area."""
        for address, there, size_bytes in pieces:
            area, start = there // AREA * AREA, there % AREA
            assert start % BYTES == size_bytes % BYTES == 0
            with self._lock:
                self.pieces.append((start, size_bytes))
            for n in range(size_bytes // BYTES):
                yield address + n * BYTES, area, start // BYTES + n


@pytest.fixture
def card() -> Card:
    return Card()


@pytest.fixture
def pool(card: Card, monkeypatch: pytest.MonkeyPatch) -> DevicePool:
    def map_pool(fd: int, size_bytes: int, device: int) -> vram.DeviceMapping:
        mapping = vram.DeviceMapping(POOL_AT, size_bytes, device)
        mapping._closed = True
        return mapping

    monkeypatch.setattr(vram, "map_device_pool", map_pool)
    # Three blocks at a time.
    monkeypatch.setattr(device_pool, "STAGING_BYTES", 3 * BYTES + 5)
    memory = cuda_memory("GPU-00000000-0000-0000-0000-000000000000")
    fd = os.memfd_create("pool")
    meta = PoolMeta(FORM.end, FORM, FORM.fingerprint(), {}, memory, "1" * 32)
    made = DevicePool(cast(Device, card), "one", fd, meta)
    os.close(fd)
    return made


def places(memory: bytearray, numbers: Sequence[int]) -> HostBlocks:
    """Room for blocks, at these places of a memory."""
    area = mapped(memory)
    return HostBlocks(area.view, area.address, [number * BYTES for number in numbers], BYTES)


def test_blocks_come_back_from_where_they_were_put_whatever_the_order(card: Card, pool: DevicePool) -> None:
    memory = bytearray(20 * BYTES)
    blocks, at = [7, 3, 30, 4, 12, 13, 14, 1], [4, 5, 6, 0, 1, 9, 19, 18]
    card.expected = 2
    assert pool.save(blocks, places(memory, at)) == [100 + block for block in blocks]
    for block, number in zip(blocks, at, strict=True):
        assert memory[number * BYTES : (number + 1) * BYTES] == (100 + block).to_bytes(8, "little") * 12
    # Neighbours are one piece, but not from one staging area to the next.
    assert sorted(size for _, size in card.pieces) == [BYTES] * 3 + [2 * BYTES, 3 * BYTES]
    assert card.together == 2
    card.memory[POOL_AT][:] = [0] * 40
    started: list[int] = []
    room = [20, 21, 22, 5, 6, 7, 39, 0]
    assert pool.load(places(memory, at), room, lambda: started.append(1)) == [100 + block for block in blocks]
    assert [card.memory[POOL_AT][block] for block in room] == [100 + block for block in blocks]
    assert sum(value != 0 for value in card.memory[POOL_AT]) == len(room)
    assert len(started) == 3


def test_a_restore_does_not_stand_behind_what_is_copied_in_the_background(
    card: Card, pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = bytearray(4 * BYTES)
    assert pool.save([7, 3, 30, 4], places(kept, range(4))) == [107, 103, 130, 104]
    staging, begun, go_on = card.staging, threading.Semaphore(0), threading.Event()

    @contextlib.contextmanager
    def held(urgency: Urgency) -> Iterator[Any]:
        if urgency is Urgency.BACKGROUND:
            begun.release()
            assert go_on.wait(60)
        with staging(urgency) as twin:
            yield twin

    monkeypatch.setattr(card, "staging", held)
    memory = bytearray(12 * BYTES)
    with ThreadPoolExecutor(2) as threads:
        # More parts than there are areas.
        saving = threads.submit(pool.save, range(12), places(memory, range(12)))
        try:
            for _ in range(2):
                assert begun.acquire(timeout=20)
            loading = threads.submit(pool.load, places(kept, range(4)), [20, 21, 22, 23], lambda: None)
            assert loading.result(20) == [107, 103, 130, 104]
            assert not saving.done()
        finally:
            go_on.set()
        assert saving.result(20) == [100 + block for block in range(12)]


def test_blocks_that_went_to_disk_come_back_where_they_belong(card: Card, pool: DevicePool) -> None:
    blocks, room = [7, 3, 30, 4, 12, 13, 14, 1], [20, 21, 22, 5, 6, 7, 39, 0]
    raws = list(pool.gather(blocks, [100 + block for block in blocks[:5]]))
    assert raws == [(100 + block).to_bytes(8, "little") * (BYTES // 8) for block in blocks]
    card.memory[POOL_AT][:] = [0] * 40
    # They are nobody else's memory: the areas were used again since, and are now.
    pool.scatter(raws, room)
    assert [card.memory[POOL_AT][block] for block in room] == [100 + block for block in blocks]
    assert raws == [(100 + block).to_bytes(8, "little") * (BYTES // 8) for block in blocks]
    for bad in (raws[:-1], [*raws[:-1], raws[0][:-1]]):
        with pytest.raises(PoolError, match="give as many"):
            pool.scatter(bad, room)


@pytest.mark.parametrize("damaged", [0, 2, 3, 4])
def test_no_block_that_differs_is_given_out_nor_any_after_it(pool: DevicePool, damaged: int) -> None:
    blocks = [7, 3, 30, 4, 12]
    expected = [100 + block ^ (index == damaged) for index, block in enumerate(blocks)]
    given, found = pool.gather(blocks, expected), list[bytes]()
    with pytest.raises(BlockDamaged) as caught:
        found.extend(given)
    assert (len(found), caught.value.index) == (damaged, damaged)


def test_what_does_not_fit_is_refused_before_anything_is_copied(card: Card, pool: DevicePool) -> None:
    memory = bytearray(20 * BYTES)
    before = list(card.memory[POOL_AT])
    for blocks, room in (([40], [0]), ([-1], [0]), ([1, 2], [0]), ([1], [0, 1])):
        with pytest.raises(PoolError):
            pool.save(blocks, places(memory, room))
        with pytest.raises(PoolError):
            pool.load(places(memory, room), blocks, lambda: None)
    other = places(memory, [0])
    with pytest.raises(PoolError, match="give one each"):
        pool.save([1], HostBlocks(other.view, other.address, [0], BYTES + 16))
    assert not any(memory)
    assert card.memory[POOL_AT] == before
    assert card.pieces == []


def test_pieces_of_neighbouring_blocks_are_one() -> None:
    area = mapped(bytearray(1000))
    blocks = HostBlocks(area.view, area.address, [100, 110, 120, 50, 60, 500], 10)
    begin = area.address
    assert blocks.runs() == [(begin + 100, 0, 30), (begin + 50, 30, 20), (begin + 500, 50, 10)]
    assert blocks.part(4, 6).runs() == [(begin + o + 4, 6 * n, 6) for n, o in enumerate(blocks.offsets)]
    assert blocks.some(2, 3).runs() == [(begin + 120, 0, 10), (begin + 50, 10, 20)]


def host(first: int, count: int = 12) -> HostPool:
    """A host pool with two planes, of bytes that say where they are."""
    layout = PoolLayout(count, 4, (Plane(0, 32, 32), Plane(count * 32 + 7, 20, 16)))
    raw = bytearray((first + n) % 251 for n in range(layout.end))
    return HostPool(f"of {first}", layout, layout.fingerprint(), memoryview(raw), (0, first))


def test_of_several_ranks_each_block_has_the_parts_of_all_in_order() -> None:
    old, new = RankPools([host(1), host(90), host(7)]), RankPools([host(2), host(3), host(4)])
    size = old.layout.block_bytes
    memory = bytearray(6 * size)
    area = mapped(memory)
    blocks = HostBlocks(area.view, area.address, [3 * size, 0, 4 * size], size)
    sums = old.save([5, 0, 11], blocks)
    assert sums == old.sum_blocks([5, 0, 11])
    [raw] = old.gather([0], [])
    assert memory[:size] == raw
    assert new.load(blocks, [1, 2, 3], lambda: None) == sums == new.sum_blocks([1, 2, 3])
    assert list(new.gather([1, 2, 3], sums)) == list(old.gather([5, 0, 11], sums))
    # One rank's part differs: so does the block's sum.
    memory[size - 1] ^= 1
    found = new.load(blocks, [1, 2, 3], lambda: None)
    assert [one == other for one, other in zip(found, sums, strict=True)] == [True, False, True]


def test_a_host_pool_sums_what_has_arrived() -> None:
    pool, other = host(1), host(60)
    memory = bytearray(200)
    area = mapped(memory)
    blocks = HostBlocks(area.view, area.address, [100, 0], 48)
    assert pool.save([3, 9], blocks) == pool.sum_blocks([3, 9])
    memory[140] ^= 8
    found = other.load(blocks, [1, 2], lambda: None)
    assert found == other.sum_blocks([1, 2])
    assert found[0] != pool.sum_blocks([3])[0]
    assert other.copy_to(pool, Copies(0, [2], [9], pool.sum_blocks([9]))).damaged is None
