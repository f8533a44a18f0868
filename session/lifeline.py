"""Lifelines: how a process's death is told by the kernel at once, before the process has been taken down.

A pidfd tells of a death when nothing of the process is left. On a GPU that is a tenth of a second and more after a
SIGKILL, for the driver takes its context down first. A thread's robust futexes the kernel marks before that. So each
process of an engine has a thread that does nothing but hold one, a *cell* of the file beside its epoch's arena
(docs/formats.md), until it is killed with all others.

Owns the file, its holding and its reading. Invariants: a cell is taken once and never given back; what counts is the
kernel's mark alone, for thread ids mean something only in their own pid namespace. A cell that nobody took says nothing
of anybody. A broken lifeline says that its process has begun to end, *not* that it is gone: whoever needs that asks a
pidfd (`adapters/alive.py`). Standard library only: engines import it. Waits for nobody (`sidecar/lifeline_watch.py`).
"""

import fcntl
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from zlib import crc32

from . import futex
from .errors import LifelineError

LIFELINE_VERSION = 1
FILE_BYTES = 4096
CELL_BYTES = 64
CELL_COUNT = FILE_BYTES // CELL_BYTES - 1

_MAGIC = b"MIDLIFEL"
_HEADER = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_OWNER = struct.Struct("<I52s")
_OWNER_OFFSET = 4
_WORDS = struct.Struct("<" + f"I{CELL_BYTES - 4}x" * CELL_COUNT)
_NAME_BYTES = 52
# Processes of one engine take their cells one after the other, each within microseconds.
_LOCK_TRIES = 100
_LOCK_PAUSE_S = 0.01
_SLEEP_S = 86400.0


class Hold(StrEnum):
    """What a cell's word says."""

    FREE = "free"
    HELD = "held"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who took a cell: its name, and its pid in its own namespace. For people: nothing is decided by it."""

    index: int
    name: str
    pid: int

    @property
    def text(self) -> str:
        """In words."""
        return f"process {self.name} (pid {self.pid})"


def lifeline_of(arena: Path) -> Path:
    """The file of the epoch that has this arena."""
    return arena.with_suffix(".lifeline")


def create_lifeline(path: Path) -> None:
    """Create the file (mode 0600) in place of one that is there. LifelineError."""
    header = _HEADER.pack(_MAGIC, LIFELINE_VERSION, CELL_COUNT)
    try:
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, FILE_BYTES)
            os.pwrite(fd, header + _CRC.pack(crc32(header)), 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise LifelineError(
            f"lifeline {path}: cannot be created ({error.strerror}); give its file system more room"
        ) from error


# ---- the engine's side

_holding: int | None = None


def hold_lifeline(path: Path, name: str, *, on_failure: Callable[[LifelineError], None]) -> None:
    """Have this process hold a cell until it ends, once, however often it is asked. Returns at once, and never raises.

    What is in the way is told to `on_failure`, mostly in a thread of its own; it is not tried again.
    A forked child inherits neither the thread nor the kernel's list: it holds nothing, and may take a cell of its own.
    """
    global _holding
    if _holding == os.getpid():
        return
    _holding = os.getpid()
    try:
        threading.Thread(target=_hold, args=(path, name, on_failure), name="midstream-lifeline", daemon=True).start()
    except RuntimeError as error:
        on_failure(LifelineError(f"lifeline {path}: {error}; raise the limit on threads"))


def _hold(path: Path, name: str, on_failure: Callable[[LifelineError], None]) -> None:
    # A signal for the process is to interrupt a thread that has something to do with it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        take_cell(path, name)
    except LifelineError as error:
        on_failure(error)
        return
    # For ever, as far as this process is concerned: without the GIL, and in nothing that a SIGKILL has to wait for.
    while True:
        time.sleep(_SLEEP_S)


def take_cell(path: Path, name: str) -> None:
    """Take a free cell for the calling thread, which from then on takes no robust mutex of the libc. LifelineError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise LifelineError(
            f"lifeline {path}: {error.strerror}; run the same midstream in the engine and beside it"
        ) from error
    try:
        _check(path, fd)
        with _locked(path, fd):
            index = _free_cell(path, fd)
            owner = _OWNER.pack(os.getpid(), name.encode()[:_NAME_BYTES])
            os.pwrite(fd, owner + _CRC.pack(crc32(owner)), (index + 1) * CELL_BYTES + _OWNER_OFFSET)
        word = futex.map_shared(fd, FILE_BYTES, writable=True) + (index + 1) * CELL_BYTES
        # In this order: a word that is set without the kernel knowing of it would look alive for ever.
        futex.mark_at_end_of_thread(word)
        futex.store(word, threading.get_native_id() | futex.WAITERS)
    except OSError as error:
        raise LifelineError(
            f"lifeline {path}: cannot be held ({error.strerror}); this death will be told by a pidfd alone"
        ) from error
    finally:
        os.close(fd)


@contextmanager
def _locked(path: Path, fd: int) -> Iterator[None]:
    """For one process at a time."""
    for _ in range(_LOCK_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(_LOCK_PAUSE_S)
    else:
        raise LifelineError(f"lifeline {path}: another process keeps it locked; end that process")
    try:
        yield
    finally:
        # To close the descriptor is not enough: a mapping, and a forked child, keep the lock as well.
        fcntl.flock(fd, fcntl.LOCK_UN)


def _free_cell(path: Path, fd: int) -> int:
    for index in range(CELL_COUNT):
        # One whose owner ended in the middle of taking it is not free either.
        if not any(os.pread(fd, CELL_BYTES, (index + 1) * CELL_BYTES)):
            return index
    raise LifelineError(f"lifeline {path}: all {CELL_COUNT} cells are taken; the deaths of more are told by pidfds")


def _check(path: Path, fd: int) -> None:
    raw = os.pread(fd, _HEADER.size + _CRC.size, 0)
    size_bytes = os.fstat(fd).st_size
    if len(raw) == _HEADER.size + _CRC.size and size_bytes >= FILE_BYTES:
        magic, version, cell_count = _HEADER.unpack_from(raw)
        if magic == _MAGIC and _CRC.unpack_from(raw, _HEADER.size)[0] == crc32(raw[: _HEADER.size]):
            if (version, cell_count) == (LIFELINE_VERSION, CELL_COUNT):
                return
            raise LifelineError(f"lifeline {path} has version {version}; run the same midstream in engine and sidecar")
    raise LifelineError(f"{path} is no lifeline; remove it and start the sidecar again")


# ---- the sidecar's side


class LifelineFile:
    """A file of lifelines, for reading. One thread at a time."""

    def __init__(self, path: Path) -> None:
        """Map it; LifelineError says what is wrong with it."""
        self.path = path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _check(path, fd)
                self._address = futex.map_shared(fd, FILE_BYTES, writable=False)
            finally:
                os.close(fd)
        except OSError as error:
            raise LifelineError(f"lifeline {path}: {error.strerror}; deaths are told by pidfds alone") from error

    def look(self) -> list[tuple[Hold, int, int]]:
        """All cells that were ever taken: what each says, and the address and value of its word, to wait at it."""
        # In one go, for it may be done every few milliseconds.
        values = _WORDS.unpack(futex.copy(self._address + CELL_BYTES, _WORDS.size))
        return [
            (Hold.BROKEN if value & futex.OWNER_DIED else Hold.HELD, self._address + (index + 1) * CELL_BYTES, value)
            for index, value in enumerate(values)
            if value
        ]

    def holder(self, address: int) -> Holder:
        """Who took the cell whose word is at an address."""
        index = (address - self._address) // CELL_BYTES - 1
        raw = futex.copy(address + _OWNER_OFFSET, _OWNER.size + _CRC.size)
        pid, name = _OWNER.unpack_from(raw)
        if _CRC.unpack_from(raw, _OWNER.size)[0] != crc32(raw[: _OWNER.size]):
            return Holder(index, "unknown", 0)
        return Holder(index, name.rstrip(b"\0").decode(errors="replace"), pid)

    def close(self) -> None:
        """Unmap; the file stays."""
        futex.unmap(self._address, FILE_BYTES)
