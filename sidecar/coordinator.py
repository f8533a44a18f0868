"""Decides where each session runs and goes on: the proxy's coordinator over the workers of one sidecar.

Owns the sessions' records. Invariant: a session has one owner (worker, epoch, generation) at a time, and the epoch that
holds its KV is kept until its next owner has produced a token. All waits are bounded. What is best is `choice`'s to
decide, what happened to processes is told by the daemon.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..proxy.coordinator import Outcome, Placement, Reason, SessionFacts
from ..proxy.policy import Policy
from ..proxy.problems import NOT_EXACT
from ..session.errors import Refused
from ..session.ids import SessionId
from ..session.marker import Marker, Resume
from ..session.records import LoadState, SlotState
from ..session.tracker import SessionState, Tracker
from .choice import KV_TIERS, Account, Plan, Tier, exactly, has_any_kv, known_outputs, matching, others_first, plan
from .kv_restores import KvRestores, Mover
from .metrics import Metrics
from .mover.protocol import Reason as MoverReason
from .mover.protocol import RestoreResult
from .operators import Operators
from .past import Past, PastSessions
from .session_record import (
    Place,
    Record,
    finish_of,
    output_max,
    told,
    wants_logprobs,
)
from .settling import Settling
from .workers import Epoch, Worker, Workers

_LOG = logging.getLogger("midstream.coordinator")

HISTORY_MAX = 1000
RETRY_AFTER_S = 2
# An engine whose connection broke is most likely dying; this long it is not asked again.
SUSPECT_S = 3.0
# How often a waiting takeover looks again even if nothing was announced.
LOOK_AGAIN_S = 0.5
# The kernel tells of a death within this time of the connection that broke.
DEATH_NEWS_S = 0.25


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Bounds, and which tiers may be used."""

    takeover_timeout_s: float = 600.0
    load_timeout_s: float = 10.0
    tiers: frozenset[Tier] = frozenset(Tier)


class SidecarCoordinator:
    """The coordinator of one sidecar."""

    def __init__(
        self,
        workers: Workers,
        mover: Mover,
        metrics: Metrics,
        settings: CoordinatorSettings,
        *,
        stores: bool = False,
        suspect: Callable[[str, int, Reason], None] = lambda worker, epoch, reason: None,
    ) -> None:
        self._workers = workers
        self._kv = KvRestores(
            mover,
            metrics,
            stores=stores and Tier.DISK in settings.tiers,
            load_timeout_s=settings.load_timeout_s,
        )
        self._metrics = metrics
        self._settings = settings
        self._suspect = suspect
        self._settling = Settling(workers, metrics, patience_s=2 * settings.load_timeout_s)
        self._records: dict[SessionId, Record] = {}
        self.past = PastSessions()
        self.operators = Operators(self._records, self.past, self._kv, self._branched, self._fits)
        self._finishing: set[asyncio.Task[None]] = set()
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_MAX)
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    # ---- told by the daemon

    def workers_changed(self) -> None:
        """Some worker is in a new state: whoever waits for one looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

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
            raise Refused("draining", "this sidecar is draining; send the request elsewhere", retry_after_s=1)
        ready = self._workers.ready()
        if not ready:
            raise self._nobody()
        if facts.policy is Policy.EXACT:
            ready = _exact_ones(ready)
        worker = min(ready, key=lambda w: (w.session_count, w.name))
        assert worker.current is not None
        tracker = Tracker(facts.session).placed(worker.name, worker.current.number)
        place = Place(facts.session, worker.current, tracker.generation)
        record = Record(facts, tracker, place, place, _future(), time.monotonic())
        self._records[facts.session] = record
        self._idle.clear()
        self._workers.assign(facts.session, worker.current)
        if facts.exact_obstacle:
            _LOG.info(
                "event=obstacle session=%s worker=%s generation=%d obstacle=%s",
                facts.session, worker.name, tracker.generation, facts.exact_obstacle,
            )  # fmt: skip
        return Placement(worker.name, worker.url, Marker(facts.session, tracker.generation), record.interrupted)

    async def take_over(
        self, facts: SessionFacts, last: Placement, reason: Reason, delivered: Sequence[int]
    ) -> Placement:
        """Where the session goes on; waits for a worker to come up."""
        record = self._records[facts.session]
        self._settling.interrupted(record)
        if self._settle_source(record) and record.tracker.state is SessionState.RESTORING:
            # Nothing of it was sent yet, but it counts: what follows goes on from this owner's own tokens.
            self._settling.came_to(record, record.owner.slot(), None)
        record.tracker = record.tracker.interrupted(reason.value)
        self._settling.stop_restore(record)
        await self._settle_adopted(record)
        _LOG.info(
            "event=interrupted session=%s worker=%s generation=%d reason=%s delivered=%d journal=%d",
            facts.session, record.owner.epoch.worker, record.owner.generation, reason.value,
            len(delivered), len(record.known),
        )  # fmt: skip
        owner = record.owner.epoch
        if reason is not Reason.MOVE:
            record.wish = None
        if reason not in (Reason.MISMATCH, Reason.MOVE):
            record.suspects[owner.id] = time.monotonic() + SUSPECT_S
            if not owner.dead:
                self._suspect(owner.worker, owner.number, reason)
        return await self._placed(record, delivered, without_kv=reason is Reason.MISMATCH)

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
            raise self._not_exact(record, became[1])

    def resumed(self, facts: SessionFacts, placement: Placement, gap_s: float) -> None:
        """The new owner's stream went on."""
        self._settling.resumed(self._records[facts.session], gap_s)

    def journaled(self, facts: SessionFacts, placement: Placement) -> int:
        """How many outputs the owner's engine has journaled."""
        owner = self._records[facts.session].owner
        slot = owner.slot()
        return 0 if slot is None else len(owner.journal(slot))

    def gave_up(self, facts: SessionFacts, placement: Placement) -> bool:
        """Whether the owner's engine noted in its arena that it did not finish the request."""
        slot = self._records[facts.session].owner.slot()
        return slot is not None and slot.finish in ("abort", "error")

    def outcome(self, facts: SessionFacts) -> Outcome | None:
        """The session's least exact takeover."""
        return self._settling.worst(self._records[facts.session])

    def mismatched(self, facts: SessionFacts, placement: Placement, text: str) -> None:
        """A worker's replay is not what was journaled."""
        self._metrics.output_mismatches.inc()
        _LOG.error(
            "event=mismatch session=%s worker=%s generation=%d text=%s",
            facts.session, placement.worker, placement.marker.generation, text,
        )  # fmt: skip

    def ended(self, facts: SessionFacts, ending: str, tokens: int = 0) -> None:
        """The session is over."""
        self._metrics.tokens_sent.inc(tokens)
        record = self._records.pop(facts.session, None)
        if record is None:
            return
        if not self._records:
            self._idle.set()
        self._settling.ended(record)
        if record.tracker.state is not SessionState.REFUSED:
            failovers = record.tracker.failovers
            if ending == SessionState.FAILED and failovers and not failovers[-1].outcome:
                # Given up by the proxy before anybody took it, as after too many takeovers.
                self._metrics.failover(reason=failovers[-1].reason, outcome="refused", tier=Tier.NONE.value)
            record.tracker = record.tracker.ended(SessionState(ending))
        if self._kv.stores and not record.facts.exact_obstacle:
            self._settle_source(record)
            epoch = record.owner.epoch
            self.past.add(Past(facts, record.known, epoch.worker, epoch.key, finish_of(record)))
        for epoch in {id(p.epoch): p.epoch for p in (record.owner, record.source)}.values():
            self._workers.unassign(facts.session, epoch)
        self._history.append(told(record))
        self._finishing.add(task := asyncio.create_task(self._kv.finished(record)))
        task.add_done_callback(self._finishing.discard)

    def plain_upstream(self) -> str:
        """A ready worker for what is not a session."""
        ready = self._workers.ready()
        if not ready:
            raise self._nobody()
        return min(ready, key=lambda w: w.session_count).url

    # ---- told to people

    def sessions(self) -> list[dict[str, Any]]:
        """Running sessions, then ended ones, newest last."""
        return [*self._history, *(told(r) for r in self._records.values())]

    @property
    def open_count(self) -> int:
        """Sessions in flight."""
        return len(self._records)

    async def idle(self) -> None:
        """Returns when no session is in flight."""
        await self._idle.wait()

    def states(self) -> dict[str, int]:
        """How many sessions are in which state."""
        counted: dict[str, int] = {}
        for record in self._records.values():
            counted[record.tracker.state.value] = counted.get(record.tracker.state.value, 0) + 1
        return counted

    # ---- how a takeover goes

    def _fits(self, record: Record, tier: Tier) -> bool:
        """Whether a ready worker could go on with the KV that the session has in a tier, the present one included."""
        return tier in self._settings.tiers and bool(matching(record.source.epoch.key, self._workers.candidates()))

    async def _branched(self, record: Record, outputs: tuple[int, ...]) -> Placement:
        """Take a session in that begins where another was."""
        session, source = record.facts.session, record.source.epoch
        self._records[session] = record
        self._idle.clear()
        self._workers.assign(session, source)
        try:
            return await self._placed(record, outputs, without_kv=False)
        except BaseException:
            self.ended(record.facts, SessionState.FAILED)
            raise

    async def _placed(self, record: Record, delivered: Sequence[int], *, without_kv: bool) -> Placement:
        """The session's next place; waits for a worker to come up. Raises Refused."""
        try:
            async with asyncio.timeout(self._settings.takeover_timeout_s):
                chosen = await self._plan_when_possible(record, delivered, without_kv)
        except TimeoutError:
            raise self._refuse(
                record, "takeover_timeout",
                f"no worker came up within {self._settings.takeover_timeout_s:g} s; see `midstream status`, "
                "or raise restore.takeover_timeout_s",
            ) from None  # fmt: skip
        return self._place(record, chosen)

    async def _plan_when_possible(self, record: Record, delivered: Sequence[int], without_kv: bool) -> Plan:
        while True:
            changed = self._changed
            account = self._account(record, delivered)
            now = time.monotonic()
            candidates = [
                c for c in self._workers.candidates()
                if record.suspects.get((c.worker, c.epoch), 0.0) <= now
            ]  # fmt: skip
            tiers = self._settings.tiers
            if record.wish is not None:
                candidates = others_first(candidates, account)
                tiers &= record.wish.tiers
            chosen = plan(account, candidates, without_kv=without_kv, tiers=tiers)
            if chosen is not None and chosen.tier not in (Tier.HELD, Tier.IN_PLACE) and not chosen.finish:
                # Asked for only here: a disk that is slow or hangs must not keep a session from KV that is held.
                account = await self._with_stored(record, account)
                chosen = plan(account, candidates, without_kv=without_kv, tiers=tiers)
            if chosen is not None and record.wish is not None and not tiers:
                chosen = replace(chosen, detail="its move asked for that")
            if chosen is not None and record.demands_exact:
                allowed = exactly(chosen, account, candidates)
                if allowed is None and (without_kv or not has_any_kv(account, tiers)):
                    raise self._not_exact(record, chosen.detail)
                chosen = allowed
            if chosen is not None and chosen.tier is Tier.IN_PLACE and not await self._kv.verified(record):
                record.kv_lost = True
                continue
            if chosen is not None:
                if self._still_there(chosen):
                    return chosen
                continue
            waiting_for_suspects = any(until > now for until in record.suspects.values())
            if not (self._workers.coming() or waiting_for_suspects):
                if self.draining:
                    raise self._refuse(
                        record, "draining", "this sidecar is being stopped, and its workers are; send the request again"
                    )
                raise self._refuse(
                    record, "no_worker",
                    "no worker can take the session up and none is coming; see `midstream status`",
                )  # fmt: skip
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), LOOK_AGAIN_S)

    def _still_there(self, chosen: Plan) -> bool:
        """Whether the chosen worker lived through the checking of its KV."""
        return any((c.worker, c.epoch) == _id(chosen) for c in self._workers.candidates())

    def _account(self, record: Record, delivered: Sequence[int]) -> Account:
        slot = record.source.slot()
        outputs = known_outputs(record.known, delivered)
        held = (
            slot is not None
            and slot.state is SlotState.LIVE
            and record.source.kv_len(slot) > 0
            and bool(record.source.epoch.pools)
            and not record.source.epoch.overwritten
            and not record.kv_lost
        )
        if slot is not None:
            record.prompt_hash = slot.prompt_hash
        return Account(
            journal=record.known,
            delivered=tuple(delivered),
            prompt_len=slot.prompt_len if slot else 0,
            finish=finish_of(record) if outputs == record.known else "",
            output_max=output_max(record.facts.body),
            wants_logprobs=wants_logprobs(record.facts.body),
            streamed=record.facts.stream,
            held_kv=held,
            stored_kv_len=0,
            epoch=record.source.epoch.id,
            key=record.source.epoch.key,
        )

    async def _with_stored(self, record: Record, account: Account) -> Account:
        stored = await self._kv.stored(record)
        if stored is None:
            return account
        if not account.prompt_len:
            record.prompt_hash = stored.prompt_hash
        return replace(account, prompt_len=account.prompt_len or stored.prompt_len, stored_kv_len=stored.kv_len)

    def _place(self, record: Record, chosen: Plan) -> Placement:
        worker = self._workers.get(chosen.candidate.worker)
        epoch = worker.current
        assert epoch is not None
        if record.owner.epoch is not record.source.epoch:
            self._workers.unassign(record.facts.session, record.owner.epoch)
        record.tracker = record.tracker.placed(worker.name, epoch.number)
        generation = record.tracker.generation
        resume = None
        if chosen.outputs:
            resume = Resume(chosen.outputs, chosen.kv, record.prompt_hash, chosen.finish)
        if record.wish is not None:
            record.wish = None
            if record.fetched is None and chosen.tier in KV_TIERS:
                record.fetched = asyncio.get_running_loop().create_future()
        # What was journaled beyond this is given up: the new owner may go on otherwise.
        record.known = chosen.expected
        record.plan = chosen
        record.owner = Place(record.facts.session, epoch, generation)
        record.interrupted = _future()
        self._workers.assign(record.facts.session, epoch)
        if chosen.tier in KV_TIERS:
            record.restore = asyncio.create_task(self._kv.restore(record, chosen.tier))
            record.restore.add_done_callback(lambda done: self._source_may_have_ended(record, done))
        return Placement(
            worker.name,
            worker.url,
            Marker(record.facts.session, generation, resume),
            record.interrupted,
            expected=chosen.expected,
            finish=chosen.finish or None,
            fetched=record.fetched,
        )

    def _source_may_have_ended(self, record: Record, restoring: "asyncio.Task[RestoreResult]") -> None:
        """A planned move leaves its old owner at work, which may write the whole answer before its KV is copied.

        Then nothing has to be computed any more: the ending is in the journal.
        """
        if restoring.cancelled() or restoring is not record.restore or restoring.exception() is not None:
            return
        slot = record.source.slot()
        if slot is None or slot.finish not in ("stop", "length") or record.interrupted.done():
            return
        whole = record.source.journal(slot)
        if restoring.result().reason == MoverReason.FINISHED and known_outputs(whole, record.known) == whole:
            record.known = whole
            record.interrupted.set_result(Reason.MOVE)

    def _settle_source(self, record: Record) -> bool:
        """After an interruption: which place has the KV, and what was journaled; True if it is the owner's now."""
        owner = record.owner
        slot = owner.slot()
        journal = owner.journal(slot) if slot is not None else ()
        merged = known_outputs(journal, record.known)
        if merged is not None:
            record.known = merged
        if owner is record.source:
            return False
        if slot is not None and len(journal) > slot.resumed and merged == journal:
            # It has computed a step of its own, so all KV before that is there.
            self._settling.move_source(record, owner)
            return True
        return False

    async def _settle_adopted(self, record: Record) -> None:
        """An engine that runs in the source's memory keeps a session's blocks until it is done with the session.

        So where the session was its, they are the session's still only if that engine died before it gave them away.
        """
        owner, source = record.owner, record.source
        if owner.epoch.adopt is not source.epoch or not owner.epoch.facts.get("adopted"):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(DEATH_NEWS_S):
                while not owner.epoch.dead:
                    await self._changed.wait()
        slot = owner.slot()
        kept = slot is None or (slot.state is SlotState.LIVE and slot.load is not LoadState.FAILED)
        if not (owner.epoch.dead and kept):
            record.kv_lost = True

    def _not_exact(self, record: Record, detail: str) -> Refused:
        return self._refuse(
            record, NOT_EXACT,
            f"the session could only be recomputed ({detail}), which its policy forbids; send it again",
        )  # fmt: skip

    def _refuse(self, record: Record, reason: str, text: str) -> Refused:
        record.tracker = record.tracker.ended(SessionState.REFUSED)
        self._metrics.failover(reason=record.tracker.failovers[-1].reason, outcome="refused", tier=Tier.NONE.value)
        return Refused(reason, text, retry_after_s=RETRY_AFTER_S)

    def _nobody(self) -> Refused:
        states = ", ".join(f"{w.name} is {w.state.value}" for w in self._workers.all()) or "none is configured"
        reason = "loading" if self._workers.coming() else "no_worker"
        return Refused(reason, f"no worker is ready: {states}", retry_after_s=RETRY_AFTER_S)


def _exact_ones(ready: Sequence[Worker]) -> list[Worker]:
    """Those of the ready workers whose sessions can go on exactly. Raises Refused."""
    obstacles = {w.name: w.current.exact_obstacles for w in ready if w.current is not None}
    able = [w for w in ready if not obstacles.get(w.name, ["no_epoch"])]
    if not able:
        said = "; ".join(f"{name}: {', '.join(words)}" for name, words in obstacles.items())
        raise Refused(
            NOT_EXACT,
            f"no worker here can go on exactly after an interruption ({said}); see docs/exactness.md, "
            "or send the request with X-Midstream-Policy: best-effort",
        )
    return able


def _future() -> "asyncio.Future[Reason]":
    return asyncio.get_running_loop().create_future()


def _id(chosen: Plan) -> tuple[str, int]:
    return chosen.candidate.worker, chosen.candidate.epoch
