"""The contract of a store of snapshots. tests/contracts/store_suite.py holds every store to it.

Words: a *chunk* is one block's bytes, named by its content; a *snapshot* is a manifest and its chunks; a *draft* is a
snapshot that is being written. A store is written by one process; others may read it at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from .ids import SessionId
from .manifest import Manifest


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """One line of a store's list. `latest` is the one that a restore would take."""

    snapshot: str
    session: SessionId
    generation: int
    kv_len: int
    size_bytes: int
    created_at: float
    latest: bool
    finished: bool


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep removed."""

    chunks: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """A store's counters and size."""

    size_bytes: int
    snapshots: int
    errors: int
    corrupt: int
    evicted: int


class Draft(Protocol):
    """A snapshot that is being written; use it as a context manager. Leaving it without `publish` leaves nothing."""

    def put_chunk(self, raw: bytes | bytearray | memoryview) -> str:
        """Store a block and return its name.

        Threads may call it at the same time; all of them have returned before the draft is left. MUST write nothing
        when a chunk of that name is there. MUST keep the chunk from being swept until the draft is left. MUST leave no
        chunk under its name that is not complete. MUST raise StoreError when it cannot be written.
        """
        ...

    def keep(self, name: str) -> bool:
        """Use a chunk that is stored already: MUST keep it from being swept until the draft is left, or say False."""
        ...

    def publish(self, manifest: Manifest) -> str:
        """Make the snapshot exist and return its name.

        MUST be atomic: a reader sees all of it or nothing, whenever the writer or the machine dies. MUST have every
        chunk on stable storage before the manifest can be seen. MUST raise StoreError, and publish nothing, when a
        chunk of the manifest is not there.
        """
        ...

    def __enter__(self) -> "Draft": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """Keeps snapshots. Every failure is a StoreError: never another exception, never a wrong byte."""

    def begin(self) -> Draft:
        """Start a snapshot. MUST raise StoreError when the store cannot be written."""
        ...

    def get_chunk(self, name: str) -> bytes:
        """The raw bytes of a chunk.

        MUST return exactly what was put. MUST raise CorruptError when the stored bytes differ in any bit, and
        StoreError when the chunk is not there.
        """
        ...

    def latest(self, session: SessionId) -> Manifest | None:
        """The newest snapshot of a session that can be read, or None.

        MUST pass over manifests that are torn or damaged (counted), and MUST never return one that was not published.
        """
        ...

    def named(self, session: SessionId, snapshot: str) -> Manifest | None:
        """The snapshot of a session with the name that `list` gives it, or None if there is none that can be read."""
        ...

    def list(self) -> Sequence[StoredSnapshot]:
        """All snapshots that can be read, oldest first."""
        ...

    def finish(self, session: SessionId) -> None:
        """Say that a session is over: its snapshots are the first that may go. MUST do nothing for an unknown one."""
        ...

    def delete(self, session: SessionId) -> int:
        """Remove all snapshots of a session and return how many there were; their chunks go with the next sweep."""
        ...

    def sweep(self) -> Swept:
        """Remove chunks that no snapshot and no open draft uses. MUST NOT remove any other."""
        ...

    def figures(self) -> StoreFigures:
        """Size and counters."""
        ...
