"""A snapshot that is being written into a store made of objects.

Owns which chunks it holds in place, and that two threads do not write the same one. Invariant: what it holds is let go
of exactly once, when it is left; a draft that was left can do nothing any more, and what a thread of it was still about
to hold then is let go of at once. The store does what is written.
"""

import threading
from collections import Counter
from collections.abc import Collection, Iterable
from types import TracebackType
from typing import Protocol

from ...session import chunk
from ...session.manifest import Manifest
from .contract import CHUNK_NAME, Refusal, ReplicaError


class Holding(Protocol):
    """What a draft needs of its store."""

    def pin(self, names: Collection[str]) -> frozenset[str]:
        """Keep chunks that are there from being swept, and say which these are."""
        ...

    def write_chunk(self, name: str, stored: bytes) -> None:
        """Write and pin a chunk."""
        ...

    def publish(self, snapshot: Manifest) -> str:
        """Make a snapshot visible."""
        ...

    def let_go(self, names: Iterable[str]) -> None:
        """The opposite of `pin`, once for each time."""
        ...

    def end_draft(self, names: Iterable[str]) -> None:
        """Let go of a draft, and of chunks."""
        ...


class ObjectDraft:
    """See contract.ReplicaDraft."""

    def __init__(self, store: Holding) -> None:
        self._store = store
        self._pinned: Counter[str] = Counter()
        self._writing: set[str] = set()
        self._changed = threading.Condition()
        self._is_left = False

    def put_chunk(self, raw: bytes | bytearray | memoryview) -> str:
        """See Draft.put_chunk."""
        name = chunk.chunk_name(raw)
        if not self.keep(name):
            self.put_stored(name, chunk.encode(raw)[1])
        return name

    def put_stored(self, name: str, stored: bytes) -> None:
        """See ReplicaDraft.put_stored."""
        chunk.check(name, stored)
        with self._changed:
            # Who has the same block at the same time finds it written, or writes it if the other one could not.
            self._changed.wait_for(lambda: name not in self._writing)
            if self._pinned[name]:
                return
            self._check_open()
            self._writing.add(name)
        try:
            if not self._store.pin([name]):
                self._store.write_chunk(name, stored)
            self._hold([name])
        finally:
            with self._changed:
                self._writing.discard(name)
                self._changed.notify_all()

    def keep(self, name: str) -> bool:
        """See Draft.keep."""
        return bool(self.keep_all([name]))

    def keep_all(self, names: Collection[str]) -> frozenset[str]:
        """See ReplicaDraft.keep_all."""
        with self._changed:
            self._check_open()
            mine = frozenset(name for name in names if self._pinned[name])
        fresh = self._store.pin([name for name in set(names) - mine if CHUNK_NAME.fullmatch(name)])
        self._hold(fresh)
        return mine | fresh

    def publish(self, manifest: Manifest) -> str:
        """See Draft.publish."""
        with self._changed:
            unpinned = set(manifest.chunks) - {name for name, count in self._pinned.items() if count}
        if unpinned or self._is_left:
            raise ReplicaError(
                Refusal.MISSING,
                f"{len(unpinned)} chunks of the manifest are not of this draft; put or keep them first",
            )
        return self._store.publish(manifest)

    def _hold(self, pinned: Collection[str]) -> None:
        """Account for what the store has just pinned. ReplicaError if this draft was left meanwhile."""
        with self._changed:
            if not self._is_left:
                self._pinned.update(pinned)
                return
        self._store.let_go(pinned)
        self._check_open()

    def _check_open(self) -> None:
        if self._is_left:
            raise ReplicaError(Refusal.REQUEST, "this draft was left; begin another")

    def __enter__(self) -> "ObjectDraft":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            if self._is_left:
                return
            self._is_left = True
            pinned = list(self._pinned.elements())
            self._pinned.clear()
        self._store.end_draft(pinned)
