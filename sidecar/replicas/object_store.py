"""A store of snapshots made of a service that keeps objects: Mooncake, S3, or a peer's memory.

Owns the order in which objects are written, and the account of what its writer has there. Invariant: a manifest is
written last, into the slot that does not hold the latest, so whoever dies at any point leaves the latest as it was; and
`latest` offers only a snapshot whose chunks all are there now, for a service may lose any of them at any time. Bytes
are proven by whoever reads them. Bounded by `bytes_max`, as the store on disk is (ledger.py). Threads may call
everything; what is counted is guarded by one lock, and manifests are written one after the other.
"""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from ...session import chunk
from ...session.disk_store import CHUNK_BYTES_MAX
from ...session.errors import CorruptError, StoreError
from ...session.ids import SessionId
from ...session.ledger import Known, Ledger
from ...session.manifest import Manifest
from ...session.store import StoredSnapshot, StoreFigures, Swept
from .contract import CHUNK_NAME, SESSION_NAME, Objects, Refusal, ReplicaError
from .object_draft import ObjectDraft
from .object_names import (
    ENVELOPE_BYTES_MAX,
    FINISHED,
    GENERATIONS_GUESSED,
    LIVE,
    SLOTS,
    Names,
    Placed,
    decode,
    encode,
    slot_of,
)

T = TypeVar("T")

SNAPSHOTS_PER_SESSION = 2
# What is taken stock of when a store is opened; a service with more is asked by name alone.
STOCK_MAX = 200_000
# How often a session is looked at whose snapshots are being replaced meanwhile.
LOOKS_MAX = 6
# In whose folder the chunks of manifests lie that were read lately.
PLACES_MAX = 262_144
DRAFTS_MAX = 256


class ObjectStore:
    """See contract.ReplicaStore."""

    def __init__(
        self,
        objects: Objects,
        names: Names,
        *,
        bytes_max: int,
        trust_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the store and take stock of what its writer has there. ReplicaError when it does not answer.

        What this writer has put there, or seen there, is taken to be there for `trust_s`: a service that loses nothing
        and counts questions need not be asked again and again. Whoever reads another writer's asks all the same.
        """
        self._objects = objects
        self._names = names
        self._bytes_max = bytes_max
        self._trust_s = trust_s
        self._trusted_until_s: dict[str, float] = {}
        self._clock = clock
        self._mutex = threading.RLock()
        self._publishing = threading.RLock()
        self._ledger = Ledger()
        # Which of its own manifests are where: by session and generation, what is in each slot.
        self._slots: dict[SessionId, dict[tuple[int, int], Placed]] = {}
        self._finished: set[SessionId] = set()
        self._places: OrderedDict[str, str] = OrderedDict()
        self._errors = self._corrupt = self._evicted = self._drafts = 0
        # Snapshots of which something was gone, so that they were not offered.
        self.incomplete = 0
        self._take_stock()

    def close(self) -> None:
        """See ReplicaStore.close."""
        self._objects.close()

    # Reading

    def get_chunk(self, name: str) -> bytes:
        """See Store.get_chunk."""
        return self._proven(name, chunk.decode)

    def get_stored(self, name: str) -> bytes:
        """See ReplicaReader.get_stored."""
        return self._proven(name, _checked)

    def latest(self, session: SessionId) -> Manifest | None:
        """See Store.latest."""
        before: list[tuple[int, int, float]] | None = None
        for look in range(LOOKS_MAX):
            seen: list[tuple[int, int, float]] = []
            vanished: set[str] = set()
            for placed in self._read(session, vanished):
                seen.append(placed.order)
                is_older = any(at is not None and at[0] > placed.manifest.generation for at in map(slot_of, vanished))
                if is_older and look + 1 < LOOKS_MAX:
                    # A newer owner's were replaced at this very moment.
                    break
                if not self._missing(placed):
                    self._remember(placed)
                    return placed.manifest
            # A writer may have replaced one after the other while they were read: only what stays so is so.
            if not vanished and (not seen or seen == before):
                break
            before = seen
        with self._mutex:
            self.incomplete += len(before or ())
        return None

    def named(self, session: SessionId, snapshot: str) -> Manifest | None:
        """See Store.named."""
        for placed in self._read(session):
            if placed.snapshot == snapshot:
                self._remember(placed)
                return placed.manifest
        return None

    def list(self) -> Sequence[StoredSnapshot]:
        """See Store.list. ReplicaError where the service cannot list."""
        found = self._objects.list(self._names.all_sessions(), STOCK_MAX)
        if found is None:
            raise ReplicaError(Refusal.REQUEST, "what is stored cannot be listed there; ask for a session by its id")
        sessions = sorted({s for s in map(self._names.session_of, found) if s is not None})
        lines = []
        for session in sessions:
            latest = True
            for placed in self._read(session):
                snapshot = placed.manifest
                with self._mutex:
                    sizes = [self._ledger.chunk_bytes(name) or 0 for name in set(snapshot.chunks)]
                    finished = session in self._finished
                size = placed.size_bytes + sum(sizes)
                lines.append(
                    StoredSnapshot(
                        placed.snapshot, session, snapshot.generation, snapshot.kv_len, size, snapshot.created_at,
                        latest, finished,
                    )
                )  # fmt: skip
                latest = False
        return sorted(lines, key=lambda line: (line.created_at, line.snapshot))

    def figures(self) -> StoreFigures:
        """See Store.figures."""
        return StoreFigures(
            self._ledger.size_bytes, self._ledger.snapshot_count, self._errors, self._corrupt, self._evicted
        )

    # Writing

    def begin(self) -> ObjectDraft:
        """See Store.begin."""
        with self._mutex:
            if self._drafts >= DRAFTS_MAX:
                raise ReplicaError(Refusal.BUSY, f"{DRAFTS_MAX} snapshots are being written; try again later")
            self._drafts += 1
        return ObjectDraft(self)

    def finish(self, session: SessionId) -> None:
        """See Store.finish."""
        with self._publishing:
            if session in self._finished or session not in self._slots:
                return
            self._objects.replace(self._names.mark(session), FINISHED)
            self._finished.add(session)

    def delete(self, session: SessionId) -> int:
        """See Store.delete. What others have written of the session is theirs."""
        with self._publishing:
            slots = self._slots.get(session, {})
            count = len(slots)
            for generation, slot in list(slots):
                self._forget(session, generation, slot)
            return count

    def sweep(self) -> Swept:
        """See Store.sweep."""
        with self._mutex:
            names = self._ledger.free_chunks()
            size_bytes = sum(self._ledger.chunk_bytes(name) or 0 for name in names)
            self._drop(names)
        return Swept(len(names), size_bytes)

    # For drafts

    def end_draft(self, names: Iterable[str]) -> None:
        """A draft was left."""
        with self._mutex:
            self._drafts -= 1
        self.let_go(names)

    def let_go(self, names: Iterable[str]) -> None:
        """Chunks are not to be kept for a draft any more; those that nothing uses are removed."""
        with self._mutex:
            free = [name for name in names if self._ledger.unpin(name)]
            # What cannot be removed now goes with a later sweep.
            with contextlib.suppress(StoreError):
                self._drop(free)

    def pin(self, names: Collection[str]) -> frozenset[str]:
        """Keep chunks that are there from being swept, and say which these are."""
        with self._mutex:
            known = [name for name in names if self._ledger.chunk_bytes(name) is not None]
            for name in known:
                self._ledger.pin(name)
        try:
            there = self._present(known)
        except BaseException:
            with self._mutex:
                for name in known:
                    self._ledger.unpin(name)
            raise
        with self._mutex:
            for name in known:
                if name not in there:
                    self._ledger.unpin(name)
                    self._drop_chunk(name)
        return there

    def write_chunk(self, name: str, stored: bytes) -> None:
        """Write and pin a chunk, making room for it first."""
        with self._publishing:
            self._make_room(len(stored))
            with self._mutex:
                self._ledger.size_bytes += len(stored)
        written = False
        try:
            self._counted(lambda: self._objects.put(self._names.chunk(name, self._names.writer), stored))
            written = True
        finally:
            with self._mutex:
                self._ledger.size_bytes -= len(stored)
                if written:
                    self._ledger.add_chunk(name, len(stored))
                    self._ledger.pin(name)
                    self._trust([name])

    def publish(self, snapshot: Manifest) -> str:
        """Make a snapshot visible after its chunks."""
        content = encode(snapshot, self._names.writer)
        placed = Placed(snapshot, self._names.writer, len(content))
        session, generation = snapshot.session, snapshot.generation
        with self._publishing:
            gone = self._missing(placed)
            if gone:
                with self._mutex:
                    for name in gone:
                        self._drop_chunk(name)
                raise ReplicaError(
                    Refusal.MISSING,
                    f"snapshot of session {session}: {len(gone)} of its chunks are not stored, {gone[0]} first; "
                    "put them again",
                )
            self._make_room(len(content))
            known = self._slots_of(session, generation)
            slot = self._slot_for(known, generation, placed)
            if slot is None:
                return placed.snapshot
            if session not in self._slots or session in self._finished:
                # Before the manifest: what is marked is found again, whatever happens next.
                self._counted(lambda: self._objects.replace(self._names.mark(session), LIVE))
                self._finished.discard(session)
            if (generation, slot) in known:
                self._forget(session, generation, slot, keep_mark=True)
            self._counted(lambda: self._objects.replace(self._names.slot(session, generation, slot), content))
            self._count(session, generation, slot, placed)
            mine = self._slots[session]
            for old in sorted(mine, key=lambda at: mine[at].order)[:-SNAPSHOTS_PER_SESSION]:
                self._forget(session, *old)
        return placed.snapshot

    # Inside

    def _take_stock(self) -> None:
        marks = self._objects.list(self._names.mine(), STOCK_MAX)
        chunks = self._objects.list(self._names.chunks(), STOCK_MAX)
        if marks is None or chunks is None:
            return
        for name, size in chunks.items():
            if CHUNK_NAME.fullmatch(name.rpartition("/")[2]):
                self._ledger.add_chunk(name.rpartition("/")[2], size)
        for mark in marks:
            session = self._names.session_of(mark)
            if session is None:
                continue
            for at, placed in self._slots_in(session, self._manifests(session)):
                if placed.writer == self._names.writer:
                    self._count(session, *at, placed)
            if self._objects.get(mark, 64) == FINISHED:
                self._finished.add(session)

    def _count(self, session: SessionId, generation: int, slot: int, placed: Placed) -> None:
        self._slots.setdefault(session, {})[generation, slot] = placed
        path = _path(session, generation, slot, placed)
        snapshot = placed.manifest
        with self._mutex:
            self._ledger.add(Known(path, session, snapshot.created_at, placed.size_bytes, frozenset(snapshot.chunks)))

    def _slots_of(self, session: SessionId, generation: int) -> dict[tuple[int, int], Placed]:
        """What is in a generation's slots: as this writer knows, or as a writer of its name before it has left them."""
        mine = self._slots.get(session, {})
        found = {at: placed for at, placed in mine.items() if at[0] == generation}
        if found:
            return found
        return dict(self._slots_in(session, [self._names.slot(session, generation, slot) for slot in SLOTS]))

    def _slot_for(self, known: dict[tuple[int, int], Placed], generation: int, placed: Placed) -> int | None:
        """The empty slot, or the one with the older snapshot; None if both hold newer ones."""
        taken = {at[1]: old for at, old in known.items()}
        for slot in SLOTS:
            if slot not in taken:
                return slot
        oldest = min(SLOTS, key=lambda slot: taken[slot].order)
        return oldest if taken[oldest].order <= placed.order else None

    def _forget(self, session: SessionId, generation: int, slot: int, *, keep_mark: bool = False) -> None:
        """Remove a manifest, and the chunks that nothing refers to any more."""
        self._objects.remove([self._names.slot(session, generation, slot)])
        mine = self._slots.get(session, {})
        placed = mine.pop((generation, slot), None)
        if placed is not None:
            with self._mutex:
                self._drop(self._ledger.remove(_path(session, generation, slot, placed)))
        if not mine and not keep_mark:
            self._slots.pop(session, None)
            self._finished.discard(session)
            self._objects.remove([self._names.mark(session)])

    def _drop(self, names: Collection[str]) -> None:
        """Remove chunks; with the lock held, so that nobody counts on one of them meanwhile."""
        if names:
            self._objects.remove([self._names.chunk(name, self._names.writer) for name in names])
            for name in names:
                self._drop_chunk(name)

    def _manifests(self, session: SessionId) -> Sequence[str]:
        if not SESSION_NAME.fullmatch(session):
            return []
        if self._objects.lists_folders:
            return sorted(self._objects.list(self._names.session(session), STOCK_MAX) or ())
        found: list[str] = []
        first = 0
        while True:
            there = self._objects.present(self._names.guesses(session, first))
            found += sorted(there)
            newest = max((at[0] for at in filter(None, map(slot_of, there))), default=-1)
            if newest < first + GENERATIONS_GUESSED // 2:
                return found
            # Near the end of what was asked for there may be newer ones.
            first = newest + 1

    def _slots_in(
        self, session: SessionId, names: Iterable[str], vanished: set[str] | None = None
    ) -> Iterator[tuple[tuple[int, int], Placed]]:
        for name in names:
            at = slot_of(name)
            stored = self._objects.get(name, ENVELOPE_BYTES_MAX) if at is not None else None
            if at is None or stored is None:
                if vanished is not None:
                    vanished.add(name)
                continue
            try:
                placed = decode(session, stored)
                if placed.manifest.generation != at[0]:
                    raise CorruptError(f"snapshot of session {session}: it is of another generation")
            except CorruptError:
                with self._mutex:
                    self._corrupt += 1
                continue
            yield at, placed

    def _read(self, session: SessionId, vanished: set[str] | None = None) -> Iterator[Placed]:
        """The snapshots that can be read, the latest first; generations that cannot matter are not read."""
        by_generation: dict[int, list[str]] = {}
        for name in self._manifests(session):
            at = slot_of(name)
            if at is not None:
                by_generation.setdefault(at[0], []).append(name)
        for generation in sorted(by_generation, reverse=True):
            found = [placed for _, placed in self._slots_in(session, by_generation[generation], vanished)]
            yield from sorted(found, key=lambda placed: placed.order, reverse=True)

    def _missing(self, placed: Placed) -> Sequence[str]:
        names = list(dict.fromkeys(placed.manifest.chunks))
        there = self._present(names, placed.writer)
        return [name for name in names if name not in there]

    def _present(self, names: Collection[str], writer: str | None = None) -> frozenset[str]:
        owner = writer or self._names.writer
        trusted = self._trusted(names) if owner == self._names.writer else frozenset()
        of_object = {self._names.chunk(name, owner): name for name in names if name not in trusted}
        if not of_object:
            return trusted
        there = self._counted(lambda: self._objects.present(list(of_object)))
        found = frozenset(of_object[place] for place in there)
        if owner == self._names.writer:
            self._trust(found)
        return trusted | found

    def _trust(self, names: Iterable[str]) -> None:
        if self._trust_s:
            until_s = time.monotonic() + self._trust_s
            with self._mutex:
                # Nobody is trusted for longer than it is in the account.
                self._trusted_until_s |= {n: until_s for n in names if self._ledger.chunk_bytes(n) is not None}

    def _trusted(self, names: Collection[str]) -> frozenset[str]:
        now_s = time.monotonic()
        with self._mutex:
            return frozenset(name for name in names if self._trusted_until_s.get(name, 0.0) > now_s)

    def _drop_chunk(self, name: str) -> None:
        self._ledger.drop_chunk(name)
        self._trusted_until_s.pop(name, None)

    def _remember(self, placed: Placed) -> None:
        if placed.writer == self._names.writer:
            return
        with self._mutex:
            for name in placed.manifest.chunks:
                self._places[name] = placed.writer
                self._places.move_to_end(name)
            while len(self._places) > PLACES_MAX:
                self._places.popitem(last=False)

    def _proven(self, name: str, proof: Callable[[str, bytes], bytes]) -> bytes:
        if not CHUNK_NAME.fullmatch(name):
            raise StoreError(f"chunk {name[:40]!r}: not the name of a chunk")
        with self._mutex:
            own = self._ledger.chunk_bytes(name) is not None
            writer = self._names.writer if own else self._places.get(name, self._names.writer)
        place = self._names.chunk(name, writer)
        for is_last in (False, True):
            stored = self._counted(lambda: self._objects.get(place, CHUNK_BYTES_MAX))
            if stored is None:
                raise ReplicaError(Refusal.MISSING, f"chunk {name} is not stored; recompute from the journal")
            try:
                return proof(name, stored)
            except CorruptError:
                # What was damaged on its way is read once more; what is stored so is removed, for others to mend.
                with self._mutex:
                    self._corrupt += not is_last
                    if is_last:
                        self._objects.remove([place])
                        self._drop_chunk(name)
                        raise
        raise AssertionError("unreachable")

    def _make_room(self, size_bytes: int) -> None:
        with self._mutex:
            excess = self._ledger.size_bytes + size_bytes - self._bytes_max
            evictions = self._ledger.evictions(excess, self._finished, self._clock()) if excess > 0 else []
        for path in evictions:
            generation, _, slot = path.name.partition(".")
            self._forget(SessionId(path.parts[0]), int(generation), int(slot))
            self._evicted += 1
        if self._ledger.size_bytes + size_bytes > self._bytes_max:
            with self._mutex:
                self._errors += 1
            raise ReplicaError(
                Refusal.FULL,
                f"it is full ({self._ledger.size_bytes} of {self._bytes_max} bytes, all of live sessions); "
                "raise its size",
            )

    def _counted(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except StoreError:
            with self._mutex:
                self._errors += 1
            raise


def _checked(name: str, stored: bytes) -> bytes:
    chunk.check(name, stored)
    return stored


def _path(session: SessionId, generation: int, slot: int, placed: Placed) -> Path:
    # Sorts by age, as the names of manifests on disk do; the last part leads back to the object.
    return Path(session, placed.snapshot, f"{generation}.{slot}")
