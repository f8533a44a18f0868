"""Decides where each session runs and goes on: the proxy's coordinator over the workers of one sidecar.

Owns the sessions' records, from admission to end. Invariant: a session has one owner (worker, epoch, generation) at a
time, and its record is there as long as it is in flight. What happened to processes is told by the daemon; where a
session goes on is `takeovers`' to find, and what that came to is `settling`'s to say.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..proxy.coordinator import Outcome, Placement, Reason, SessionFacts
from ..proxy.policy import Policy
from ..proxy.problems import NOT_EXACT
from ..proxy.request import samples
from ..session.errors import Refused
from ..session.ids import SessionId
from ..session.marker import Marker
from ..session.tracker import SessionState, Tracker
from .choice import Tier
from .kv_restores import KeepsInMemory, KvRestores, Mover, ReadsElsewhere
from .metrics import Metrics
from .operators import Operators
from .past import Past, PastSessions
from .session_record import Place, Record, finish_of, is_being_taken_up, told
from .settling import Settling
from .takeovers import RETRY_AFTER_S, Takeovers
from .workers import Epoch, Worker, Workers

_LOG = logging.getLogger("midstream.coordinator")

HISTORY_MAX = 1000
LENT_MAX = 65_536
# A node that is empty stays so long for a session whose next node might not take it.
GIVEN_S = 3.0
LOOK_EVERY_S = 0.02
# Who owned a session before it came here; no worker's name can be that.
ELSEWHERE = "(elsewhere)"


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Bounds, and which tiers may be used."""

    takeover_timeout_s: float = 600.0
    load_timeout_s: float = 10.0
    tiers: frozenset[Tier] = frozenset(Tier)


class SidecarCoordinator:
    """The coordinator of one sidecar. `brought_over`: told of ends of sessions that were another node's before."""

    def __init__(
        self,
        workers: Workers,
        mover: Mover,
        metrics: Metrics,
        settings: CoordinatorSettings,
        *,
        stores: bool = False,
        memory: KeepsInMemory | None = None,
        replicas: ReadsElsewhere | None = None,
        brought_over: Callable[[SessionId], Awaitable[None]] | None = None,
        suspect: Callable[[str, int, Reason], None] = lambda worker, epoch, reason: None,
    ) -> None:
        self._workers = workers
        self._kv = KvRestores(
            mover,
            metrics,
            stores=stores and Tier.DISK in settings.tiers,
            load_timeout_s=settings.load_timeout_s,
            memory=memory if Tier.MEMORY in settings.tiers else None,
            replicas=replicas if Tier.REPLICA in settings.tiers else None,
        )
        self._metrics = metrics
        self._settling = Settling(workers, metrics, patience_s=2 * settings.load_timeout_s)
        self._takeovers = Takeovers(
            workers,
            self._kv,
            metrics,
            self._settling,
            timeout_s=settings.takeover_timeout_s,
            tiers=settings.tiers,
            suspect=suspect,
            draining=lambda: self.draining,
        )
        self._brought_over = brought_over
        self._records: dict[SessionId, Record] = {}
        self.past = PastSessions()
        self.operators = Operators(self._records, self.past, self._kv, self._branched, self._takeovers.fits)
        self._finishing: set[asyncio.Task[None]] = set()
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_MAX)
        self._lent: OrderedDict[SessionId, float] = OrderedDict()
        self._given_s = float("-inf")
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    # ---- told by the daemon

    def workers_changed(self) -> None:
        """Some worker is in a new state: whoever waits for one looks again."""
        self._takeovers.look_again()

    def epoch_lost(self, epoch: Epoch, reason: Reason) -> None:
        """An epoch will write no more; its sessions are told before their connections tell them."""
        for record in list(self._records.values()):
            if record.owner.epoch is epoch and not record.interrupted.done():
                record.interrupted.set_result(reason)
        self.workers_changed()

    # ---- asked by the proxy

    async def admit(self, facts: SessionFacts) -> Placement:
        """A ready worker with the most room."""
        if self.draining:
            raise self._draining()
        ready = self._workers.ready()
        if not ready:
            raise self._nobody()
        if facts.policy is Policy.EXACT:
            ready = _exact_ones(ready, sampled=samples(facts.body, facts.path))
        worker = min(ready, key=lambda w: (w.session_count, w.name))
        assert worker.current is not None
        tracker = Tracker.after(facts.session, facts.generation).placed(worker.name, worker.current.number)
        place = Place(facts.session, worker.current, tracker.generation)
        interrupted: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        record = Record(facts, tracker, place, place, interrupted, time.monotonic())
        self._records[facts.session] = record
        self._idle.clear()
        self._workers.assign(facts.session, worker.current)
        if facts.exact_obstacle:
            _LOG.info(
                "event=obstacle session=%s worker=%s generation=%d obstacle=%s",
                facts.session, worker.name, tracker.generation, facts.exact_obstacle,
            )  # fmt: skip
        return Placement(worker.name, worker.url, Marker(facts.session, tracker.generation), record.interrupted)

    async def take_in(self, facts: SessionFacts, outputs: tuple[int, ...], *, unseen: bool = False) -> Placement:
        """A worker for a session that another node has lost; what is stored of it is used."""
        if self.draining and not self._is_lent(facts.session):
            raise self._draining()
        # An epoch of nobody here: nothing of it is there but what the store has.
        elsewhere = Place(facts.session, Epoch(ELSEWHERE, 0, None), facts.generation)
        tracker = Tracker.after(facts.session, facts.generation).placed(ELSEWHERE, 0).interrupted(Reason.NODE_LOST)
        interrupted: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        record = Record(facts, tracker, elsewhere, elsewhere, interrupted, time.monotonic())
        record.known, record.has_unseen = outputs, unseen
        return await self._branched(record, outputs)

    async def take_over(
        self,
        facts: SessionFacts,
        last: Placement,
        reason: Reason,
        delivered: Sequence[int],
        *,
        unseen: bool = False,
    ) -> Placement:
        """Where the session goes on; waits for a worker to come up."""
        record = self._records[facts.session]
        record.has_unseen = unseen
        return await self._takeovers.take_over(record, reason, delivered)

    async def settled(self, facts: SessionFacts, placement: Placement) -> None:
        """At once, but for a session whose policy demands exact: then when its engine has said what it got.

        Without a verdict where that engine was lost before it had computed anything: its stream's end says so next.
        """
        record = self._records[facts.session]
        if not record.demands_exact:
            return
        became = await self._settling.what_became(record)
        if became is not None and became[0] is Outcome.RECOMPUTED:
            self._settling.give_up(record)
            raise self._takeovers.not_exact(record, became[1])

    def resumed(self, facts: SessionFacts, placement: Placement, gap_s: float) -> None:
        """The new owner's stream went on."""
        record = self._records[facts.session]
        if record.tracker.failovers and record.tracker.failovers[-1].reason == Reason.MOVE:
            self._metrics.drain_pause_s.observe(gap_s)
        self._settling.resumed(record, gap_s)

    def journaled(self, facts: SessionFacts, placement: Placement) -> int:
        """How many outputs the owner's engine has journaled."""
        return len(self._records[facts.session].owner.journaled())

    def gave_up(self, facts: SessionFacts, placement: Placement) -> bool:
        """Whether the owner's engine noted in its arena that it did not finish the request."""
        slot = self._records[facts.session].owner.slot()
        return slot is not None and slot.finish in ("abort", "error")

    def outcome(self, facts: SessionFacts, tokens: int | None = None) -> Outcome | None:
        """The session's least exact takeover."""
        return self._settling.worst(self._records[facts.session], tokens)

    def reported(self, facts: SessionFacts, placement: Placement, takeovers: int, outcome: Outcome | None) -> None:
        """Never called: the workers of a sidecar are no nodes."""

    def mismatched(self, facts: SessionFacts, placement: Placement, text: str) -> None:
        """A worker's replay is not what was journaled."""
        self._metrics.output_mismatches.inc()
        _LOG.error(
            "event=mismatch session=%s worker=%s generation=%d text=%s",
            facts.session, placement.worker, placement.marker.generation, text,
        )  # fmt: skip

    def ended(self, facts: SessionFacts, ending: str, tokens: int | None = None) -> None:
        """The session is over."""
        self._metrics.tokens_sent.inc(tokens or 0)
        record = self._records.pop(facts.session, None)
        if record is None:
            return
        if not self._records:
            self._idle.set()
        self._settling.ended(record, tokens if ending == SessionState.FINISHED else None)
        if record.tracker.state is not SessionState.REFUSED:
            failovers = record.tracker.failovers
            if ending == SessionState.FAILED and failovers and not failovers[-1].outcome:
                # Given up by the proxy before anybody took it, as after too many takeovers.
                self._metrics.failover(reason=failovers[-1].reason, outcome="refused", tier=Tier.NONE.value)
            record.tracker = record.tracker.ended(SessionState(ending))
        if self._kv.stores and not record.facts.exact_obstacle:
            self._takeovers.settle_source(record)
            epoch = record.owner.epoch
            self.past.add(Past(facts, record.known, epoch.worker, epoch.key, finish_of(record)))
        for epoch in {id(p.epoch): p.epoch for p in (record.owner, record.source)}.values():
            self._workers.unassign(facts.session, epoch)
        self._history.append(told(record))
        if self._is_lent(facts.session):
            # It goes on elsewhere, or comes back: what is stored of it is still its own.
            return
        self._finishing.add(task := asyncio.create_task(self._finished(record)))
        task.add_done_callback(self._finishing.discard)

    async def _finished(self, record: Record) -> None:
        """What is kept of a session that is over may go first, wherever that is."""
        await self._kv.finished(record)
        if self._brought_over is not None and record.facts.generation:
            await self._brought_over(record.facts.session)

    def plain_upstream(self) -> str:
        """A ready worker for what is not a session."""
        ready = self._workers.ready()
        if not ready:
            raise self._nobody()
        return min(ready, key=lambda w: w.session_count).url

    # ---- sessions that leave

    def in_flight(self) -> list[Record]:
        """All sessions that run here."""
        return list(self._records.values())

    def lend(self, session: SessionId, for_s: float) -> None:
        """Another node is about to go on with it; should that fail, it may come back within that time."""
        now_s = time.monotonic()
        self._given_s = now_s
        self._lent[session] = now_s + for_s
        self._lent.move_to_end(session)
        while next(iter(self._lent.values())) <= now_s or len(self._lent) > LENT_MAX:
            self._lent.popitem(last=False)

    @property
    def gave_lately(self) -> bool:
        """Whether a session was given away so shortly ago that its next node may not have it yet."""
        return time.monotonic() - self._given_s < GIVEN_S

    def _is_lent(self, session: SessionId) -> bool:
        return self._lent.get(session, 0.0) > time.monotonic()

    # ---- told to people

    def sessions(self) -> list[dict[str, Any]]:
        """Running sessions, then ended ones, newest last."""
        return [*self._history, *(told(r) for r in self._records.values())]

    def told_of(self, session: str) -> dict[str, Any] | None:
        """One session, as it is now or was last."""
        record = self._records.get(SessionId(session))
        if record is not None:
            return told(record)
        return next((ended for ended in reversed(self._history) if ended["session"] == session), None)

    @property
    def open_count(self) -> int:
        """Sessions in flight."""
        return len(self._records)

    async def idle(self) -> None:
        """Returns when no session is in flight."""
        await self._idle.wait()

    async def taken_up(self, *, within_s: float) -> None:
        """Returns when no session is on its way into a worker any more, or when it takes too long."""
        deadline = time.monotonic() + within_s
        while any(is_being_taken_up(record) for record in self._records.values()):
            await asyncio.sleep(LOOK_EVERY_S)
            if time.monotonic() > deadline:
                return

    def states(self) -> dict[str, int]:
        """How many sessions are in which state."""
        counted: dict[str, int] = {}
        for record in self._records.values():
            counted[record.tracker.state.value] = counted.get(record.tracker.state.value, 0) + 1
        return counted

    async def _branched(self, record: Record, outputs: tuple[int, ...]) -> Placement:
        """Take a session in that begins where another was."""
        session, source = record.facts.session, record.source.epoch
        self._records[session] = record
        self._idle.clear()
        self._workers.assign(session, source)
        try:
            return await self._takeovers.placed(record, outputs)
        except BaseException:
            self.ended(record.facts, SessionState.FAILED)
            raise

    @staticmethod
    def _draining() -> Refused:
        return Refused("draining", "this sidecar is draining; send the request elsewhere", retry_after_s=1)

    def _nobody(self) -> Refused:
        states = ", ".join(f"{w.name} is {w.state.value}" for w in self._workers.all()) or "none is configured"
        reason = "loading" if self._workers.coming() else "no_worker"
        return Refused(reason, f"no worker is ready: {states}", retry_after_s=RETRY_AFTER_S)


def _exact_ones(ready: Sequence[Worker], *, sampled: bool) -> list[Worker]:
    """Those of the ready workers whose sessions can go on exactly, `sampled` ones or others. Raises Refused."""
    epochs = {w.name: w.current for w in ready if w.current is not None}
    obstacles = {
        name: epoch.exact_obstacles or (epoch.sampling_obstacles if sampled else []) for name, epoch in epochs.items()
    }
    able = [w for w in ready if not obstacles.get(w.name, ["no_epoch"])]
    if not able:
        said = "; ".join(f"{name}: {', '.join(words)}" for name, words in obstacles.items())
        raise Refused(
            NOT_EXACT,
            f"no worker here can go on exactly after an interruption ({said}); see docs/exactness.md, "
            "or send the request with X-Midstream-Policy: best-effort",
        )
    return able
