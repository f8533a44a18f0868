"""The ledger of a store against the plainest possible account of the same things."""

from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from midstream.session.ids import SessionId
from midstream.session.ledger import LIVE_KEEP_S, Known, Ledger

NAMES = st.sampled_from("abcdefgh")
PATHS = st.sampled_from([Path(f"/s/{n}/{g}") for n in range(3) for g in range(3)])


def size_of(name: str) -> int:
    return 100 + ord(name)


class LedgerMachine(RuleBasedStateMachine):
    """Chunks, pins and snapshots come and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.chunks: set[str] = set()
        self.pins: list[str] = []
        self.snapshots: dict[Path, Known] = {}
        self.finished: set[SessionId] = set()

    def used(self) -> set[str]:
        return set(self.pins).union(*(known.chunks for known in self.snapshots.values()))

    def remove_free(self, names: list[str]) -> None:
        assert len(names) == len(set(names))
        for name in names:
            assert name not in self.used()
            self.ledger.drop_chunk(name)
            self.chunks.discard(name)

    @rule(name=NAMES)
    def put_and_pin(self, name: str) -> None:
        self.ledger.add_chunk(name, size_of(name))
        self.ledger.pin(name)
        self.chunks.add(name)
        self.pins.append(name)

    @rule()
    def unpin_all(self) -> None:
        while self.pins:
            name = self.pins.pop()
            free = self.ledger.unpin(name)
            assert free == (name not in self.used())
            if free:
                self.remove_free([name])

    @rule(path=PATHS, names=st.sets(NAMES), created_at=st.integers(0, 2000))
    def publish(self, path: Path, names: set[str], created_at: int) -> None:
        chunks = frozenset(names & self.chunks)
        old = self.snapshots.get(path)
        known = Known(path, SessionId(path.parent.name * 32), float(created_at), 7, chunks)
        self.snapshots[path] = known
        self.ledger.add(known)
        if old is not None:
            self.remove_free([n for n in self.ledger.free_chunks() if n in old.chunks])

    @rule(path=PATHS)
    def remove(self, path: Path) -> None:
        self.snapshots.pop(path, None)
        self.remove_free(self.ledger.remove(path))

    @rule(session=st.sampled_from("012"))
    def finish(self, session: str) -> None:
        self.finished.add(SessionId(session * 32))

    @rule(wanted=st.integers(1, 2000))
    def evict(self, wanted: int) -> None:
        before = self.ledger.size_bytes
        now = 2000.0
        for path in self.ledger.evictions(wanted, self.finished, now):
            known = self.snapshots[path]
            latest = max(p for p, k in self.snapshots.items() if k.session == known.session)
            fresh_live = known.session not in self.finished and path == latest and known.created_at >= now - LIVE_KEEP_S
            assert not fresh_live
        for path in self.ledger.evictions(wanted, self.finished, now):
            del self.snapshots[path]
            self.remove_free(self.ledger.remove(path))
        freed = before - self.ledger.size_bytes
        assert freed >= wanted or not self.ledger.evictions(wanted - freed, self.finished, now)

    @invariant()
    def sizes_add_up(self) -> None:
        assert self.ledger.size_bytes == sum(map(size_of, self.chunks)) + 7 * len(self.snapshots)
        assert self.ledger.snapshot_count == len(self.snapshots)
        assert set(self.ledger.free_chunks()) == self.chunks - self.used()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
