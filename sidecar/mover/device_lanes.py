"""Lanes of a GPU: a stream and the buffers that go with it, each for one thread at a time.

Owns their number and memory: per GPU URGENT_LANES + BACKGROUND_LANES lanes of LANE_BYTES, pinned and on the card, and
at most STAGINGS areas of STAGING_BYTES, pinned and on the card, each made when it is first needed. Invariant: a lane is
given back only when nothing of it runs any more; memory is let go of only after the driver has. Restores have the
lanes that go first on the card, and the next staging area that is given back; while they have any lane nothing is
begun in the background, for a while: what is on the link cannot be overtaken.
"""

import ctypes
import mmap
import queue
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

from ...session.errors import PoolError
from ...session.layout import PLANES_MAX
from .device_calls import Calls
from .device_kernels import PLANE

T = TypeVar("T")

URGENT_LANES = 4
# Two for what crosses the link, while sums are taken in the third.
BACKGROUND_LANES = 3
STAGINGS = 2
STAGING_BYTES = 64 << 20
BLOCKS_PER_LAUNCH = 16384
# Planes of both sides; of each block its sum, and its number on both sides.
LANE_BYTES = 2 * PLANES_MAX * PLANE.size + BLOCKS_PER_LAUNCH * (8 + 4 + 4)
WAIT_S_MAX = 60.0
# How long the background makes way for restores at most, before each part of its work.
WAY_S_MAX = 0.02


class Urgency(Enum):
    """Who waits for it."""

    RESTORE = auto()
    BACKGROUND = auto()


@dataclass(frozen=True, slots=True)
class Twin:
    """Pinned memory of this process, and as much on the card."""

    memory: mmap.mmap
    view: memoryview
    address: int
    device_address: int


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream, and where what is sent along it is packed."""

    stream: Any
    parameters: Twin


class _Areas:
    """Staging areas that are nobody's now; None is one that was not made yet."""

    def __init__(self, count: int) -> None:
        self._free: list[Twin | None] = [None] * count
        self._changed = threading.Condition()
        self._restores = 0

    def take(self, urgency: Urgency) -> Twin | None:
        """One of them, for restores first: who copies in the background would otherwise have it back at once."""
        restores = urgency is Urgency.RESTORE
        with self._changed:
            self._restores += restores
            try:
                if not self._changed.wait_for(lambda: self._free and (restores or not self._restores), WAIT_S_MAX):
                    raise _busy()
                return self._free.pop()
            finally:
                self._restores -= restores
                self._changed.notify_all()

    def give(self, area: Twin | None) -> None:
        """It is nobody's again."""
        with self._changed:
            self._free.append(area)
            self._changed.notify_all()


class Lanes:
    """All lanes and staging areas of a GPU. Its context must be current wherever something is taken. PoolError."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._twins: list[Twin] = []
        self._streams: list[Any] = []
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        # Who drops the lanes without closing them must not leave addresses pinned that are another's by then.
        weakref.finalize(self, _keep_until_end, self._twins).atexit = False

    def _make(self) -> None:
        calls, driver = self._calls, self._calls.driver
        least, greatest = calls.do(driver.cuCtxGetStreamPriorityRange(), "ask for the priorities of streams")
        self._lanes: dict[Urgency, queue.Queue[Lane]] = {}
        for urgency, count, priority in (
            (Urgency.RESTORE, URGENT_LANES, greatest),
            (Urgency.BACKGROUND, BACKGROUND_LANES, least),
        ):
            lanes = self._lanes[urgency] = queue.LifoQueue()
            flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            for _ in range(count):
                stream = calls.do(driver.cuStreamCreateWithPriority(flags, priority), "make a stream")
                self._streams.append(stream)
                lanes.put(Lane(stream, self._twin(LANE_BYTES)))
        self._stagings = _Areas(STAGINGS)
        # How many lanes restores have.
        self._restoring = 0
        self._changed = threading.Condition()

    @contextmanager
    def lane(self, urgency: Urgency) -> Iterator[Lane]:
        """A lane of one's own."""
        if urgency is Urgency.BACKGROUND:
            with self._changed:
                self._changed.wait_for(lambda: not self._restoring, WAY_S_MAX)
            with self._own(urgency) as lane:
                yield lane
            return
        with self._own(urgency) as lane:
            self._count_restore(1)
            try:
                yield lane
            finally:
                self._count_restore(-1)

    def _count_restore(self, change: int) -> None:
        with self._changed:
            self._restoring += change
            if not self._restoring:
                self._changed.notify_all()

    @contextmanager
    def _own(self, urgency: Urgency) -> Iterator[Lane]:
        lane = _taken(self._lanes[urgency])
        try:
            yield lane
        finally:
            self._lanes[urgency].put(lane)

    @contextmanager
    def all(self) -> Iterator[list[Lane]]:
        """Every lane there is."""
        with ExitStack() as taken:
            counts = {Urgency.RESTORE: URGENT_LANES, Urgency.BACKGROUND: BACKGROUND_LANES}
            yield [taken.enter_context(self._own(urgency)) for urgency in counts for _ in range(counts[urgency])]

    @contextmanager
    def staging(self, urgency: Urgency) -> Iterator[Twin]:
        """A staging area of one's own. Take it before a lane, so that nobody holds a lane while waiting for it."""
        staging = self._stagings.take(urgency)
        try:
            if staging is None:
                staging = self._twin(STAGING_BYTES)
            yield staging
        finally:
            self._stagings.give(staging)

    def close(self) -> None:
        """Unpin and free everything; nothing may run in any lane."""
        driver = self._calls.driver
        while self._streams:
            driver.cuStreamDestroy(self._streams.pop())
        while self._twins:
            twin = self._twins.pop()
            driver.cuMemHostUnregister(twin.address)
            driver.cuMemFree(twin.device_address)

    def _twin(self, size_bytes: int) -> Twin:
        driver = self._calls.driver
        memory = mmap.mmap(-1, size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        device_address = int(self._calls.do(driver.cuMemAlloc(size_bytes), f"have {size_bytes} bytes on the card"))
        try:
            # Registered memory is much faster to have than memory that the driver allocates, and as fast to copy.
            self._calls.do(driver.cuMemHostRegister(address, size_bytes, 0), f"pin {size_bytes} bytes")
        except PoolError:
            driver.cuMemFree(device_address)
            raise
        twin = Twin(memory, memoryview(memory), address, device_address)
        self._twins.append(twin)
        return twin


# Pinned memory of lanes that were dropped: unmapped, its addresses would be given to others while they are pinned.
_dropped: list[Twin] = []


def _keep_until_end(twins: list[Twin]) -> None:
    _dropped.extend(twins)


def _taken(queued: "queue.Queue[T]") -> T:
    try:
        return queued.get(timeout=WAIT_S_MAX)
    except queue.Empty:
        raise _busy() from None


def _busy() -> PoolError:
    return PoolError(f"the GPU was busy for {WAIT_S_MAX:g} s; see what else runs on it")
