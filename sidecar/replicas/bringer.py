"""Brings one session's snapshot into the memory of one node, because somebody waits for it there.

Owns the stores that it has opened for that. Invariants: only a peer of the fleet is sent to, never another kind of
store; each has senders of its own, so one that hangs holds nobody up but who is on the way there; of those that nothing
is sent to at most `PEERS_MAX` are open, together with those that something is sent to, and the one that was not asked
for the longest is closed first. It asks for no turn among those that couriers send, but shares their bytes a second.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...session.ids import SessionId
from .budget import Budget
from .contract import Refusal, ReplicaError, ReplicaStore
from .remotes import Kind, Remote, parse_remotes
from .sending import LocalGone, LocalStore, Sending

PEERS_MAX = 8


@dataclass(frozen=True, slots=True)
class Brought:
    """What is there now. `size_bytes`: what crossed the network; those of others that were being sent count, too."""

    generation: int
    kv_len: int
    size_bytes: int
    seconds: float


@dataclass(slots=True)
class _Open:
    store: ReplicaStore
    sending: Sending
    users: int = 0

    def close(self) -> None:
        self.sending.close()
        self.store.close()


class Bringer:
    """`open_store` opens a peer; it raises ReplicaError. Threads may call everything."""

    def __init__(self, open_store: Callable[[Remote], ReplicaStore], local: LocalStore, budget: Budget) -> None:
        self._open_store = open_store
        self._local = local
        self._budget = budget
        self._mutex = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._stopping = threading.Event()
        self._counts: dict[str, int] = {}

    def bring(self, session: SessionId, to: str) -> Brought:
        """Publish the session's latest snapshot at `peer://HOST:PORT`. Raises StoreError; MISSING if there is none."""
        remote = _peer(to)
        began_s = time.monotonic()
        before = self._counts.get("bytes_sent", 0)
        with self._opened(remote) as peer:
            try:
                sent = peer.sending.send(peer.store, session)
            except LocalGone as error:
                raise ReplicaError(Refusal.MISSING, f"session {session}: {error}") from None
        self._count("brought", 1)
        size_bytes = self._counts.get("bytes_sent", 0) - before
        return Brought(sent.generation, sent.kv_len, size_bytes, time.monotonic() - began_s)

    def status(self) -> dict[str, float]:
        """Flat names and numbers."""
        with self._mutex:
            return {f"bring_{name}": self._counts.get(name, 0) for name in ("brought", "chunks_sent", "bytes_sent")}

    def close(self) -> None:
        """Send nothing more, and let go of all peers."""
        self._stopping.set()
        with self._mutex:
            left, self._open = list(self._open.values()), OrderedDict()
        for opened in left:
            opened.close()

    @contextmanager
    def _opened(self, remote: Remote) -> Iterator[_Open]:
        with self._mutex:
            if self._stopping.is_set():
                raise ReplicaError(Refusal.BUSY, "this process ends")
            opened = self._open.get(remote.place)
            if opened is None:
                sending = Sending("bring", self._local, self._budget, self._stopping, self._count)
                opened = self._open[remote.place] = _Open(self._open_store(remote), sending)
            self._open.move_to_end(remote.place)
            opened.users += 1
            spare = [place for place, other in self._open.items() if not other.users][: len(self._open) - PEERS_MAX]
            closing = [self._open.pop(place) for place in spare] if len(self._open) > PEERS_MAX else []
        for other in closing:
            other.close()
        try:
            yield opened
        finally:
            with self._mutex:
                opened.users -= 1

    def _count(self, name: str, more: int) -> None:
        with self._mutex:
            self._counts[name] = self._counts.get(name, 0) + more


def _peer(to: str) -> Remote:
    try:
        found = parse_remotes(to)
    except ValueError as error:
        raise ReplicaError(Refusal.REQUEST, str(error)) from None
    if len(found) != 1 or found[0].kind is not Kind.PEER:
        raise ReplicaError(Refusal.REQUEST, f"{to[:200]}: expected one peer://HOST:PORT")
    return found[0]
