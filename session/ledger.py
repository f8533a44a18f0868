"""What a store holds, counted: chunks and their sizes, who refers to them, and what may go. Pure.

Invariant: `size_bytes` is the sum of all chunks and manifests (and of what is reserved for those being written); a
chunk is free exactly when no snapshot refers to it and no draft has pinned it. Removing the files of what is free is
the caller's business, and so is taking turns between threads.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from .ids import SessionId
from .retention import Candidate, Rank, plan

LIVE_KEEP_S = 600.0


@dataclass(frozen=True, slots=True)
class Known:
    """A published snapshot: `path` is its manifest, `size_bytes` the size of that file alone."""

    path: Path
    session: SessionId
    created_at: float
    size_bytes: int
    chunks: frozenset[str]


class Ledger:
    """The account of one store."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._snapshots: dict[Path, Known] = {}
        self._chunk_bytes: dict[str, int] = {}
        self._references: Counter[str] = Counter()
        self._pins: Counter[str] = Counter()

    @property
    def snapshot_count(self) -> int:
        """How many snapshots there are."""
        return len(self._snapshots)

    def chunk_bytes(self, name: str) -> int | None:
        """The size of a stored chunk, or None."""
        return self._chunk_bytes.get(name)

    def add_chunk(self, name: str, size_bytes: int) -> None:
        """Count a chunk, once, whoever wrote it."""
        self.drop_chunk(name)
        self._chunk_bytes[name] = size_bytes
        self.size_bytes += size_bytes

    def drop_chunk(self, name: str) -> int:
        """Forget a chunk whose file is gone; returns its size."""
        size_bytes = self._chunk_bytes.pop(name, 0)
        self.size_bytes -= size_bytes
        return size_bytes

    def pin(self, name: str) -> None:
        """Keep a chunk from becoming free."""
        self._pins[name] += 1

    def unpin(self, name: str) -> bool:
        """Undo one `pin`; True when the chunk is free now."""
        self._pins[name] -= 1
        if self._pins[name]:
            return False
        del self._pins[name]
        return not self._references[name]

    def add(self, known: Known) -> None:
        """Count a snapshot that was published."""
        self.remove(known.path)
        self._snapshots[known.path] = known
        self._references.update(known.chunks)
        self.size_bytes += known.size_bytes

    def remove(self, path: Path) -> list[str]:
        """Forget a snapshot whose manifest is gone; returns the chunks that are free now."""
        known = self._snapshots.pop(path, None)
        if known is None:
            return []
        self.size_bytes -= known.size_bytes
        self._references.subtract(known.chunks)
        free = [name for name in known.chunks if not self._references[name]]
        for name in free:
            del self._references[name]
        return [name for name in free if not self._pins[name]]

    def session_of(self, path: Path) -> SessionId:
        """Whose snapshot it is."""
        return self._snapshots[path].session

    def free_chunks(self) -> list[str]:
        """All chunks that nothing uses."""
        return [name for name in self._chunk_bytes if not self._references[name] and not self._pins[name]]

    def evictions(self, excess_bytes: int, finished: Collection[SessionId], now: float) -> list[Path]:
        """The snapshots that should go so that `excess_bytes` become free, in order; possibly not enough.

        The latest snapshot of a live session is safe for LIVE_KEEP_S: to throw it away for another's would help nobody.
        After that its session is one whose end nobody saw.
        """
        latest = {known.session: path for path, known in sorted(self._snapshots.items())}
        paths: dict[str, Path] = {}
        candidates = []
        for path, known in self._snapshots.items():
            if known.session in finished:
                rank = Rank.FINISHED
            elif latest[known.session] != path:
                rank = Rank.SUPERSEDED
            elif known.created_at < now - LIVE_KEEP_S:
                rank = Rank.LIVE
            else:
                continue
            name = f"{known.session}/{path.name}"
            paths[name] = path
            candidates.append(Candidate(name, rank, known.created_at, known.size_bytes, known.chunks))
        freeable = {name: size for name, size in self._chunk_bytes.items() if name not in self._pins}
        # A chunk that a snapshot outside the candidates refers to does not become free either.
        inside = Counter(name for candidate in candidates for name in candidate.chunks)
        freeable = {name: size for name, size in freeable.items() if self._references[name] == inside[name]}
        return [paths[name] for name in plan(candidates, freeable, excess_bytes)]
