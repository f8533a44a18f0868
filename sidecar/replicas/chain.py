"""Several stores elsewhere as one to read from: what a restore sees.

Owns which of them is asked, and the pause of one that does not answer. Invariant: the newest snapshot of those that
answer in time is offered, the nearest of equals; a store that fails, or says nothing, is passed over, counted, and left
alone for PAUSE_S. So a host that is lost without a word, whose store is asked for the sessions that were its own, holds
nobody up for longer than PATIENCE_S where anybody else has them.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from ...session.errors import StoreError
from ...session.ids import SessionId
from ...session.manifest import Manifest
from .contract import Refusal, ReplicaError, ReplicaReader

PAUSE_S = 5.0
# How long others are waited for once one has a snapshot, and how long all of them, which is less than a restore waits.
PATIENCE_S = 0.3
LIMIT_S = 2.5
# Of one store; one that says nothing keeps these busy and nobody else's.
THREADS_EACH = 8
# Of so many sessions it is remembered from where they were offered; others are looked for everywhere.
OFFERS_MAX = 4096

_LOG = logging.getLogger("midstream.replicas")

Member = Callable[[], ReplicaReader | None]


class Chain:
    """`members`: names and stores, the nearest first; one that is not open at the moment is None."""

    def __init__(self, members: Sequence[tuple[str, Member]], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._members = list(members)
        self._threads = {
            name: ThreadPoolExecutor(THREADS_EACH, thread_name_prefix=f"ask-{name}") for name, _ in members
        }
        self._clock = clock
        self._mutex = threading.Lock()
        self._paused_until_s: dict[str, float] = {}
        self._of_chunk: OrderedDict[str, str] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def latest(self, session: SessionId) -> Manifest | None:
        """See ReplicaReader.latest."""
        asked = {self._threads[name].submit(store.latest, session): name for name, store in self._answering()}
        told = self._told(asked)
        best: tuple[tuple[int, int], str, Manifest] | None = None
        for name in self._threads:
            found = told.get(name)
            if found is not None and (best is None or (found.generation, found.kv_len) > best[0]):
                best = (found.generation, found.kv_len), name, found
        if best is None:
            return None
        _, name, found = best
        with self._mutex:
            for chunk in found.chunks:
                self._of_chunk[chunk] = name
                self._of_chunk.move_to_end(chunk)
            while len(self._of_chunk) > OFFERS_MAX * 64:
                self._of_chunk.popitem(last=False)
            self.counts[f"offered_{name}"] += 1
        return found

    def _told(self, asked: "dict[Future[Manifest | None], str]") -> dict[str, Manifest]:
        """What those have that say so in time."""
        told: dict[str, Manifest] = {}
        until_s = self._clock() + LIMIT_S
        left = set(asked)
        while left:
            done, left = wait(left, max(until_s - self._clock(), 0.0), FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                try:
                    found = future.result()
                except StoreError as error:
                    self._failed(asked[future], error)
                    continue
                if found is not None:
                    told[asked[future]] = found
                    until_s = min(until_s, self._clock() + PATIENCE_S)
        for future in left:
            future.cancel()
            self._failed(asked[future], ReplicaError(Refusal.SLOW, "no answer in time; what others have is used"))
        return told

    def get_stored(self, name: str) -> bytes:
        """See ReplicaReader.get_stored."""
        with self._mutex:
            offered_by = self._of_chunk.get(name)
        error: StoreError = ReplicaError(Refusal.MISSING, f"chunk {name} is in no store that answers")
        for member, store in sorted(self._answering(), key=lambda pair: pair[0] != offered_by):
            try:
                return store.get_stored(name)
            except StoreError as caught:
                if not isinstance(caught, ReplicaError) or caught.reason is not Refusal.MISSING:
                    self._failed(member, caught)
                error = caught
        raise error

    def _answering(self) -> list[tuple[str, ReplicaReader]]:
        now_s = self._clock()
        with self._mutex:
            names = [(n, m) for n, m in self._members if self._paused_until_s.get(n, 0.0) <= now_s]
        return [(name, store) for name, member in names if (store := member()) is not None]

    def _failed(self, name: str, error: StoreError) -> None:
        _LOG.warning("event=replica_not_read store=%s error=%s", name, error)
        with self._mutex:
            self.counts[f"failed_{name}"] += 1
            if isinstance(error, ReplicaError):
                # A damaged block says nothing of the others; silence does.
                self._paused_until_s[name] = self._clock() + PAUSE_S
