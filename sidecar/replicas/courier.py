"""Brings this node's snapshots to one store elsewhere, for as long as the node runs.

Owns whose turn it is, what it does when the store does not answer, and what it counts; how a session is sent is
`sending`'s. Invariant: at most LANES sessions are sent at once. A store that is down costs lag, and nothing else: it is
asked again after pauses that grow. A session that cannot be sent for a reason of its own is left aside for a while, and
the others go on. What a store has lost since is noticed within RECHECK_S, and sent again.
"""

import logging
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from ...session.errors import StoreError
from ...session.ids import SessionId
from ...session.ledger import LIVE_KEEP_S
from ..fleet.backoff import Backoff
from .backlog import SESSIONS_MAX, Backlog, Shape
from .budget import Budget
from .contract import Refusal, ReplicaStore
from .peer_wire import reason_of
from .sending import LocalGone, LocalStore, Sending
from .urgency import most_urgent

LANES = 4
ROUND_S = 0.1
RETRY_FIRST_S, RETRY_LARGEST_S = 0.5, 30.0
PUT_OFF_S = 10.0
RECHECK_S = 30.0
# The store as such is well: it has no room, or it is this snapshot.
_OF_ITS_ROOM = frozenset({Refusal.FULL, Refusal.BUSY})
_OF_THE_SESSION = frozenset({Refusal.REQUEST, Refusal.TOO_LARGE, Refusal.MISSING, Refusal.CORRUPT})

_LOG = logging.getLogger("midstream.replicas")


# Asked of a store to see whether it answers.
NOBODY = SessionId("0" * 32)


class Courier:
    """One store's. `run` in a thread of its own, `stop` from another."""

    def __init__(
        self,
        name: str,
        open_store: Callable[[], ReplicaStore],
        local: LocalStore,
        budget: Budget,
        *,
        every_s: float = 0.0,
        recheck_s: float = RECHECK_S,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        self._open_store = open_store
        self._local = local
        self._clock = clock
        self._wall = wall
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_LARGEST_S, draw)
        self._backlog = Backlog(every_s)
        self._recheck_s = recheck_s
        self._look_at_s = float("-inf")
        self._mutex = threading.Lock()
        self._shapes: OrderedDict[SessionId, Shape] = OrderedDict()
        # A snapshot is several questions and answers: while one waits, others are sent.
        self._lane_threads = ThreadPoolExecutor(LANES, thread_name_prefix=f"lane-{name}")
        self._lanes: dict[SessionId, Future[None]] = {}
        self._stopping = threading.Event()
        self._sending = Sending(name, local, budget, self._stopping, self._add)
        self._store: ReplicaStore | None = None
        self.is_up = False
        self.counts: Counter[str] = Counter()

    @property
    def store(self) -> ReplicaStore | None:
        """The store while it answers, for whoever reads from it."""
        return self._store

    def stop(self) -> None:
        """Have `run` return soon."""
        self._stopping.set()

    def run(self) -> None:
        """Send until stopped. Never raises."""
        while not self._stopping.is_set():
            try:
                if not self._step():
                    self._stopping.wait(ROUND_S)
            except StoreError as error:
                self._failed(error)
            except Exception:
                self._add("failures_internal")
                _LOG.exception("event=courier_failed store=%s", self.name)
                self._stopping.wait(self._backoff.wait_s())
        self._lane_threads.shutdown(wait=True, cancel_futures=True)
        self._sending.close()
        if self._store is not None:
            self._store.close()

    def status(self) -> dict[str, float]:
        """Flat names and numbers."""
        with self._mutex:
            lag = self._backlog.lag(self._clock())
        return {
            "up": int(self.is_up),
            "sessions_behind": lag.sessions,
            "lag_tokens": lag.tokens,
            "lag_tokens_max": lag.tokens_max,
            "lag_seconds_max": round(lag.seconds_max, 3),
            "snapshots_sent": self.counts["snapshots_sent"],
            "chunks_sent": self.counts["chunks_sent"],
            "chunks_there": self.counts["chunks_there"],
            "bytes_sent": self.counts["bytes_sent"],
            "local_gone": self.counts["local_gone"],
            **{f"failures_{reason.value}": self.counts[f"failures_{reason.value}"] for reason in Refusal},
        }

    def lag_of_each(self) -> dict[SessionId, tuple[int, float]]:
        """Tokens and seconds, of each session that is behind."""
        with self._mutex:
            return self._backlog.lag_of_each(self._clock())

    # Inside

    def _step(self) -> bool:
        """Do the most urgent thing; False when there was nothing to do."""
        self._look()
        if self._store is None:
            self._store = self._open_store()
        if not self.is_up:
            # One that was away may have lost everything: what is there is asked of it anew.
            self._store.latest(NOBODY)
            with self._mutex:
                self._backlog.lost()
            self.is_up = True
            self._backoff.succeeded()
            _LOG.info("event=replica_store_up store=%s", self.name)
        self._tell_of_ends(self._store)
        self._harvest()
        if len(self._lanes) < LANES:
            with self._mutex:
                behind = self._backlog.behind(self._shapes, self._clock())
            chosen = most_urgent([b for b in behind if b.session not in self._lanes])
            if chosen is not None:
                session = SessionId(chosen.session)
                self._lanes[session] = self._lane_threads.submit(self._bring, self._store, session)
                return True
        if self._lanes:
            wait(self._lanes.values(), timeout=ROUND_S, return_when=FIRST_COMPLETED)
            return True
        return self._recheck(self._store)

    def _harvest(self) -> None:
        """See what came of those that were being sent. Raises what says that the store as such is not well."""
        for session, bringing in list(self._lanes.items()):
            if bringing.done():
                del self._lanes[session]
                error = bringing.exception()
                if error is not None:
                    # The others will fail, too, or succeed: either is over in time.
                    wait(self._lanes.values())
                    self._lanes.clear()
                    raise error

    def _bring(self, store: ReplicaStore, session: SessionId) -> None:
        """Send one session's latest snapshot, in a thread of its own. Raises StoreError where the store is not well."""
        try:
            sent = self._sending.send(store, session)
        except LocalGone as error:
            self._add("local_gone")
            _LOG.info("event=replica_not_sent store=%s session=%s why=%s", self.name, session, error)
            self._put_off(session, 1.0)
        except StoreError as error:
            self._leave_aside(session, error)
        else:
            self._add("snapshots_sent")
            self._backoff.succeeded()
            with self._mutex:
                self._backlog.published(session, sent.generation, sent.kv_len, self._clock())

    def _look(self) -> None:
        """See what there is here, and what new sessions are like; it takes a tenth of the time at most."""
        began_s = self._clock()
        if began_s < self._look_at_s:
            return
        try:
            # One that is older is of a session whose end nobody saw: nothing to keep elsewhere, and where there is no
            # room it is the first to go.
            oldest = self._wall() - LIVE_KEEP_S
            heads = [head for head in self._local.heads() if head.created_at >= oldest]
        except StoreError:
            # The mover has not made it yet, or is making another.
            return
        ended_s = self._clock()
        self._look_at_s = ended_s + max(ROUND_S, 10 * (ended_s - began_s))
        with self._mutex:
            self._backlog.see(heads, self._clock())
            unshaped = self._backlog.unshaped(self._shapes)
        for session in unshaped:
            try:
                found = self._local.latest(session)
            except StoreError:
                continue
            if found is None:
                self._put_off(session, 1.0)
                continue
            with self._mutex:
                self._shapes[session] = Shape(found.prompt_len, found.block_tokens, found.block_bytes)
                if len(self._shapes) > SESSIONS_MAX:
                    self._shapes.popitem(last=False)

    def _tell_of_ends(self, store: ReplicaStore) -> None:
        with self._mutex:
            over = self._backlog.over(self._clock())
        for head in over:
            try:
                there = store.latest(head.session)
                # Whoever has the session now says when it is over.
                if there is not None and there.generation <= head.generation:
                    store.finish(head.session)
            except StoreError as error:
                self._leave_aside(head.session, error)
                continue
            with self._mutex:
                self._backlog.told(head.session)

    def _recheck(self, store: ReplicaStore) -> bool:
        """See whether what was published a while ago is still there; False when there is nothing to look at."""
        with self._mutex:
            session = self._backlog.unchecked(self._clock() - self._recheck_s)
        if session is None:
            return False
        found = None
        try:
            found = store.latest(session)
        except StoreError as error:
            # What cannot be read there is not there, and is sent again after a while.
            self._leave_aside(session, error)
        with self._mutex:
            if found is None:
                self._backlog.found(session, 0, 0, self._clock())
            else:
                self._backlog.found(session, found.generation, found.kv_len, self._clock())
        return True

    def _leave_aside(self, session: SessionId, error: StoreError) -> None:
        """For a while, if that error is of this session alone; one that says that the store is not well is raised."""
        if reason_of(error) not in _OF_THE_SESSION:
            raise error
        self._count(error)
        _LOG.warning("event=replica_refused store=%s session=%s error=%s", self.name, session, error)
        self._put_off(session, PUT_OFF_S)

    def _put_off(self, session: SessionId, for_s: float) -> None:
        with self._mutex:
            self._backlog.put_off(session, self._clock() + for_s)

    def _count(self, error: StoreError) -> None:
        self._add(f"failures_{reason_of(error).value}")

    def _add(self, name: str, more: int = 1) -> None:
        with self._mutex:
            self.counts[name] += more

    def _failed(self, error: StoreError) -> None:
        self._count(error)
        if reason_of(error) in _OF_ITS_ROOM:
            _LOG.warning("event=replica_store_full store=%s serving=on error=%s", self.name, error)
        else:
            if self.is_up:
                _LOG.error("event=replica_store_down store=%s serving=on error=%s", self.name, error)
            self.is_up = False
        self._stopping.wait(self._backoff.wait_s())
