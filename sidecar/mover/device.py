"""One GPU: a context, the kernels, and work that is sent to it. Calls block until the GPU has done what they ask.

Owns the order on the card: what comes from the host and parameters up, the blocks, answers and what goes to the host
down, all in one stream, waited for once, and one launch for many blocks.
Invariant: when `run` returns or raises nothing of it runs any more, but for a DeviceFault, after which this process
ends and nothing is trusted.
"""

import contextlib
import ctypes
import logging
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...session import vram
from ...session.errors import PoolError
from .device_calls import Calls, Faults
from .device_kernels import PLANE, THREADS, TILE_VECTORS, compile_kernels
from .device_lanes import BLOCKS_PER_LAUNCH, Lane, Lanes, Twin, Urgency
from .device_sum import SEED, VECTOR_BYTES, reference_sum

AGAIN_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Planes:
    """The planes of a pool or a staging area, as the kernels read them; `tiles` is how many the largest one has."""

    packed: bytes
    count: int
    tiles: int


@dataclass(frozen=True, slots=True)
class Side:
    """Where blocks are: an address on the card and the planes there."""

    address: int
    planes: Planes


@dataclass(frozen=True, slots=True)
class Job:
    """Blocks to be compared, copied, or both. `expected` are the sums of the first of them, as many as there are.

    Without `destinations` nothing is copied. `in_place`: both sides are the same memory, and a block that already lies
    where it should stays.
    """

    sources: Sequence[int]
    destinations: Sequence[int] = ()
    expected: Sequence[int] = ()
    in_place: bool = False

    def part(self, first: int, count: int) -> "Job":
        """Some of the blocks."""
        end = first + count
        return Job(self.sources[first:end], self.destinations[first:end], self.expected[first:end], self.in_place)


# Bytes that cross the link: where they lie in this process's memory, where on the card, and how many.
Pieces = Sequence[tuple[int, int, int]]


class Device:
    """A GPU that this process uses. Open it with `Devices`."""

    def __init__(self, ordinal: int, calls: Calls) -> None:
        self.ordinal = ordinal
        self.gpu = calls.gpu
        self._calls = calls
        with vram.current(ordinal):
            self._kernels = self._load()
            self._lanes = Lanes(calls)
            try:
                self._prove()
            except BaseException:
                self._lanes.close()
                raise

    def sums(self, side: Side, blocks: Sequence[int], urgency: Urgency) -> list[int]:
        """The sums of blocks, in order. Raises PoolError."""
        # Compared with anything: what is found is what is asked for.
        return self.run(side, side, Job(blocks, expected=[0] * len(blocks)), urgency).tolist()

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
        """Do a job; returns the sums that were found, of each block that is to be compared. Raises PoolError.

        A block that differs from its sum was copied all the same: it is not to be used. `started` is called when a
        launch was sent and is waited for. Before the blocks are touched `up` is brought onto the card, and afterwards
        `down` from it, in the same stream: nobody has to come back in between.
        """
        found = array("Q")
        with vram.current(self.ordinal), self._lanes.lane(urgency) as lane:
            for at in range(0, len(job.sources), BLOCKS_PER_LAUNCH):
                part, is_last = job.part(at, BLOCKS_PER_LAUNCH), at + BLOCKS_PER_LAUNCH >= len(job.sources)
                link = (() if at else up, down if is_last else ())
                found += self._launch(lane, source, destination, part, started, *link)
        return found

    @contextlib.contextmanager
    def staging(self, urgency: Urgency) -> Iterator[Twin]:
        """A staging area of one's own. Raises PoolError."""
        with vram.current(self.ordinal), self._lanes.staging(urgency) as twin:
            yield twin

    def _launch(
        self,
        lane: Lane,
        source: Side,
        destination: Side,
        job: Job,
        started: Callable[[], object],
        up: Pieces = (),
        down: Pieces = (),
    ) -> "array[int]":
        self._calls.check()
        driver, do = self._calls.driver, self._calls.do
        view, on_card = lane.parameters.view, lane.parameters.device_address
        checked, parts = len(job.expected), source.planes.count * source.planes.tiles
        if len(job.sources) * parts >= 1 << 31:
            raise PoolError(f"{len(job.sources)} blocks of {source.planes.count} planes are too many for one launch")
        if checked > len(job.sources) or len(job.destinations) not in (0, len(job.sources)):
            raise PoolError(
                f"{len(job.sources)} blocks have {checked} sums, {len(job.destinations)} places; give one each"
            )
        columns = (
            source.planes.packed,
            destination.planes.packed,
            array("Q", [SEED]) * checked,
            array("I", job.sources),
            array("I", job.destinations),
        )
        places, end = [], 0
        for column in columns:
            raw = memoryview(column).cast("B")
            view[end : end + len(raw)] = raw
            places.append(end)
            end += len(raw)
        planes, to_planes, sums, blocks, to_blocks = (_pointer(on_card + place) for place in places)
        shape = (_count(source.planes.count), _count(source.planes.tiles))
        what = f"run {len(job.sources)} blocks"
        try:
            for address, there, size_bytes in up:
                do(driver.cuMemcpyHtoDAsync(there, address, size_bytes, lane.stream), "copy onto the card")
            do(driver.cuMemcpyHtoDAsync(on_card, lane.parameters.address, end, lane.stream), what)
            if job.destinations:
                sides = (_pointer(source.address), planes, _pointer(destination.address), to_planes)
                lists = (blocks, to_blocks, sums, _count(checked), _count(job.in_place))
                self._start("copy_blocks", lane, len(job.sources) * parts, (*sides, *shape, *lists))
            elif checked:
                arguments = (_pointer(source.address), planes, *shape, blocks, sums)
                self._start("sum_blocks", lane, checked * parts, arguments)
            if checked:
                answers = (lane.parameters.address + places[2], on_card + places[2], checked * 8)
                do(driver.cuMemcpyDtoHAsync(*answers, lane.stream), what)
            for address, there, size_bytes in down:
                do(driver.cuMemcpyDtoHAsync(address, there, size_bytes, lane.stream), "copy from the card")
            started()
        finally:
            # Also when the half of it was refused: the lane is for others then.
            self._calls.wait(lane.stream, what)
        return array("Q", view[places[2] : places[3]].tobytes())

    def close(self) -> None:
        """Give back what it has on the card and what it has pinned; nothing may use it any more."""
        with vram.current(self.ordinal):
            self._lanes.close()

    def _start(self, name: str, lane: Lane, grid: int, arguments: "tuple[ctypes._SimpleCData[int], ...]") -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        launch = self._calls.driver.cuLaunchKernel
        # The driver reads the arguments before it returns.
        result = launch(self._kernels[name], grid, 1, 1, THREADS, 1, 1, 0, lane.stream, ctypes.addressof(pointers), 0)
        self._calls.do(result, f"launch {name}")

    def _load(self) -> dict[str, Any]:
        driver, do = self._calls.driver, self._calls.do
        what = f"ask what GPU {self.ordinal} is"
        device = do(driver.cuDeviceGet(self.ordinal), what)
        kind = driver.CUdevice_attribute
        major = do(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), what)
        minor = do(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), what)
        module = do(driver.cuModuleLoadData(compile_kernels(f"sm_{major}{minor}")), "load the kernels")
        names = ("sum_blocks", "copy_blocks")
        return {name: do(driver.cuModuleGetFunction(module, name.encode()), f"find {name}") for name in names}

    def _prove(self) -> None:
        """Use both kernels in every lane, on blocks whose sums are known: no restore must be the first to do so.

        Raises PoolError when they do something else than what device_sum.py defines.
        """
        driver, do, what = self._calls.driver, self._calls.do, "prove the kernels"
        sizes = (VECTOR_BYTES, TILE_VECTORS * VECTOR_BYTES + VECTOR_BYTES, 3 * VECTOR_BYTES)
        starts = tuple(sum(sizes[:n]) for n in range(len(sizes)))
        size = sum(sizes)
        planes = planes_of([(start, size, part) for start, part in zip(starts, sizes, strict=True)])
        raw = random.Random(size).randbytes(2 * size)
        sums = [reference_sum(raw[at : at + size]) for at in (0, size)]
        address = int(do(driver.cuMemAlloc(4 * size), what))
        try:
            do(driver.cuMemcpyHtoD(address, raw, len(raw)), what)
            source, destination = Side(address, planes), Side(address + 2 * size, planes)
            copied, compared = Job((0, 1), (1, 0), sums), Job((1, 0), expected=sums)
            with self._lanes.all() as lanes:
                for lane in lanes:
                    do(driver.cuMemsetD8(destination.address, 0, 2 * size), what)
                    do(driver.cuCtxSynchronize(), what)
                    for job, place in ((copied, source), (compared, destination)):
                        found = self._launch(lane, place, destination, job, lambda: None)
                        if found.tolist() != sums:
                            raise PoolError(
                                f"the kernels on GPU {self.ordinal} compute wrong sums; use another NVRTC or driver"
                            )
        finally:
            driver.cuMemFree(address)


class Devices:
    """The GPUs of this process by their UUID, each opened once, when a pool on it is first needed."""

    def __init__(self, on_fault: Callable[[str], None]) -> None:
        self._faults = Faults(on_fault)
        self._opened: dict[str, Device] = {}
        # When it may be tried again, how long that was, and why.
        self._refused: dict[str, tuple[float, float, str]] = {}
        self._lock = threading.Lock()

    @property
    def faulty(self) -> str | None:
        """The GPU that had a fault, known before anybody was told of it; for any thread."""
        return self._faults.gpu

    def get(self, gpu_uuid: str) -> Device:
        """The GPU of that UUID. Raises PoolError; then it is not tried again for AGAIN_S, and twice as long each time.

        What an attempt leaves behind on a card that is full is little, but it must not add up.
        """
        with self._lock:
            device = self._opened.get(gpu_uuid)
            if device is not None:
                return device
            again, pause_s, text = self._refused.get(gpu_uuid, (0.0, AGAIN_S / 2, ""))
            if text and time.monotonic() < again:
                raise PoolError(text)
            try:
                device = self._opened[gpu_uuid] = self._open(gpu_uuid)
            except PoolError as error:
                self._refused[gpu_uuid] = (time.monotonic() + 2 * pause_s, 2 * pause_s, str(error))
                raise
            return device

    def close(self) -> None:
        """Close every GPU; no pool there may be used any more. One that is needed again is opened anew."""
        with self._lock:
            while self._opened:
                _, device = self._opened.popitem()
                device.close()

    def _open(self, gpu_uuid: str) -> Device:
        ordinal = vram.device_of(gpu_uuid)
        from cuda.bindings import driver

        began = time.monotonic()
        device = Device(ordinal, Calls(driver, self._faults, gpu_uuid))
        _log.info("event=gpu_opened gpu=%s seconds=%.3f", gpu_uuid, time.monotonic() - began)
        return device


def _pointer(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(address)


def _count(value: int) -> ctypes.c_uint32:
    return ctypes.c_uint32(value)


def planes_of(spans: Sequence[tuple[int, int, int]]) -> Planes:
    """Planes from (offset, stride, bytes) each. Raises PoolError for what the kernels cannot read."""
    packed, before, tiles = bytearray(), 0, 0
    for offset, stride, size_bytes in spans:
        if offset % VECTOR_BYTES or stride % VECTOR_BYTES or size_bytes % VECTOR_BYTES:
            raise PoolError(
                f"a plane at {offset} with stride {stride} and {size_bytes} bytes a block is not in units of "
                f"{VECTOR_BYTES} bytes; its sessions are recomputed"
            )
        vectors = size_bytes // VECTOR_BYTES
        packed += PLANE.pack(offset, stride, vectors, before)
        before += vectors
        tiles = max(tiles, -(-vectors // TILE_VECTORS))
    return Planes(bytes(packed), len(spans), tiles)
