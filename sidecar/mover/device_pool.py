"""Pools in VRAM: blocks summed, copied, gathered and scattered by kernels.

Owns the mappings of one pool, on the GPU where it lies and on those that have copied from it; they go when the last one
who uses the pool lets go of it. Keeps the contract of `pools.py`.
"""

import contextlib
import logging
import operator
import os
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

from ...session import vram
from ...session.errors import PoolError
from ...session.layout import PoolLayout, PoolMeta
from .device import Device, Devices, Job, Planes, Side, planes_of
from .device_lanes import STAGING_BYTES, STAGINGS, URGENT_LANES, Twin, Urgency
from .pools import BlockDamaged, Copied, Copies, HostBlocks, Pace, Pool, SumKind

__all__ = ["DevicePool", "Devices", "open_device_pool"]

# Restores in one launch: few enough to begin soon, many enough that the next ones are prepared meanwhile.
TOGETHER = 4
# A look takes the card for a fraction of a millisecond, ten times a second, or a hundred times where there is more to
# sum. A session of a few thousand tokens takes it for about half a millisecond, a whole step for a few.
PACE = Pace(look_s=0.1, behind_s=0.004, look_bytes=1 << 30, step_bytes=8 << 30, together=TOGETHER, at_once=URGENT_LANES)

_log = logging.getLogger(__name__)


class DevicePool:
    """A pool on a GPU, mapped for its kernels."""

    sum_kind = SumKind.DEVICE
    rank_count = 1
    pace = PACE

    def __init__(self, device: Device, name: str, fd: int, meta: PoolMeta) -> None:
        self.name = name
        self.memory = meta.memory
        self.layout: PoolLayout = meta.layout
        self.fingerprint = meta.fingerprint
        self.form = (meta.fingerprint, meta.layout.block_tokens, meta.layout.block_bytes)
        self.identity = (meta.memory, meta.identity)
        self._device = device
        self._size_bytes = meta.size_bytes
        self._planes = planes_of([(p.offset, p.stride, p.size_bytes) for p in meta.layout.planes])
        self._staged = _staged(meta.layout)
        if meta.layout.block_bytes > STAGING_BYTES:
            raise PoolError(
                f"pool {name}: a block of {meta.layout.block_bytes} bytes is larger than the {STAGING_BYTES} that can "
                "be staged; use a smaller block size"
            )
        self.gpus = frozenset({device.gpu})
        self._mappings = {device.ordinal: vram.map_device_pool(fd, meta.size_bytes, device.ordinal)}
        self._lock = threading.Lock()
        # While one part crosses the link, the other one is gathered or scattered. A restore has threads of its own: who
        # goes first is said where areas are taken, and it must get that far.
        self._savers = ThreadPoolExecutor(STAGINGS, thread_name_prefix="saver")
        self._loaders = ThreadPoolExecutor(STAGINGS, thread_name_prefix="loader")
        try:
            # For GPUs that are to copy from it: only a descriptor can be mapped once more.
            self._fd = os.dup(fd)
        except OSError as error:
            _unmap(self._mappings)
            raise PoolError(f"pool {name}: {error.strerror}; let the mover have more open files") from error
        weakref.finalize(self, _let_go, self._mappings, self._fd).atexit = False

    def sum_blocks(self, blocks: Sequence[int], *, urgent: bool = False) -> list[int]:
        """The sums of blocks, in order, in as few launches as can be."""
        self._check(blocks)
        return self._device.sums(self._side(self._device), blocks, Urgency.RESTORE if urgent else Urgency.BACKGROUND)

    def copy_to(self, destination: Pool, work: Copies) -> Copied:
        """Copy blocks, the damaged ones among them; of a session that has one none may be used."""
        return self.copy_all(destination, [work], lambda: None)[0]

    def copy_all(self, destination: Pool, works: Sequence[Copies], started: Callable[[], object]) -> list[Copied]:
        """Copy for several sessions in as few launches as can be, of each what it read and compared."""
        if not isinstance(destination, DevicePool):
            raise PoolError(f"pools {self.name} and {destination.name} lie in different memory; go on from disk")
        if self.fingerprint != destination.fingerprint:
            raise PoolError(f"pools {self.name} and {destination.name} have different blocks; recompute the session")
        in_place = self.identity == destination.identity
        # Where they go to: from another GPU each byte crosses the link once, and what is summed is what has arrived.
        there = destination._device
        for work in works:
            self._check(work.sources)
            destination._check(work.destinations)
        job = replace(_joined(works), in_place=in_place)
        found = there.run(self._side(there), destination._side(there), job, Urgency.RESTORE, started)
        damaged = _damaged_of(works, found, job.expected)
        return [self._copied(work, index, in_place) for work, index in zip(works, damaged, strict=True)]

    def _copied(self, work: Copies, damaged: int | None, in_place: bool) -> Copied:
        if damaged is not None:
            return Copied(0, damaged, 0, work.first + damaged)
        staying = sum(map(operator.eq, work.sources, work.destinations)) if in_place else 0
        count, checked = len(work.sources), len(work.expected)
        return Copied((count - staying) * self.form[2], checked, count - checked)

    def gather(self, blocks: Sequence[int], expected: Sequence[int]) -> Iterator[bytes]:
        """The bytes of blocks, brought from the card a staging area at a time."""
        self._check(blocks)
        size = self.layout.block_bytes
        step = STAGING_BYTES // size
        for at in range(0, len(blocks), step):
            job = Job(blocks[at : at + step], range(len(blocks[at : at + step])), expected[at : at + step])
            with self._device.staging(Urgency.BACKGROUND) as twin:
                side, down = Side(twin.device_address, self._staged), _whole(twin, len(job.sources) * size)
                found = self._device.run(self._side(self._device), side, job, Urgency.BACKGROUND, down=down)
                damaged = _first_damaged(found, job.expected)
                count = len(job.sources) if damaged is None else damaged
                # Copied out, so that nobody waits for the area while these are compressed and written.
                raws = [bytes(twin.view[n * size : (n + 1) * size]) for n in range(count)]
            yield from raws
            if damaged is not None:
                raise BlockDamaged(at + damaged)

    def scatter(self, raws: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Put blocks' bytes where they belong, a staging area at a time."""
        self._check(blocks)
        size = self.layout.block_bytes
        if len(raws) != len(blocks) or any(len(raw) != size for raw in raws):
            raise PoolError(f"pool {self.name}: its {len(blocks)} blocks have {size} bytes each; give as many")
        step = STAGING_BYTES // size
        for at in range(0, len(blocks), step):
            part = blocks[at : at + step]
            with self._device.staging(Urgency.RESTORE) as twin:
                for n, raw in enumerate(raws[at : at + step]):
                    twin.view[n * size : (n + 1) * size] = raw
                side, up = Side(twin.device_address, self._staged), _whole(twin, len(part) * size)
                job = Job(range(len(part)), part)
                self._device.run(side, self._side(self._device), job, Urgency.RESTORE, up=up)

    def save(self, blocks: Sequence[int], to: HostBlocks) -> list[int]:
        """Gather blocks into staging areas, which sums them, and have each brought into host memory."""

        def bring(blocks: Sequence[int], to: HostBlocks) -> "array[int]":
            job = Job(blocks, range(len(blocks)), [0] * len(blocks))
            runs = to.runs()
            with self._device.staging(Urgency.BACKGROUND) as twin:
                side = Side(twin.device_address, self._staged)
                down = [(address, twin.device_address + start, size_bytes) for address, start, size_bytes in runs]
                return self._device.run(self._side(self._device), side, job, Urgency.BACKGROUND, down=down)

        return self._in_parts(self._savers, blocks, to, bring)

    def load(self, source: HostBlocks, blocks: Sequence[int], started: Callable[[], object]) -> list[int]:
        """Bring blocks from host memory into staging areas, and scatter them, which sums them."""

        def bring(blocks: Sequence[int], source: HostBlocks) -> "array[int]":
            job = Job(range(len(blocks)), blocks, [0] * len(blocks))
            runs = source.runs()
            with self._device.staging(Urgency.RESTORE) as twin:
                side = Side(twin.device_address, self._staged)
                up = [(address, twin.device_address + start, size_bytes) for address, start, size_bytes in runs]
                return self._device.run(side, self._side(self._device), job, Urgency.RESTORE, started, up=up)

        return self._in_parts(self._loaders, blocks, source, bring)

    def _in_parts(
        self,
        threads: ThreadPoolExecutor,
        blocks: Sequence[int],
        places: HostBlocks,
        bring: "Callable[[Sequence[int], HostBlocks], array[int]]",
    ) -> list[int]:
        """A staging area's worth at a time, as many at once as there are areas; returns when all of it is over."""
        self._check(blocks)
        if len(places.offsets) != len(blocks) or places.block_bytes != self.layout.block_bytes:
            raise PoolError(
                f"{len(blocks)} blocks of {self.layout.block_bytes} bytes have {len(places.offsets)} places of "
                f"{places.block_bytes}; give one each"
            )
        step = STAGING_BYTES // self.layout.block_bytes
        running = [
            threads.submit(bring, blocks[at : at + step], places.some(at, step)) for at in range(0, len(blocks), step)
        ]
        wait(running)
        return [value for done in running for value in done.result()]

    def _check(self, blocks: Sequence[int]) -> None:
        """Raise PoolError for a block that does not exist: kernels would write anywhere."""
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.layout.block_count:
            raise PoolError(
                f"blocks {min(blocks)} to {max(blocks)} are not all in a pool of {self.layout.block_count}; "
                "the block table is not of this pool"
            )

    def _side(self, device: Device) -> Side:
        with self._lock:
            mapping = self._mappings.get(device.ordinal)
            if mapping is None:
                # From before its kernels can write there.
                self.gpus |= {device.gpu}
                mapping = vram.map_device_pool(self._fd, self._size_bytes, device.ordinal)
                self._mappings[device.ordinal] = mapping
        return Side(mapping.address, self._planes)


def open_device_pool(devices: Devices, name: str, fd: int, meta: PoolMeta) -> DevicePool:
    """Map a pool on its GPU, and read there once; the descriptor may be closed afterwards. Raises PoolError."""
    if meta.gpu_uuid is None:
        raise PoolError(f"pool {name} lies in host memory; map it as such")
    pool = DevicePool(devices.get(meta.gpu_uuid), name, fd, meta)
    pool.sum_blocks([0])
    return pool


def _staged(layout: PoolLayout) -> Planes:
    """Blocks one after the other, all planes of each in order: how they lie in a staging area."""
    spans, offset = [], 0
    for plane in layout.planes:
        spans.append((offset, layout.block_bytes, plane.size_bytes))
        offset += plane.size_bytes
    return planes_of(spans)


def _whole(twin: Twin, size_bytes: int) -> list[tuple[int, int, int]]:
    """The first bytes of a staging area, as one piece."""
    return [(twin.address, twin.device_address, size_bytes)]


def _joined(works: Sequence[Copies]) -> Job:
    """One job for all of them: first the blocks that have sums, of one session after the other, then the others."""
    sources, destinations, expected = array("I"), array("I"), array("Q")
    for work in works:
        if len(work.sources) != len(work.destinations) or len(work.expected) > len(work.sources):
            raise PoolError(
                f"{len(work.sources)} blocks have {len(work.expected)} sums, {len(work.destinations)} places; "
                "give one each"
            )
        checked = len(work.expected)
        sources.extend(work.sources[:checked])
        destinations.extend(work.destinations[:checked])
        expected.extend(work.expected)
    for work in works:
        checked = len(work.expected)
        sources.extend(work.sources[checked:])
        destinations.extend(work.destinations[checked:])
    return Job(sources, destinations, expected)


def _damaged_of(works: Sequence[Copies], found: Sequence[int], expected: Sequence[int]) -> list[int | None]:
    """For each of the works the place of its first damaged block, or None."""
    if found == expected:
        return [None] * len(works)
    damaged, at = [], 0
    for work in works:
        end = at + len(work.expected)
        damaged.append(_first_damaged(found[at:end], expected[at:end]))
        at = end
    return damaged


def _first_damaged(found: Sequence[int], expected: Sequence[int]) -> int | None:
    return next((n for n, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other), None)


def _let_go(mappings: dict[int, vram.DeviceMapping], fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
    _unmap(mappings)


def _unmap(mappings: dict[int, vram.DeviceMapping]) -> None:
    for mapping in mappings.values():
        try:
            mapping.close()
        except PoolError as error:
            _log.warning("event=pool_not_unmapped error=%s", error)
