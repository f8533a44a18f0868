"""The memory of tier 1: made once, kept by the holder, mapped, touched and pinned.

Owns one memfd and its mapping, from `mapped_area` to the end of the process. Invariant: a mover that has the mapping is
the only one that has it, by a lock that ends with the process; and every page of it is there before it is used, so that
memory which cannot be had is an error here and no SIGBUS later. What lies in it is the business of `memory_area.py`.
Calls block: they are for a worker thread, and end soon after `stop` is set.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...session import vram
from ...session.errors import PoolError
from ...session.held import HolderClient, create_host_pool, map_pool
from ...session.layout import Plane, PoolLayout, PoolMeta
from .memory_records import HEADER_BYTES, decode_area

# No worker's name begins so.
NAME = "~memory"
BYTES_MIN = 1 << 20
# What is touched or pinned in one call: a few milliseconds to a few tenths of a second.
TOUCH_BYTES = 64 << 20
PIN_BYTES = 1 << 30
# A mover that was killed may take this long until its driver has let go of what it had pinned.
LOCK_S = 60.0
LOCK_AGAIN_S = 0.1
# Of the memory that is free, the rest is left to others.
SHARE = 0.9
_POPULATE_WRITE = 23
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MappedArea:
    """The memory: a view of it and its address; `fd` stays open, for the lock goes with it."""

    view: memoryview
    address: int
    fd: int
    was_kept: bool


def mapped_area(holder: HolderClient, size_bytes: int, stop: threading.Event) -> MappedArea:
    """The area that the holder keeps, or a new one. Raises PoolError."""
    if size_bytes < BYTES_MIN:
        raise PoolError(f"tier 1 cannot have {size_bytes} bytes; give tier1.bytes at least {BYTES_MIN}, or 0")
    size_bytes -= size_bytes % mmap.PAGESIZE
    fd, was_kept = _kept_or_new(holder, size_bytes)
    try:
        _lock(fd, stop)
        memory = map_pool(fd, size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        if decode_area(bytes(memory[:HEADER_BYTES])) is None:
            # It has its header only when all of it was touched once.
            _touch(fd, address, size_bytes, stop)
        keep(holder, fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return MappedArea(memoryview(memory), address, fd, was_kept)


def is_kept(holder: HolderClient) -> bool:
    """Whether the holder has an area, of whichever size. Raises PoolError."""
    return any(pool.name == NAME for pool in holder.list())


def keep(holder: HolderClient, fd: int, size_bytes: int) -> None:
    """Have the holder keep the area; to be repeated, for a holder may be a new one. Raises PoolError."""
    layout = PoolLayout(1, 1, (Plane(0, size_bytes, size_bytes),))
    meta = PoolMeta(size_bytes, layout, layout.fingerprint(), {"pid": os.getpid(), "fd": fd})
    holder.put(NAME, fd, meta.to_json())


def pin(address: int, size_bytes: int, gpu_uuid: str, stop: threading.Event) -> None:
    """Let all GPUs copy from and to it at the link's speed. Raises PoolError."""
    device = vram.device_of(gpu_uuid)
    for at in range(0, size_bytes, PIN_BYTES):
        _check(stop)
        vram.register_host(address + at, min(PIN_BYTES, size_bytes - at), device)


def _kept_or_new(holder: HolderClient, size_bytes: int) -> tuple[int, bool]:
    """A descriptor of the memory, and whether a mover before this one has had it."""
    if is_kept(holder):
        fd, meta = holder.get(NAME)
        if meta.get("size_bytes") == size_bytes:
            return fd, True
        os.close(fd)
        # Of a sidecar with other settings.
        holder.drop(NAME)
    free = _free_bytes()
    if size_bytes > free * SHARE:
        raise PoolError(
            f"tier 1 would need {size_bytes} of the {free} bytes of memory that are free here; "
            "set tier1.bytes to less, or give this machine or container more"
        )
    return create_host_pool(size_bytes), False


def _lock(fd: int, stop: threading.Event) -> None:
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN) or time.monotonic() >= deadline:
                raise PoolError(
                    f"another process has the memory of tier 1 ({error.strerror}); end the mover that is still running"
                ) from error
        else:
            return
        _check(stop)
        time.sleep(LOCK_AGAIN_S)


def _touch(fd: int, address: int, size_bytes: int, stop: threading.Event) -> None:
    """Have all pages, large ones where the kernel gives them. By ctypes, which lets others run meanwhile."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for at in range(0, size_bytes, TOUCH_BYTES):
        _check(stop)
        count = min(TOUCH_BYTES, size_bytes - at)
        try:
            if madvise(address + at, count, _POPULATE_WRITE) == 0:
                continue
            if ctypes.get_errno() != errno.EINVAL:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            # A kernel before 5.14.
            os.posix_fallocate(fd, at, count)
        except OSError as error:
            raise PoolError(
                f"tier 1 got {at} of {size_bytes} bytes of memory ({error.strerror}); set tier1.bytes to less"
            ) from error


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise PoolError("tier 1 is not opened any more: the mover is ending")


def _free_bytes() -> int:
    """The memory that can be had, on the machine and in this process's control groups."""
    found = list(_groups_free())
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    return min(found, default=1 << 62)


def _groups_free() -> Iterator[int]:
    """What this process's control groups have left of their limits, where they have any (cgroup v2)."""
    try:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = _CGROUP / own.removeprefix("0::").lstrip("/")
    except (OSError, StopIteration):
        return
    for group in (folder, *folder.parents):
        if not group.is_relative_to(_CGROUP):
            return
        with contextlib.suppress(OSError, ValueError):
            limit = int((group / "memory.max").read_text())
            yield max(0, limit - int((group / "memory.current").read_text()))
