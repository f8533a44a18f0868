"""The mover's kernels on a real GPU: their sums are those of the definition, and nothing damaged is ever copied.

The last tests print rates; their bars are far below what such a card does, and only find what is badly wrong.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from midstream.session import vram
from midstream.session.errors import PoolError
from midstream.session.layout import Plane, PoolLayout, PoolMeta, cuda_memory
from midstream.sidecar.mover.device import Devices, Job
from midstream.sidecar.mover.device_lanes import Urgency
from midstream.sidecar.mover.device_pool import DevicePool, open_device_pool
from midstream.sidecar.mover.device_sum import reference_sum
from midstream.sidecar.mover.pools import BlockDamaged, Copied, Copies
from support.device_rig import block_bytes, done, read_bytes, write_bytes

pytestmark = pytest.mark.gpu

KIB = 1 << 10
# Planes below a tile, of exactly one, a bit more, of many, and the smallest there can be.
UNEVEN = (256, 64 * KIB, 64 * KIB + 16, 1120 * KIB, 16, 48)
# K and V of 32 layers of an 8B-shaped model, 16 tokens a block: 2 MiB.
LARGE = (64 * KIB,) * 32


def layout(block_count: int, sizes: tuple[int, ...], gap_bytes: int = 0) -> PoolLayout:
    planes, offset = [], 0
    for size in sizes:
        planes.append(Plane(offset, size + gap_bytes, size))
        offset += block_count * (size + gap_bytes)
    return PoolLayout(block_count, 16, tuple(planes))


class Made:
    """A pool that this process made, and its mapping as the mover has it."""

    def __init__(self, devices: Devices, name: str, form: PoolLayout, device: int = 0) -> None:
        made = vram.create_device_pool(form.end, device)
        memory = cuda_memory(vram.device_uuid(device))
        meta = PoolMeta(made.size_bytes, form, form.fingerprint(), {}, memory, os.urandom(16).hex())
        self.layout, self.address, self.size_bytes, self.device = form, made.address, made.size_bytes, device
        self.mapping = made.mapping
        self.pool: DevicePool = open_device_pool(devices, name, made.fd, meta)
        os.close(made.fd)

    def fill(self, seed: int) -> None:
        """Random bytes, no two blocks alike: what repeats does so at odd places."""
        raw = random.Random(seed).randbytes((16 << 20) + 80)
        for at in range(0, self.size_bytes, len(raw)):
            write_bytes(self.address + at, raw[: self.size_bytes - at], self.device)

    def block(self, block: int) -> bytes:
        return block_bytes(self.address, self.layout, block, self.device)

    def change(self, block: int, plane: int, offset: int, raw: bytes) -> None:
        start, _ = self.layout.spans(block)[plane]
        write_bytes(self.address + start + offset, raw, self.device)

    def read(self, block: int, plane: int, offset: int, size_bytes: int) -> bytes:
        start, _ = self.layout.spans(block)[plane]
        return read_bytes(self.address + start + offset, size_bytes, self.device)


Make = Callable[..., Made]


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    opened = Devices(lambda text: pytest.fail(text))
    yield opened
    opened.close()


@pytest.fixture
def make(devices: Devices) -> Iterator[Make]:
    made: list[Made] = []

    def one(form: PoolLayout, *, device: int = 0, seed: int | None = None) -> Made:
        made.append(Made(devices, f"pool{len(made)}", form, device))
        if seed is not None:
            made[-1].fill(seed)
        return made[-1]

    yield one
    for pool in made:
        pool.mapping.close()


@pytest.mark.parametrize("sizes", [(256,) * 4, UNEVEN, LARGE[:3]])
@pytest.mark.parametrize("gap_bytes", [0, 48])
def test_sums_are_those_of_the_definition(make: Make, sizes: tuple[int, ...], gap_bytes: int) -> None:
    one = make(layout(9, sizes, gap_bytes), seed=1)
    blocks = [3, 8, 0, 3]
    assert one.pool.sum_blocks(blocks) == [reference_sum(one.block(block)) for block in blocks]
    assert one.pool.sum_blocks([]) == []


def test_every_kind_of_damage_changes_a_sum(make: Make) -> None:
    one = make(layout(4, UNEVEN), seed=2)
    before = one.pool.sum_blocks([1, 2])
    assert before[0] != before[1]
    last = len(UNEVEN) - 1
    cases = {
        "the first byte": (0, 0, bytes([one.read(1, 0, 0, 1)[0] ^ 1])),
        "the last byte": (last, UNEVEN[last] - 1, bytes([one.read(1, last, UNEVEN[last] - 1, 1)[0] ^ 0x80])),
        "a bit at the top of two words": (
            3,
            4096,
            bytes(b ^ (0x80 if n in (7, 23) else 0) for n, b in enumerate(one.read(1, 3, 4096, 32))),
        ),
        "a zeroed vector": (3, 160, bytes(16)),
        "words swapped": (1, 32, one.read(1, 1, 40, 8) + one.read(1, 1, 32, 8)),
        "vectors swapped": (1, 64, one.read(1, 1, 80, 16) + one.read(1, 1, 64, 16)),
        "a plane of another block": (2, 0, one.read(2, 2, 0, UNEVEN[2])),
    }
    for name, (plane, offset, raw) in cases.items():
        kept = one.read(1, plane, offset, len(raw))
        assert kept != raw, name
        one.change(1, plane, offset, raw)
        assert one.pool.sum_blocks([1, 2])[0] != before[0], name
        one.change(1, plane, offset, kept)
        assert one.pool.sum_blocks([1, 2]) == before, name


@pytest.mark.parametrize("sizes", [(256,) * 4, UNEVEN])
def test_permuted_blocks_arrive_and_their_neighbours_stay(make: Make, sizes: tuple[int, ...]) -> None:
    old, new = make(layout(40, sizes), seed=3), make(layout(50, sizes, 64), seed=4)
    sources, room = random.Random(5).sample(range(40), 12), random.Random(6).sample(range(50), 12)
    others = {block: new.block(block) for block in range(50) if block not in room}
    sums = old.pool.sum_blocks(sources)
    size = old.layout.block_bytes
    assert old.pool.copy_to(new.pool, Copies(7, sources, room, sums[:9])) == Copied(12 * size, 9, 3)
    assert [new.block(block) for block in room] == [old.block(block) for block in sources]
    assert {block: new.block(block) for block in others} == others


def test_a_damaged_block_is_told_of_and_reaches_no_other(make: Make) -> None:
    old, new = make(layout(8, UNEVEN), seed=7), make(layout(8, UNEVEN), seed=8)
    sums = old.pool.sum_blocks(range(8))
    kept = [new.block(block) for block in (0, 4, 5, 6, 7)]
    old.change(5, 3, 1000 * KIB, b"\1" if old.read(5, 3, 1000 * KIB, 1) != b"\1" else b"\2")
    done_of = old.pool.copy_to(new.pool, Copies(10, [4, 5, 6], [1, 2, 3], sums[4:7]))
    assert done_of.damaged == 11
    assert [new.block(block) for block in (0, 4, 5, 6, 7)] == kept
    with pytest.raises(BlockDamaged) as caught:
        list(old.pool.gather([4, 5, 6], sums[4:7]))
    assert caught.value.index == 1


def test_of_several_sessions_copied_together_a_damaged_block_stops_its_own_alone(make: Make) -> None:
    old, new = make(layout(24, UNEVEN), seed=23), make(layout(24, UNEVEN), seed=24)
    sources, room = random.Random(25).sample(range(24), 12), random.Random(26).sample(range(24), 12)
    sums = old.pool.sum_blocks(sources)
    # Of the first all blocks have sums, of the second the fourth has none, of the third none has.
    parts = [(0, 0, 4, 4), (10, 4, 8, 3), (0, 8, 12, 0)]
    works = [Copies(first, sources[a:b], room[a:b], sums[a : a + count]) for first, a, b, count in parts]
    sizes, begun = old.layout.block_bytes, list[int]()
    damaged = [works[0], replace(works[1], expected=[sums[4], sums[5] ^ 1, sums[6]]), works[2]]
    assert old.pool.copy_all(new.pool, damaged, lambda: begun.append(1)) == [
        Copied(4 * sizes, 4, 0),
        Copied(0, 1, 0, 11),
        Copied(4 * sizes, 0, 4),
    ]
    assert begun
    for at in (*range(4), *range(8, 12)):
        assert new.block(room[at]) == old.block(sources[at])
    assert old.pool.copy_all(new.pool, works, lambda: None)[1] == Copied(4 * sizes, 3, 1)
    assert [new.block(block) for block in room] == [old.block(block) for block in sources]


def test_blocks_that_lie_where_they_should_are_compared_and_left_alone(make: Make) -> None:
    one = make(layout(8, UNEVEN), seed=9)
    sums = one.pool.sum_blocks([1, 2, 3])
    blocks = [one.block(block) for block in (1, 2, 3)]
    done_of = one.pool.copy_to(one.pool, Copies(0, [1, 2, 3], [1, 6, 3], sums))
    assert done_of == Copied(one.layout.block_bytes, 3, 0)
    assert [one.block(block) for block in (1, 6, 3)] == blocks


def test_what_was_gathered_is_scattered_back_as_it_was(make: Make) -> None:
    # More than one staging area.
    old, new = make(layout(60, LARGE), seed=10), make(layout(50, LARGE, 16), seed=11)
    blocks, room = random.Random(12).sample(range(60), 40), random.Random(13).sample(range(50), 40)
    raws = list(old.pool.gather(blocks, old.pool.sum_blocks(blocks[:35])))
    assert raws == [old.block(block) for block in blocks]
    new.pool.scatter(raws, room)
    assert new.pool.sum_blocks(room) == old.pool.sum_blocks(blocks)


def test_blocks_that_do_not_exist_are_refused_before_a_kernel_sees_them(make: Make) -> None:
    one = make(layout(4, (256,)), seed=14)
    for blocks in ([0, 4], [-1, 0]):
        with pytest.raises(PoolError, match="block table"):
            one.pool.sum_blocks(blocks)
        with pytest.raises(PoolError, match="block table"):
            one.pool.copy_to(one.pool, Copies(0, [0, 1], blocks, []))


def test_blocks_of_another_gpu_of_this_host_arrive(make: Make) -> None:
    if vram.device_count() < 2:
        pytest.skip("there is one GPU")
    old, new = make(layout(300, LARGE), seed=15), make(layout(300, LARGE), device=1)
    blocks, room = random.Random(16).sample(range(300), 250), random.Random(17).sample(range(300), 250)
    sums = old.pool.sum_blocks(blocks)
    assert old.pool.copy_to(new.pool, Copies(0, blocks, room, sums)).damaged is None
    assert new.pool.sum_blocks(room) == sums
    rate = _rate(old, lambda: old.pool.copy_to(new.pool, Copies(0, blocks, room, sums)), 250)
    print(f"\nGPU 0 to GPU 1, compared and copied: {rate:.0f} GB/s")
    bad = [*sums[:9], sums[9] ^ 1, *sums[10:]]
    assert old.pool.copy_to(new.pool, Copies(0, blocks, room, bad)).damaged == 9


def _rate(one: Made, work: Callable[[], object], blocks: int) -> float:
    """GB/s of the fastest of some runs, as the caller of a pool sees it."""
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return blocks * one.layout.block_bytes / min(seconds) / 1e9


def test_blocks_are_summed_and_copied_at_the_speed_of_the_memory(make: Make) -> None:
    old, new = make(layout(600, LARGE), seed=18), make(layout(600, LARGE))
    # A session of 4,000 tokens, and two of them in one step.
    for count in (250, 500):
        blocks, room = random.Random(19).sample(range(600), count), random.Random(20).sample(range(600), count)
        sums = old.pool.sum_blocks(blocks)
        summed = _rate(old, lambda: old.pool.sum_blocks(blocks), count)  # noqa: B023
        copied = _rate(old, lambda: old.pool.copy_to(new.pool, Copies(0, blocks, room, [])), count)  # noqa: B023
        both = _rate(old, lambda: old.pool.copy_to(new.pool, Copies(0, blocks, room, sums)), count)  # noqa: B023
        print(
            f"\n{count} blocks of 2 MiB: summed {summed:.0f}, copied {copied:.0f}, compared and copied {both:.0f} GB/s"
        )
        assert new.pool.sum_blocks(room) == sums
    assert both > 300


def test_blocks_go_to_host_memory_and_back_at_the_speed_of_the_link(make: Make) -> None:
    one = make(layout(64, LARGE), seed=21)
    device = one.pool._device
    blocks = list(range(32))
    raws = list(one.pool.gather(blocks, []))
    side, one_block = one.pool._side(device), Job([0], expected=[0])
    with device.staging(Urgency.BACKGROUND) as twin:
        size = len(twin.view)
        whole, count = [(twin.address, twin.device_address, size)], size // one.layout.block_bytes
        down = _rate(one, lambda: device.run(side, side, one_block, Urgency.BACKGROUND, down=whole), count)
        up = _rate(one, lambda: device.run(side, side, one_block, Urgency.RESTORE, up=whole), count)
    out = _rate(one, lambda: list(one.pool.gather(blocks, [])), 32)
    back = _rate(one, lambda: one.pool.scatter(raws, blocks), 32)
    print(f"\nlink alone: down {down:.1f}, up {up:.1f}; gathered {out:.1f}, scattered {back:.1f} GB/s (one thread)")
    assert min(down, up) > 10


def test_what_the_mover_has_on_the_card_is_small(devices: Devices, make: Make) -> None:
    from cuda.bindings import driver

    one = make(layout(64, LARGE), seed=22)
    for _ in range(2):
        one.pool.scatter(list(one.pool.gather([1, 2], [])), [1, 2])
    with vram.current(0):
        status, free, total = driver.cuMemGetInfo()
        done((status,))
    print(f"\nin use on the card beside a pool of {one.size_bytes >> 20} MiB: {(total - free) >> 20} MiB")
