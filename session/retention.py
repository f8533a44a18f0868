"""Which stored snapshots may go first when a store is full. Pure.

Order: finished sessions, the oldest first; then snapshots that a newer one of their session supersedes, the oldest
first; then the latest snapshots of live sessions, the oldest first.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Rank(IntEnum):
    """How much a snapshot is still worth; lower goes first."""

    FINISHED = 0
    SUPERSEDED = 1
    LIVE = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A snapshot as retention sees it; `chunks` are the names it refers to."""

    snapshot: str
    rank: Rank
    created_at: float
    own_bytes: int
    chunks: frozenset[str]


def plan(candidates: Sequence[Candidate], chunk_bytes: Mapping[str, int], to_free_bytes: int) -> list[str]:
    """The snapshots to remove, in order, so that at least `to_free_bytes` become free; all if that is not enough.

    A chunk becomes free only with the last snapshot that refers to it; `chunk_bytes` has those that can become free.
    """
    references = Counter(name for candidate in candidates for name in candidate.chunks)
    chosen: list[str] = []
    freed_bytes = 0
    for candidate in sorted(candidates, key=lambda c: (c.rank, c.created_at, c.snapshot)):
        if freed_bytes >= to_free_bytes:
            break
        chosen.append(candidate.snapshot)
        freed_bytes += candidate.own_bytes
        for name in candidate.chunks:
            references[name] -= 1
            if not references[name]:
                freed_bytes += chunk_bytes.get(name, 0)
    return chosen
