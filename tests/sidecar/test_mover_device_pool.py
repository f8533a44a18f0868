"""What a pool on a GPU asks of the GPU for several sessions at once, and what it tells each of them.

The GPU here is one that keeps a number for each block and copies it, with the rules of the kernels: a block's sum is
that number, told of each that is to be compared.
"""

import contextlib
import errno
import os
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any, cast

import pytest

from midstream.session import vram
from midstream.session.errors import PoolError
from midstream.session.layout import Plane, PoolLayout, PoolMeta, cuda_memory
from midstream.sidecar.mover import device_lanes
from midstream.sidecar.mover.device import Device, Job, Side
from midstream.sidecar.mover.device_lanes import BACKGROUND_LANES, STAGINGS, URGENT_LANES, Lanes, Urgency
from midstream.sidecar.mover.device_pool import DevicePool
from midstream.sidecar.mover.pools import Copied, Copies

FORM = PoolLayout(40, 16, (Plane(0, 64, 64), Plane(40 * 64, 32, 32)))
BYTES = 96

# The blocks of each pool by where it is mapped; mappings of one pool share them.
Memory = dict[int, list[int]]


class Card:
    """A GPU; `jobs` is what was asked of it."""

    def __init__(self, ordinal: int, memory: Memory) -> None:
        self.ordinal = ordinal
        self.gpu = f"GPU-{ordinal}"
        self.memory = memory
        self.jobs: list[Job] = []

    def run(
        self, source: Side, destination: Side, job: Job, urgency: Urgency, started: Callable[[], object] = lambda: None
    ) -> "array[int]":
        assert len(job.expected) <= len(job.sources)
        self.jobs.append(job)
        old, new = self.memory[source.address], self.memory[destination.address]
        found = array("Q", (old[block] for block in job.sources[: len(job.expected)]))
        for block, to in zip(job.sources, job.destinations, strict=False):
            new[to] = old[block]
        started()
        return found


class Rig:
    """Pools on cards."""

    def __init__(self) -> None:
        self.memory: Memory = {}
        self.by_fd: dict[int, list[int]] = {}
        self._address = 1 << 30

    def map(self, fd: int, size_bytes: int, device: int) -> vram.DeviceMapping:
        # Descriptors of one file are of one pool.
        self._address += 1 << 20
        self.memory[self._address] = self.by_fd[os.fstat(fd).st_ino]
        mapping = vram.DeviceMapping(self._address, size_bytes, device)
        mapping._closed = True
        return mapping

    def pool(self, card: Card, first: int) -> tuple[DevicePool, list[int]]:
        fd = os.memfd_create("pool")
        blocks = self.by_fd[os.fstat(fd).st_ino] = [first + n for n in range(FORM.block_count)]
        memory = cuda_memory("GPU-00000000-0000-0000-0000-000000000000")
        meta = PoolMeta(FORM.end, FORM, FORM.fingerprint(), {}, memory, f"{first:032x}")
        made = DevicePool(cast(Device, card), f"of {first}", fd, meta)
        os.close(fd)
        return made, blocks


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig()
    monkeypatch.setattr(vram, "map_device_pool", rig.map)
    return rig


def works_of(old: list[int], wrong: int | None = None) -> list[Copies]:
    """Three sessions: one whose blocks all have sums, one whose tail has none, and one without any."""
    parts = [(0, [3, 1, 2], [9, 8, 7], 3), (10, [5, 6, 4, 0], [1, 2, 3, 4], 2), (0, [20, 21], [30, 31], 0)]
    return [
        Copies(first, sources, to, [old[block] ^ (block == wrong) for block in sources[:count]])
        for first, sources, to, count in parts
    ]


@pytest.mark.parametrize("apart", [False, True])
def test_all_sessions_are_copied_in_one_job_and_each_is_told_its_own(rig: Rig, apart: bool) -> None:
    here = Card(0, rig.memory)
    there = Card(1, rig.memory) if apart else here
    (source, old), (destination, new) = rig.pool(here, 100), rig.pool(there, 500)
    started: list[int] = []
    done = source.copy_all(destination, works_of(old), lambda: started.append(1))
    assert done == [Copied(3 * BYTES, 3, 0), Copied(4 * BYTES, 2, 2), Copied(2 * BYTES, 0, 2)]
    # In one go, by the card that they go to.
    assert (len(there.jobs), here.jobs == there.jobs) == (1, not apart)
    assert started
    for work in works_of(old):
        assert [new[block] for block in work.destinations] == [old[block] for block in work.sources]
    assert new[0] == 500


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("wrong", "session", "ordinal"), [(3, 0, 0), (2, 0, 2), (5, 1, 10), (6, 1, 11)])
def test_a_damaged_block_stops_its_own_session_alone(
    rig: Rig, apart: bool, wrong: int, session: int, ordinal: int
) -> None:
    here = Card(0, rig.memory)
    there = Card(1, rig.memory) if apart else here
    (source, old), (destination, new) = rig.pool(here, 100), rig.pool(there, 500)
    works = works_of(old, wrong)
    done = source.copy_all(destination, works, lambda: None)
    assert done[session].damaged == ordinal
    assert done[session].bytes == 0
    reached = {to for work in works for to in work.destinations}
    assert all(new[block] == 500 + block for block in range(FORM.block_count) if block not in reached)
    for index, work in enumerate(works):
        if index != session:
            assert done[index].damaged is None
            assert [new[block] for block in work.destinations] == [old[block] for block in work.sources]


def test_a_pool_is_in_reach_of_the_gpus_that_have_copied_from_it(rig: Rig) -> None:
    here, there = Card(0, rig.memory), Card(1, rig.memory)
    (source, old), (destination, _) = rig.pool(here, 100), rig.pool(there, 500)
    assert (source.gpus, destination.gpus) == ({"GPU-0"}, {"GPU-1"})
    source.copy_all(destination, works_of(old), lambda: None)
    assert (source.gpus, destination.gpus) == ({"GPU-0", "GPU-1"}, {"GPU-1"})


def test_a_mover_without_a_free_descriptor_maps_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapped:
        address, closed = 1 << 30, False

        def close(self) -> None:
            self.closed = True

    mapped: list[Mapped] = []

    def map_pool(fd: int, size_bytes: int, device: int) -> Mapped:
        mapped.append(Mapped())
        return mapped[-1]

    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(vram, "map_device_pool", map_pool)
    monkeypatch.setattr(os, "dup", refuse)
    with pytest.raises(PoolError, match="pool of 100: Too many open files"):
        rig.pool(Card(0, rig.memory), 100)
    assert [one.closed for one in mapped] == [True]


def test_blocks_that_lie_where_they_should_are_not_counted_as_copied(rig: Rig) -> None:
    pool, blocks = rig.pool(Card(0, rig.memory), 100)
    works = [Copies(0, [1, 2], [1, 2], blocks[1:3]), Copies(0, [5, 6], [5, 9], blocks[5:7])]
    assert pool.copy_all(pool, works, lambda: None) == [Copied(0, 2, 0), Copied(BYTES, 2, 0)]


@pytest.mark.parametrize("bad", [Copies(0, [0, 40], [1, 2], []), Copies(0, [0, 1], [-1, 2], [])])
def test_no_session_is_copied_with_one_whose_blocks_do_not_exist(rig: Rig, bad: Copies) -> None:
    card = Card(0, rig.memory)
    (source, old), (destination, _) = rig.pool(card, 100), rig.pool(card, 500)
    with pytest.raises(PoolError, match="block table"):
        source.copy_all(destination, [*works_of(old), bad], lambda: None)
    for odd in (Copies(0, [0, 1], [1], []), Copies(0, [0], [1], [5, 6])):
        with pytest.raises(PoolError, match="give one each"):
            source.copy_all(destination, [odd], lambda: None)
    assert card.jobs == []


class Driver:
    """A driver that keeps account of what is pinned and allocated."""

    class CUstream_flags:
        CU_STREAM_NON_BLOCKING = 1

    def __init__(self, registrations_max: int = 1000) -> None:
        self.pinned: dict[int, int] = {}
        self.allocated: set[int] = set()
        self.streams: set[int] = set()
        self._left = registrations_max
        self._number = 0

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        return lambda *_: (Status(0),)

    def _next(self, into: set[int]) -> tuple[Any, ...]:
        self._number += 1
        into.add(self._number)
        return Status(0), self._number

    def cuCtxGetStreamPriorityRange(self) -> tuple[Any, ...]:
        return Status(0), 0, -5

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[Any, ...]:
        return self._next(self.streams)

    def cuMemAlloc(self, size_bytes: int) -> tuple[Any, ...]:
        return self._next(self.allocated)

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> tuple[Any, ...]:
        # As the real one does: no byte is pinned twice.
        if any(address < end and start < address + size_bytes for start, end in self.pinned.items()):
            return (Status(712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),)
        if not self._left:
            return (Status(2, "CUDA_ERROR_OUT_OF_MEMORY"),)
        self._left -= 1
        self.pinned[address] = address + size_bytes
        return (Status(0),)

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        del self.pinned[address]
        return (Status(0),)

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        self.allocated.remove(address)
        return (Status(0),)

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self.streams.remove(stream)
        return (Status(0),)


class Status(int):
    name: str

    def __new__(cls, value: int, name: str = "CUDA_SUCCESS") -> "Status":
        made = super().__new__(cls, value)
        made.name = name
        return made


class Calls:
    """The driver's calls, where what fails is refused."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def do(self, result: tuple[Any, ...], what: str) -> Any:
        status, *values = result
        if status:
            raise PoolError(f"cannot {what}: {status.name}")
        return tuple(values) if len(values) > 1 else values[0] if values else None


def test_lanes_that_are_closed_leave_nothing_and_others_can_be_made() -> None:
    driver = Driver()
    for _ in range(5):
        lanes = Lanes(cast(Any, Calls(driver)))
        with lanes.all() as taken, lanes.staging(Urgency.RESTORE):
            assert len({id(lane) for lane in taken}) == len(taken) > 2
        lanes.close()
        assert (driver.pinned, driver.allocated, driver.streams) == ({}, set(), set())


def test_a_restore_has_the_next_staging_area_whoever_came_before_it() -> None:
    lanes, order = Lanes(cast(Any, Calls(Driver()))), list[Urgency]()
    came = threading.Semaphore(0)

    def use(urgency: Urgency) -> None:
        came.release()
        with lanes.staging(urgency):
            order.append(urgency)

    with contextlib.ExitStack() as taken:
        for _ in range(STAGINGS):
            taken.enter_context(lanes.staging(Urgency.BACKGROUND))
        wanted = (Urgency.BACKGROUND, Urgency.BACKGROUND, Urgency.RESTORE)
        users = [threading.Thread(target=use, args=(urgency,)) for urgency in wanted]
        for user in users:
            user.start()
            assert came.acquire(timeout=20)
            time.sleep(0.02)
        assert order == []
    for user in users:
        user.join(20)
    assert order == [Urgency.RESTORE, Urgency.BACKGROUND, Urgency.BACKGROUND]
    lanes.close()


def test_while_a_restore_has_a_lane_nothing_is_begun_in_the_background_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes, order = Lanes(cast(Any, Calls(Driver()))), list[str]()
    monkeypatch.setattr(device_lanes, "WAY_S_MAX", 20.0)

    def use() -> None:
        with lanes.lane(Urgency.BACKGROUND):
            order.append("background")

    with lanes.lane(Urgency.RESTORE):
        with lanes.lane(Urgency.RESTORE):
            user = threading.Thread(target=use)
            user.start()
            time.sleep(0.02)
            order.append("first")
        time.sleep(0.02)
        order.append("second")
    user.join(20)
    assert order == ["first", "second", "background"]
    monkeypatch.setattr(device_lanes, "WAY_S_MAX", 0.01)
    with lanes.lane(Urgency.RESTORE), lanes.lane(Urgency.BACKGROUND):
        order.append("both")
    assert order[-1] == "both"
    lanes.close()


def test_who_waits_for_a_staging_area_in_vain_is_told_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_lanes, "WAIT_S_MAX", 0.02)
    lanes = Lanes(cast(Any, Calls(Driver())))
    with lanes.staging(Urgency.RESTORE), lanes.staging(Urgency.RESTORE):
        for urgency in Urgency:
            with pytest.raises(PoolError, match="was busy"), lanes.staging(urgency):
                pass
    with lanes.staging(Urgency.BACKGROUND):
        pass
    lanes.close()


def test_the_memory_of_lanes_that_were_dropped_is_never_another_ones() -> None:
    driver = Driver()
    for _ in range(20):
        lanes = Lanes(cast(Any, Calls(driver)))
        del lanes
    assert len(driver.pinned) == 20 * (URGENT_LANES + BACKGROUND_LANES)


def test_lanes_that_could_not_all_be_made_leave_nothing() -> None:
    driver = Driver(registrations_max=3)
    with pytest.raises(PoolError, match="OUT_OF_MEMORY"):
        Lanes(cast(Any, Calls(driver)))
    assert (driver.pinned, driver.allocated, driver.streams) == ({}, set(), set())
