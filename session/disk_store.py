"""The store of snapshots on disk: write-once chunks, manifests that appear all at once.

    ROOT/format                                          what this folder is, and its version
    ROOT/lock                                            held by the one writer
    ROOT/tmp/                                            files that are being written
    ROOT/chunks/<2 digits>/<32 digits>                   chunks (chunk.py), named by content
    ROOT/sessions/<session>/<generation>-<kv_len>-<time> manifests (manifest.py); the last in order is the latest
    ROOT/sessions/<session>/finished                     the session is over

Invariant: a manifest that can be read has all its chunks on stable storage, unless somebody else removed or damaged
them, and then reading them says so. Bounded by `bytes_max`: when full, what retention.py names gives way, and then
writing stops with a StoreError until there is room. Every OSError becomes a counted StoreError. Threads may call
everything. What is counted lies in ledger.py, how files are written in durable_files.py.
"""

import contextlib
import fcntl
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from . import chunk, manifest
from .durable_files import DurableFiles
from .errors import CorruptError, StoreError
from .ids import SessionId
from .ledger import Known, Ledger
from .manifest import Manifest
from .store import StoredSnapshot, StoreFigures, Swept

FORMAT = b"midstream-store 1\n"
SNAPSHOTS_PER_SESSION = 2
CHUNK_BYTES_MAX = chunk.RAW_BYTES_MAX + (chunk.RAW_BYTES_MAX >> 7) + 4096
_SNAPSHOT = re.compile(r"\d{10}-\d{10}-\d{17}")
_CHUNK = re.compile(r"[0-9a-f]{32}")
_SESSION = re.compile(r"[0-9a-f]{32}")
_FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Head:
    """A session's latest snapshot, as far as its name tells."""

    session: SessionId
    snapshot: str
    generation: int
    kv_len: int
    created_at: float
    finished: bool


class DiskStore:
    """A store in a folder. With `write=False` it takes no lock and changes nothing: to look while another writes."""

    def __init__(
        self,
        root: Path,
        *,
        bytes_max: int = 64 << 30,
        write: bool = True,
        files: DurableFiles | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open or create the store. StoreError when it is not one, cannot be used, or another process writes it."""
        self._root = root
        self._bytes_max = bytes_max
        self._files = files or DurableFiles(root)
        self._clock = clock
        self._mutex = threading.RLock()
        self._lock_fd: int | None = None
        self._ledger = Ledger()
        self._finished: set[SessionId] = set()
        self._errors = self._corrupt = self._evicted = 0
        try:
            self._open(write)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process write the store."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    # Reading

    def get_chunk(self, name: str) -> bytes:
        """See Store.get_chunk. A damaged chunk is removed, so that the next snapshot writes it anew."""
        return self._proven(name, chunk.decode)

    def get_stored(self, name: str) -> bytes:
        """The bytes of a chunk as they are stored (chunk.py), for another store; see get_chunk for errors."""

        def checked(name: str, stored: bytes) -> bytes:
            chunk.check(name, stored)
            return stored

        return self._proven(name, checked)

    def _proven(self, name: str, proof: Callable[[str, bytes], bytes]) -> bytes:
        if not _CHUNK.fullmatch(name):
            raise StoreError(f"chunk {name[:40]!r}: not the name of a chunk")
        with self._failing(f"chunk {name} cannot be read"):
            stored = self._files.read(self._chunk_path(name), CHUNK_BYTES_MAX)
        try:
            return proof(name, stored)
        except CorruptError:
            with self._mutex:
                self._corrupt += 1
                if self._lock_fd is not None:
                    with contextlib.suppress(OSError):
                        self._remove_chunk(name)
            raise

    def latest(self, session: SessionId) -> Manifest | None:
        """See Store.latest."""
        return next((found for _, found, _ in self._read(session, reversed(self._manifests(session)))), None)

    def named(self, session: SessionId, snapshot: str) -> Manifest | None:
        """See Store.named."""
        paths = [path for path in self._manifests(session) if path.name == snapshot]
        return next((found for _, found, _ in self._read(session, paths)), None)

    def heads(self) -> Sequence[Head]:
        """What each session's latest snapshot is by its name; nothing is opened, so it may be damaged or gone."""
        found = []
        for session in self._sessions():
            paths = self._manifests(session)
            if not paths:
                continue
            generation, kv_len, stamp = map(int, paths[-1].name.split("-"))
            finished = self._files.size(self._folder(session) / _FINISHED) is not None
            found.append(Head(session, paths[-1].name, generation, kv_len, stamp / 1e6, finished))
        return found

    def list(self) -> Sequence[StoredSnapshot]:
        """See Store.list."""
        lines = []
        for session in self._sessions():
            latest = True
            finished = self._files.size(self._folder(session) / _FINISHED) is not None
            for path, found, size in self._read(session, reversed(self._manifests(session))):
                stored = [self._files.size(self._chunk_path(name)) or 0 for name in set(found.chunks)]
                lines.append(
                    StoredSnapshot(
                        path.name,
                        session,
                        found.generation,
                        found.kv_len,
                        size + sum(stored),
                        found.created_at,
                        latest,
                        finished,
                    )
                )
                latest = False
        return sorted(lines, key=lambda line: (line.created_at, line.snapshot))

    def figures(self) -> StoreFigures:
        """See Store.figures."""
        # Without the mutex, which is held while files are synced: who asks must not wait for a slow disk.
        return StoreFigures(
            self._ledger.size_bytes, self._ledger.snapshot_count, self._errors, self._corrupt, self._evicted
        )

    # Writing

    def begin(self) -> "DiskDraft":
        """See Store.begin."""
        if self._lock_fd is None:
            raise StoreError(f"store {self._root} is open for reading only; open it for writing")
        return DiskDraft(self)

    def finish(self, session: SessionId) -> None:
        """See Store.finish."""
        folder = self._folder(session)
        with self._mutex:
            if session in self._finished or not folder.is_dir():
                return
            with self._failing(f"session {session} cannot be marked as finished"):
                self._files.write(folder / _FINISHED, b"")
            self._finished.add(session)

    def delete(self, session: SessionId) -> int:
        """See Store.delete."""
        with self._mutex, self._failing(f"session {session} cannot be deleted"):
            paths = self._manifests(session)
            for path in paths:
                self._forget(path)
            self._remove_folder(session)
            return len(paths)

    def sweep(self) -> Swept:
        """See Store.sweep."""
        chunks = size_bytes = 0
        with self._mutex, self._failing("unused chunks cannot be removed"):
            for name in self._ledger.free_chunks():
                size_bytes += self._remove_chunk(name)
                chunks += 1
        return Swept(chunks, size_bytes)

    # For drafts

    def pin(self, name: str) -> bool:
        """Keep a chunk that is stored from being swept; False if it is not there (any more)."""
        with self._mutex, self._failing(f"chunk {name} cannot be looked up"):
            if self._stored(name):
                self._ledger.pin(name)
                return True
            self._ledger.drop_chunk(name)
            return False

    def unpin(self, names: Iterable[str]) -> None:
        """Let go of chunks; those that nothing uses are removed."""
        with self._mutex:
            for name in names:
                if self._ledger.unpin(name):
                    # What cannot be removed now goes with a later sweep.
                    with contextlib.suppress(OSError):
                        self._remove_chunk(name)

    def write_chunk(self, name: str, stored: bytes) -> None:
        """Write and pin a chunk, making room for it first."""
        with self._mutex:
            self._make_room(len(stored))
            self._ledger.size_bytes += len(stored)
        written = False
        try:
            with self._failing(f"chunk {name} cannot be written"):
                self._files.write(self._chunk_path(name), stored)
            written = True
        finally:
            with self._mutex:
                self._ledger.size_bytes -= len(stored)
                if written:
                    self._ledger.add_chunk(name, len(stored))
                    self._ledger.pin(name)

    def publish(self, snapshot: Manifest, dirty: Iterable[Path]) -> str:
        """Make a snapshot visible after its chunks, whose folders are `dirty`, are durable."""
        encoded = manifest.encode(snapshot)
        stamp = min(int(snapshot.created_at * 1e6), 10**17 - 1)
        folder = self._folder(snapshot.session)
        path = folder / f"{snapshot.generation:010d}-{snapshot.kv_len:010d}-{stamp:017d}"
        names = frozenset(snapshot.chunks)
        with self._mutex, self._failing(f"snapshot of session {snapshot.session} cannot be published"):
            gone = [name for name in names if not self._stored(name)]
            if gone:
                raise StoreError(
                    f"snapshot of session {snapshot.session}: {len(gone)} of its chunks are not stored, "
                    f"{gone[0]} first; put them again"
                )
            for chunks_folder in dirty:
                self._files.sync_folder(chunks_folder)
            self._make_room(len(encoded))
            self._files.make_folder(folder)
            self._files.write(path, encoded)
            self._ledger.add(Known(path, snapshot.session, snapshot.created_at, len(encoded), names))
            if snapshot.session in self._finished:
                # Its end was seen on a worker that it has been taken from since.
                self._files.remove(folder / _FINISHED)
                self._finished.discard(snapshot.session)
            self._files.sync_folder(folder)
            with contextlib.suppress(OSError):
                for old in self._manifests(snapshot.session)[:-SNAPSHOTS_PER_SESSION]:
                    self._forget(old)
        return path.name

    def chunk_folder(self, name: str) -> Path:
        """The folder that a chunk's name leads to."""
        return self._chunk_path(name).parent

    # Inside

    def _open(self, write: bool) -> None:
        with self._failing(f"store {self._root} cannot be opened"):
            if write:
                self._create()
            try:
                found = self._files.read(self._root / "format", 64)
            except FileNotFoundError:
                raise StoreError(f"{self._root} is not a store; give the folder that the sidecar writes") from None
            if found != FORMAT:
                raise StoreError(f"{self._root} has format {found!r}, expected {FORMAT!r}; use another folder")
            if write:
                self._take_stock()

    def _create(self) -> None:
        self._files.make_folder(self._root)
        format_path = self._root / "format"
        ours = {"format", "lock", "tmp", "chunks", "sessions"}
        if not format_path.exists() and any(entry.name not in ours for entry in self._root.iterdir()):
            raise StoreError(f"{self._root} holds other files; give the store an empty folder of its own")
        self._lock_fd = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"store {self._root}: another process writes it; give each mover its own folder") from None
        self._files.make_folder(self._root, ("tmp", "sessions", "chunks"))
        self._files.make_folder(self._root / "chunks", (f"{number:02x}" for number in range(256)))
        self._files.remove_temporary()
        if not format_path.exists():
            self._files.write(format_path, FORMAT)
            self._files.sync_folder(self._root)

    def _take_stock(self) -> None:
        for folder in (self._root / "chunks").iterdir():
            for path in folder.iterdir():
                if _CHUNK.fullmatch(path.name):
                    self._ledger.add_chunk(path.name, self._files.size(path) or 0)
        for session in self._sessions():
            if self._files.size(self._folder(session) / _FINISHED) is not None:
                self._finished.add(session)
            for path, found, size in self._read(session, self._manifests(session)):
                self._ledger.add(Known(path, session, found.created_at, size, frozenset(found.chunks)))

    def _sessions(self) -> Sequence[SessionId]:
        with self._failing(f"store {self._root} cannot be listed"):
            names = sorted(path.name for path in (self._root / "sessions").iterdir())
        return [SessionId(name) for name in names if _SESSION.fullmatch(name)]

    def _folder(self, session: SessionId) -> Path:
        return self._root / "sessions" / session

    def _chunk_path(self, name: str) -> Path:
        return self._root / "chunks" / name[:2] / name

    def _manifests(self, session: SessionId) -> Sequence[Path]:
        if not _SESSION.fullmatch(session):
            return []
        with self._failing(f"session {session} cannot be looked up"):
            try:
                paths = list(self._folder(session).iterdir())
            except FileNotFoundError:
                return []
        return sorted(path for path in paths if _SNAPSHOT.fullmatch(path.name))

    def _read(self, session: SessionId, paths: Iterable[Path]) -> Iterator[tuple[Path, Manifest, int]]:
        """Manifests that can be read, with their sizes; all others are counted and passed over."""
        for path in paths:
            try:
                stored = self._files.read(path, manifest.MANIFEST_BYTES_MAX)
                found = manifest.decode(stored)
                if found.session != session:
                    raise CorruptError(f"manifest {path}: it is of session {found.session}")
            except (OSError, CorruptError) as error:
                # Gone is not damaged: the writer may have replaced it since the folder was listed.
                if not isinstance(error, FileNotFoundError):
                    with self._mutex:
                        self._corrupt += 1
                continue
            yield path, found, len(stored)

    def _stored(self, name: str) -> bool:
        return self._files.size(self._chunk_path(name)) == (self._ledger.chunk_bytes(name) or -1)

    def _forget(self, path: Path) -> None:
        self._files.remove(path)
        for name in self._ledger.remove(path):
            self._remove_chunk(name)

    def _remove_chunk(self, name: str) -> int:
        self._files.remove(self._chunk_path(name))
        return self._ledger.drop_chunk(name)

    def _remove_folder(self, session: SessionId) -> None:
        folder = self._folder(session)
        self._files.remove(folder / _FINISHED)
        self._finished.discard(session)
        with contextlib.suppress(OSError):
            folder.rmdir()

    def _make_room(self, size_bytes: int) -> None:
        excess = self._ledger.size_bytes + size_bytes - self._bytes_max
        if excess <= 0:
            return
        for path in self._ledger.evictions(excess, self._finished, self._clock()):
            session = self._ledger.session_of(path)
            with self._failing("old snapshots cannot be removed"):
                self._forget(path)
            self._evicted += 1
            if not self._manifests(session):
                self._remove_folder(session)
        if self._ledger.size_bytes + size_bytes > self._bytes_max:
            self._errors += 1
            raise StoreError(
                f"store {self._root} is full ({self._ledger.size_bytes} of {self._bytes_max} bytes, all of live "
                "sessions); raise its size or take snapshots less often"
            )

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with self._mutex:
                self._errors += 1
            raise StoreError(f"{what}: {error.strerror or error}; check the folder, its rights and the disk") from error


class DiskDraft:
    """See store.Draft."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self._pinned: Counter[str] = Counter()
        self._dirty: set[Path] = set()
        self._writing: set[str] = set()
        self._changed = threading.Condition()

    def put_chunk(self, raw: bytes | bytearray | memoryview) -> str:
        """See Draft.put_chunk."""
        name = chunk.chunk_name(raw)
        with self._changed:
            # Who has the same block at the same time finds it written, or writes it if the other one could not.
            self._changed.wait_for(lambda: name not in self._writing)
            if self.keep(name):
                return name
            self._writing.add(name)
        try:
            _, stored = chunk.encode(raw)
            self._store.write_chunk(name, stored)
            with self._changed:
                self._pin(name)
        finally:
            with self._changed:
                self._writing.discard(name)
                self._changed.notify_all()
        return name

    def keep(self, name: str) -> bool:
        """See Draft.keep."""
        with self._changed:
            if self._pinned[name]:
                return True
            if self._store.pin(name):
                # Another draft may have written it a moment ago and not have made it durable yet.
                self._pin(name)
                return True
        return False

    def _pin(self, name: str) -> None:
        self._pinned[name] += 1
        self._dirty.add(self._store.chunk_folder(name))

    def publish(self, manifest: Manifest) -> str:
        """See Draft.publish."""
        unpinned = set(manifest.chunks) - {name for name, count in self._pinned.items() if count}
        if unpinned:
            raise StoreError(f"{len(unpinned)} chunks of the manifest are not of this draft; put or keep them first")
        return self._store.publish(manifest, self._dirty)

    def __enter__(self) -> "DiskDraft":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.unpin(self._pinned.elements())
        self._pinned.clear()
