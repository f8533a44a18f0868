"""Where snapshots lie: a node's disk, and stores elsewhere that may lose what they have.

Owns snapshots by session. Invariants: the latest of a session is that of the highest generation, then the longest; what
is taken out is what was put in, or nothing.
"""

from dataclasses import dataclass, replace

from midstream.session.disk_store import Head
from midstream.session.ids import SessionId
from midstream.sidecar.mover.protocol import StoredResult

from .engine import Kv

BLOCK_TOKENS = 4
BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Snapshot:
    """KV of one session, by its owner of one generation."""

    session: SessionId
    generation: int
    kv: Kv
    key: dict[str, str]
    created_at: float
    finished: bool = False
    recomputed: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Which of two is the latest."""
        return self.generation, self.kv.kv_len

    def head(self) -> Head:
        return Head(self.session, "", self.generation, self.kv.kv_len, self.created_at, self.finished)

    def told(self) -> StoredResult:
        return StoredResult(
            True, self.generation, self.kv.prompt_len, f"{self.kv.question + 1:032x}", self.kv.kv_len,
            len(self.kv.outputs), self.key, self.recomputed,
        )  # fmt: skip


class SnapshotStore:
    """One store: `name`, and the host that it dies with ("" for none)."""

    def __init__(self, name: str, host: str, sessions_max: int) -> None:
        self.name = name
        self.host = host
        self._sessions_max = sessions_max
        self._latest: dict[SessionId, Snapshot] = {}
        self.bytes_in = 0

    def __len__(self) -> int:
        return len(self._latest)

    def put(self, snapshot: Snapshot) -> None:
        """Keep it, unless what is there is later."""
        known = self._latest.get(snapshot.session)
        if known is not None and known.rank > snapshot.rank:
            return
        self._latest[snapshot.session] = snapshot
        if len(self._latest) > self._sessions_max:
            over = next((s for s, kept in self._latest.items() if kept.finished), next(iter(self._latest)))
            del self._latest[over]

    def latest(self, session: SessionId) -> Snapshot | None:
        return self._latest.get(session)

    def finish(self, session: SessionId, generation: int) -> None:
        """The session is over: it may go first. Whoever was replaced has no say."""
        known = self._latest.get(session)
        if known is not None and known.generation <= generation:
            self._latest[session] = replace(known, finished=True)

    def heads(self) -> list[Head]:
        return [snapshot.head() for snapshot in self._latest.values()]

    def lose(self, share_kept: list[bool]) -> None:
        """Forget those for which it is False."""
        kept = zip(list(self._latest), share_kept, strict=True)
        self._latest = {session: self._latest[session] for session, stays in kept if stays}

    def clear(self) -> None:
        self._latest.clear()
