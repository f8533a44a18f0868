"""Words in shared memory that the kernel itself writes to and wakes at: raw system calls, by number.

Owns what of Linux's ABI a lifeline needs (`lifeline.py`): the list of words that the kernel marks when a thread ends,
and a wait for any of many words. Asked of the kernel and not of a libc, because the two processes that share a word may
have different ones, whose mutexes are laid out differently. Invariant: what the kernel may read or write when a thread
ends is never unmapped, not even while Python takes itself down. Standard library only: engines import it.
"""

import ctypes
import errno
import mmap
import os
import platform
import sys
import time
from collections.abc import Sequence

# <linux/futex.h>. The kernel marks a word whose lowest 30 bits are the id of the thread that ends.
WAITERS = 0x80000000
OWNER_DIED = 0x40000000
# The most words that one wait takes (FUTEX_WAITV_MAX).
WAIT_MAX = 128

_SET_ROBUST_LIST = {"x86_64": 273, "aarch64": 99}
_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAITV = 449  # the same on all architectures
_FUTEX_WAKE = 1
_FUTEX2_SIZE_U32 = 2
_CLOCK_MONOTONIC = 1
_NANOSECONDS = 1_000_000_000
_MAP_FAILED = 2**64 - 1

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Waiter(ctypes.Structure):
    """struct futex_waitv."""

    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class _RobustList(ctypes.Structure):
    """struct robust_list_head, and the one entry that it points to."""

    _fields_ = (
        ("first", ctypes.c_uint64),
        ("word_offset", ctypes.c_int64),
        ("pending", ctypes.c_uint64),
        ("entry_next", ctypes.c_uint64),
    )


_HEAD_BYTES = _RobustList.entry_next.offset


def is_supported() -> bool:
    """Whether the numbers and layouts here are those of this machine."""
    return sys.platform == "linux" and sys.maxsize > 2**32 and platform.machine() in _SET_ROBUST_LIST


def map_shared(fd: int, size_bytes: int, *, writable: bool) -> int:
    """The address of a shared mapping of a file, which stays until `unmap`, whatever becomes of Python. OSError."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return _mapped(size_bytes, protection, mmap.MAP_SHARED, fd)


def unmap(address: int, size_bytes: int) -> None:
    """Undo `map_shared`; the address must not be used any more."""
    _LIBC.munmap(address, size_bytes)


def store(address: int, value: int) -> None:
    """Set the word at an address, in one write."""
    ctypes.c_uint32.from_address(address).value = value


def copy(address: int, size_bytes: int) -> bytes:
    """The bytes at an address."""
    return ctypes.string_at(address, size_bytes)


def mark_at_end_of_thread(word: int) -> None:
    """From now on the kernel sets OWNER_DIED in the word at this address when the calling thread ends. OSError.

    It does so only while the word holds this thread's id, and wakes one waiter where WAITERS is set. It takes the place
    of the list that the libc keeps for the thread, so the thread must never take a robust mutex of the libc's.
    """
    if not is_supported():
        raise OSError(errno.ENOSYS, f"not known for {platform.machine()}")
    # Not Python's memory: that may be freed and used for something else before the thread ends.
    head = _mapped(mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    entry = head + _HEAD_BYTES
    robust = _RobustList.from_address(head)
    robust.first, robust.word_offset, robust.pending, robust.entry_next = entry, word - entry, 0, head
    _call(_SET_ROBUST_LIST[platform.machine()], head, _HEAD_BYTES)


def wait_any(words: Sequence[tuple[int, int]], within_s: float) -> None:
    """Wait until a word (address, value) changes and is woken, or has changed already; at most so long.

    Returns at once, too, where a signal came. OSError where the kernel has no such wait (before Linux 5.16, or
    forbidden by a sandbox), or for more than WAIT_MAX words.
    """
    waiters = (_Waiter * len(words))(*(_Waiter(value, address, _FUTEX2_SIZE_U32, 0) for address, value in words))
    until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(within_s * _NANOSECONDS)
    deadline = _Timespec(*divmod(until, _NANOSECONDS))
    try:
        _call(
            _FUTEX_WAITV, ctypes.addressof(waiters), len(words), 0, ctypes.addressof(deadline), _CLOCK_MONOTONIC
        )  # fmt: skip
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise


def wake_all(word: int) -> None:
    """Wake whoever waits at a word. OSError."""
    _call(_FUTEX[platform.machine()], word, _FUTEX_WAKE, 2**31 - 1, 0, 0, 0)


def _mapped(size_bytes: int, protection: int, flags: int, fd: int) -> int:
    address = _LIBC.mmap(None, size_bytes, protection, flags, fd, 0)
    if address is None or address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)


def _call(number: int, *arguments: int) -> int:
    # As longs: what is left to ctypes is passed as an int, and loses the upper half of an address.
    result = int(_LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
