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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..proxy.coordinator import Outcome, Placement, Reason, SessionFacts
from ..session.errors import Refused
from ..session.ids import SessionId
from ..session.marker import Marker, Resume
from ..session.records import LoadState, Slot, SlotState
from ..session.tracker import Failed, SessionState, Tracker
from .choice import Account, Plan, Tier, known_outputs, plan
from .metrics import Metrics
from .mover.protocol import MoverError, RestoreResult, StoredResult, VerifyResult
from .mover.protocol import Reason as MoverReason
from .workers import Epoch, Workers

_LOG = logging.getLogger("midstream.coordinator")

HISTORY_MAX = 1000
RETRY_AFTER_S = 2
# An engine whose connection broke is most likely dying; this long it is not asked again.
SUSPECT_S = 3.0
# How often a waiting takeover looks again even if nothing was announced.
LOOK_AGAIN_S = 0.5
CONCLUDE_EVERY_S = 0.01
# The kernel tells of a death within this time of the connection that broke.
DEATH_NEWS_S = 0.25
NO_HASH = "0" * 32
LEAST_EXACT_FIRST = (Outcome.REFUSED, Outcome.RESTARTED, Outcome.RECOMPUTED, Outcome.EXACT)


class Mover(Protocol):
    """What the coordinator asks of the mover process (mover/client.py). Each call raises MoverError."""

    async def restore(
        self,
        session: SessionId,
        *,
        source: tuple[Path, int] | None,
        to_arena: Path,
        to_generation: int,
        deadline_s: float,
    ) -> RestoreResult:
        """Fill a waiting session's blocks."""
        ...

    async def verify(self, arena: Path, session: SessionId, generation: int) -> VerifyResult:
        """Compare a session's blocks with their checksums."""
        ...

    async def stored(self, session: SessionId) -> StoredResult:
        """The snapshot on disk that a restore would use."""
        ...

    async def finish(self, session: SessionId, generation: int) -> None:
        """What is stored of a session may go first."""
        ...


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Bounds, and which tiers may be used."""

    takeover_timeout_s: float = 600.0
    load_timeout_s: float = 10.0
    tiers: frozenset[Tier] = frozenset(Tier)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A generation of a session on an epoch."""

    session: SessionId
    epoch: Epoch
    generation: int

    def slot(self) -> Slot | None:
        """Its record in the epoch's arena, if there is one."""
        self.epoch.learn()
        return None if self.epoch.arena is None else self.epoch.arena.find(self.session, self.generation)

    def kv_len(self, slot: Slot) -> int:
        """How many leading positions have KV there."""
        return 0 if self.epoch.arena is None else self.epoch.arena.kv_len(slot)

    def journal(self, slot: Slot) -> tuple[int, ...]:
        """What was journaled there."""
        return () if self.epoch.arena is None else tuple(self.epoch.arena.journal(slot))


@dataclass(slots=True)
class Record:
    """One session. `source` is the place whose KV counts; it may be older than the owner."""

    facts: SessionFacts
    tracker: Tracker
    owner: Place
    source: Place
    interrupted: "asyncio.Future[Reason]"
    began_s: float
    plan: Plan | None = None
    known: tuple[int, ...] = ()
    suspects: dict[tuple[str, int], float] = field(default_factory=dict)
    restore: "asyncio.Task[RestoreResult] | None" = None
    kv_lost: bool = False
    prompt_hash: str = NO_HASH
    gap_s: float | None = None
    concluding: "asyncio.Task[None] | None" = None


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
        self._mover = mover
        self._metrics = metrics
        self._settings = settings
        self._stores = stores
        self._suspect = suspect
        self._records: dict[SessionId, Record] = {}
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
        worker = min(ready, key=lambda w: (len(w.current.sessions) if w.current else 0, w.name))
        assert worker.current is not None
        tracker = Tracker(facts.session).placed(worker.name, worker.current.number)
        place = Place(facts.session, worker.current, tracker.generation)
        record = Record(facts, tracker, place, place, _future(), time.monotonic())
        self._records[facts.session] = record
        self._idle.clear()
        self._workers.assign(facts.session, worker.current)
        return Placement(worker.name, worker.url, Marker(facts.session, tracker.generation), record.interrupted)

    async def take_over(
        self, facts: SessionFacts, last: Placement, reason: Reason, delivered: Sequence[int]
    ) -> Placement:
        """Where the session goes on; waits for a worker to come up."""
        record = self._records[facts.session]
        self._conclude(record, over=True)
        if self._settle_source(record) and record.tracker.state is SessionState.RESTORING:
            # Nothing of it was sent yet, but it counts: what follows goes on from this owner's own tokens.
            self._came_to(record, record.owner.slot(), None)
        record.tracker = record.tracker.interrupted(reason.value)
        self._stop_restore(record)
        await self._settle_adopted(record)
        _LOG.info(
            "event=interrupted session=%s worker=%s generation=%d reason=%s delivered=%d journal=%d",
            facts.session, record.owner.epoch.worker, record.owner.generation, reason.value,
            len(delivered), len(record.known),
        )  # fmt: skip
        owner = record.owner.epoch
        if reason is not Reason.MISMATCH:
            record.suspects[owner.id] = time.monotonic() + SUSPECT_S
            if not owner.dead:
                self._suspect(owner.worker, owner.number, reason)
        without_kv = reason is Reason.MISMATCH
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

    def resumed(self, facts: SessionFacts, placement: Placement, gap_s: float) -> None:
        """The new owner's stream went on; what the failover came to is known when its engine has reported."""
        record = self._records[facts.session]
        record.gap_s = gap_s
        if not self._conclude(record):
            if record.concluding is not None:
                record.concluding.cancel()
            record.concluding = asyncio.create_task(self._conclude_later(record))

    def outcome(self, facts: SessionFacts) -> Outcome | None:
        """The session's least exact takeover."""
        record = self._records[facts.session]
        self._conclude(record, over=True)
        known = {f.outcome for f in record.tracker.failovers}
        return next((o for o in LEAST_EXACT_FIRST if o.value in known), None)

    async def _conclude_later(self, record: Record) -> None:
        deadline = time.monotonic() + 2 * self._settings.load_timeout_s
        # Shared memory makes no noise: whoever waits for a word in it has to look.
        while not self._conclude(record, over=time.monotonic() > deadline):  # noqa: ASYNC110
            await asyncio.sleep(CONCLUDE_EVERY_S)

    def _conclude(self, record: Record, *, over: bool = False) -> bool:
        """Say what the last failover came to, if it is known; `over`: there is nothing more to wait for."""
        if record.gap_s is None:
            return True
        slot = record.owner.slot()
        if not (over or _has_settled(record, slot)):
            return False
        gap_s, record.gap_s = record.gap_s, None
        self._came_to(record, slot, gap_s)
        # A first token that was only journaled can be sent before the engine has any KV: the old place is kept then.
        if record.source is not record.owner and _has_kv(record, slot):
            self._move_source(record, record.owner)
        self._stop_restore(record)
        return True

    def _came_to(self, record: Record, slot: Slot | None, gap_s: float | None) -> None:
        """The last failover is over; `gap_s` is None if the client has noticed nothing of it yet."""
        outcome, failed = _outcome(record, slot, gap_s or 0.0)
        record.tracker = record.tracker.resumed(failed)
        failed = record.tracker.failovers[-1]
        self._metrics.failover(
            reason=failed.reason, outcome=outcome.value, tier=failed.tier, gap_s=gap_s, lag_tokens=failed.lag
        )
        _LOG.info(
            "event=resumed session=%s worker=%s generation=%d reason=%s outcome=%s tier=%s cut=%d lag=%d "
            "gap_ms=%.1f kv_tokens_loaded=%d tokens_recomputed=%d detail=%s",
            record.facts.session, failed.worker, record.owner.generation, failed.reason, outcome.value, failed.tier,
            failed.cut, failed.lag, failed.gap_ms, failed.kv_tokens_loaded, failed.tokens_recomputed,
            failed.detail or "-",
        )  # fmt: skip

    def mismatched(self, facts: SessionFacts, placement: Placement, text: str) -> None:
        """A worker's replay is not what was journaled."""
        self._metrics.output_mismatches.inc()
        _LOG.error(
            "event=mismatch session=%s worker=%s generation=%d text=%s",
            facts.session, placement.worker, placement.marker.generation, text,
        )  # fmt: skip

    def ended(self, facts: SessionFacts, ending: str) -> None:
        """The session is over."""
        record = self._records.pop(facts.session, None)
        if record is None:
            return
        if not self._records:
            self._idle.set()
        self._conclude(record, over=True)
        self._stop_restore(record)
        if record.concluding is not None:
            record.concluding.cancel()
        if record.tracker.state is not SessionState.REFUSED:
            record.tracker = record.tracker.ended(SessionState(ending))
        for epoch in {id(p.epoch): p.epoch for p in (record.owner, record.source)}.values():
            self._workers.unassign(facts.session, epoch)
        self._history.append(_told(record))
        if self._stores:
            self._finishing.add(task := asyncio.create_task(self._finish_stored(record)))
            task.add_done_callback(self._finishing.discard)

    async def _finish_stored(self, record: Record) -> None:
        with suppress(MoverError):
            await self._mover.finish(record.facts.session, record.tracker.generation)

    def plain_upstream(self) -> str:
        """A ready worker for what is not a session."""
        ready = self._workers.ready()
        if not ready:
            raise self._nobody()
        return min(ready, key=lambda w: len(w.current.sessions) if w.current else 0).url

    # ---- told to people

    def sessions(self) -> list[dict[str, Any]]:
        """Running sessions, then ended ones, newest last."""
        return [*self._history, *(_told(r) for r in self._records.values())]

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

    async def _plan_when_possible(self, record: Record, delivered: Sequence[int], without_kv: bool) -> Plan:
        while True:
            changed = self._changed
            account = await self._account(record, delivered)
            now = time.monotonic()
            candidates = [
                c for c in self._workers.candidates()
                if record.suspects.get((c.worker, c.epoch), 0.0) <= now
            ]  # fmt: skip
            chosen = plan(account, candidates, without_kv=without_kv, tiers=self._settings.tiers)
            if chosen is not None and chosen.tier is Tier.IN_PLACE and not await self._verified(record):
                record.kv_lost = True
                continue
            if chosen is not None:
                if self._still_there(chosen):
                    return chosen
                continue
            waiting_for_suspects = any(until > now for until in record.suspects.values())
            if not (self._workers.coming() or waiting_for_suspects):
                raise self._refuse(
                    record, "no_worker",
                    "no worker can take the session up and none is coming; see `midstream status`",
                )  # fmt: skip
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), LOOK_AGAIN_S)

    def _still_there(self, chosen: Plan) -> bool:
        """Whether the chosen worker lived through the checking of its KV."""
        return any((c.worker, c.epoch) == _id(chosen) for c in self._workers.candidates())

    async def _account(self, record: Record, delivered: Sequence[int]) -> Account:
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
        stored = await self._stored(record)
        if slot is not None:
            record.prompt_hash = slot.prompt_hash
        elif stored is not None:
            record.prompt_hash = stored.prompt_hash
        return Account(
            journal=record.known,
            delivered=tuple(delivered),
            prompt_len=slot.prompt_len if slot else (stored.prompt_len if stored else 0),
            finish=_finish(record) if outputs == record.known else "",
            output_max=_output_max(record.facts.body),
            wants_logprobs=_wants_logprobs(record.facts.body),
            streamed=record.facts.stream,
            held_kv=held,
            stored_kv_len=stored.kv_len if stored is not None else 0,
            epoch=record.source.epoch.id,
            key=record.source.epoch.key,
        )

    async def _stored(self, record: Record) -> StoredResult | None:
        if not self._stores or Tier.DISK not in self._settings.tiers:
            return None
        try:
            found = await self._mover.stored(record.facts.session)
        except MoverError as error:
            _LOG.warning("event=stored session=%s error=%s", record.facts.session, error)
            return None
        return found if found.found else None

    async def _verified(self, record: Record) -> bool:
        """In place nothing is copied, so the bytes are compared with their checksums before they are used."""
        source = record.source
        if source.epoch.arena_path is None:
            return False
        needed = self._kv_len(record)
        try:
            checked = await self._mover.verify(source.epoch.arena_path, record.facts.session, source.generation)
        except MoverError as error:
            # Unverifiable is not damaged: the mover may just have been restarted and have no checksums.
            _LOG.warning("event=verify session=%s error=%s", record.facts.session, error)
            return error.reason in (MoverReason.UNREACHABLE, MoverReason.DEADLINE)
        good = checked.tokens
        if good < needed:
            _LOG.error(
                "event=verify session=%s worker=%s good=%d needed=%d",
                record.facts.session, record.source.epoch.worker, good, needed,
            )  # fmt: skip
        return good >= needed

    def _kv_len(self, record: Record) -> int:
        slot = record.source.slot()
        return 0 if slot is None else slot.prompt_len + max(len(record.known) - 1, 0)

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
        # What was journaled beyond this is given up: the new owner may go on otherwise.
        record.known = chosen.expected
        record.plan = chosen
        record.owner = Place(record.facts.session, epoch, generation)
        record.interrupted = _future()
        self._workers.assign(record.facts.session, epoch)
        if chosen.tier in (Tier.HELD, Tier.IN_PLACE, Tier.DISK):
            record.restore = asyncio.create_task(self._restore(record, chosen.tier))
        return Placement(
            worker.name,
            worker.url,
            Marker(record.facts.session, generation, resume),
            record.interrupted,
            expected=chosen.expected,
            finish=chosen.finish or None,
        )

    async def _restore(self, record: Record, tier: Tier) -> RestoreResult:
        """Have the mover fill the new owner's blocks; in place it is needed only for blocks that were shared."""
        source, target = record.source, record.owner
        assert target.epoch.arena_path is not None
        from_arena = None
        if tier is not Tier.DISK:
            assert source.epoch.arena_path is not None
            from_arena = (source.epoch.arena_path, source.generation)
        try:
            result = await self._mover.restore(
                record.facts.session,
                source=from_arena,
                to_arena=target.epoch.arena_path,
                to_generation=target.generation,
                deadline_s=self._settings.load_timeout_s,
            )
        except MoverError as error:
            result = RestoreResult(False, reason=error.reason.value, error=str(error))
        if result.ok:
            self._metrics.restore_s.observe(result.seconds)
        elif tier is not Tier.IN_PLACE:
            self._metrics.restores_refused.labels(result.reason).inc()
            _LOG.warning(
                "event=restore session=%s worker=%s generation=%d tier=%s reason=%s error=%s",
                record.facts.session, target.epoch.worker, target.generation, tier.value, result.reason,
                result.error,
            )  # fmt: skip
        return result

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
            self._move_source(record, owner)
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

    def _move_source(self, record: Record, place: Place) -> None:
        old, record.source = record.source, place
        record.kv_lost = False
        if old.epoch is not place.epoch:
            self._workers.unassign(record.facts.session, old.epoch)

    def _stop_restore(self, record: Record) -> None:
        if record.restore is not None and not record.restore.done():
            record.restore.cancel()
        record.restore = None

    def _refuse(self, record: Record, reason: str, text: str) -> Refused:
        record.tracker = record.tracker.ended(SessionState.REFUSED)
        self._metrics.failover(reason=record.tracker.failovers[-1].reason, outcome="refused", tier=Tier.NONE.value)
        return Refused(reason, text, retry_after_s=RETRY_AFTER_S)

    def _nobody(self) -> Refused:
        states = ", ".join(f"{w.name} is {w.state.value}" for w in self._workers.all()) or "none is configured"
        reason = "loading" if self._workers.coming() else "no_worker"
        return Refused(reason, f"no worker is ready: {states}", retry_after_s=RETRY_AFTER_S)


def _future() -> "asyncio.Future[Reason]":
    return asyncio.get_running_loop().create_future()


def _output_max(body: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _wants_logprobs(body: dict[str, Any]) -> bool:
    logprobs = body.get("logprobs")
    return logprobs is not None and logprobs is not False


def _has_settled(record: Record, slot: Slot | None) -> bool:
    """Whether the new owner's engine has said all about its KV that it will say."""
    if slot is None or record.plan is None or not record.plan.outputs or record.plan.finish:
        return True
    if slot.state is not SlotState.LIVE or slot.loaded + slot.recomputed > 0:
        return True
    return len(record.owner.journal(slot)) > slot.resumed


def _has_kv(record: Record, slot: Slot | None) -> bool:
    """Whether the new owner has the KV of all that it goes on from; true where it has no use for any."""
    if record.plan is None or not record.plan.outputs or record.owner.epoch.arena is None:
        return True
    if slot is None:
        return False
    return slot.load is LoadState.DONE or len(record.owner.journal(slot)) > slot.resumed


def _finish(record: Record) -> str:
    """How the engine ended the very outputs that are known, if it did: the end of another story is none."""
    for place in (record.owner, record.source):
        slot = place.slot()
        if slot is not None and slot.finish and place.journal(slot) == record.known:
            return slot.finish
    return ""


def _id(chosen: Plan) -> tuple[str, int]:
    return chosen.candidate.worker, chosen.candidate.epoch


def _outcome(record: Record, slot: Slot | None, gap_s: float) -> tuple[Outcome, Failed]:
    """What a failover came to, by what the new owner's engine reported of itself."""
    chosen = record.plan
    assert chosen is not None
    loaded, again = (slot.loaded, slot.recomputed) if slot is not None else (0, 0)
    detail = chosen.detail
    tier = chosen.tier
    if chosen.finish and chosen.outputs:
        outcome, loaded, again = Outcome.EXACT, 0, 0
    elif tier in (Tier.HELD, Tier.IN_PLACE, Tier.DISK):
        if slot is not None and slot.load is LoadState.DONE:
            outcome = Outcome.EXACT
        else:
            outcome, tier = Outcome.RECOMPUTED, Tier.JOURNAL
            result = record.restore.result() if record.restore and record.restore.done() else None
            detail = result.reason if result is not None and result.reason else "the engine did not get its KV"
    elif tier is Tier.JOURNAL:
        outcome = Outcome.RECOMPUTED
    else:
        outcome = Outcome.RESTARTED if not chosen.expected else Outcome.RECOMPUTED
    return outcome, Failed(
        reason="",
        outcome=outcome.value,
        tier=tier.value,
        worker=chosen.candidate.worker,
        cut=len(chosen.outputs),
        lag=len(chosen.expected) - len(chosen.outputs),
        kv_tokens_loaded=loaded,
        tokens_recomputed=again,
        gap_ms=round(gap_s * 1000, 1),
        detail=detail,
    )


def _told(record: Record) -> dict[str, Any]:
    tracker = record.tracker
    return {
        "session": record.facts.session,
        "path": record.facts.path,
        "worker": record.owner.epoch.worker,
        "epoch": record.owner.epoch.number,
        "generation": tracker.generation,
        "state": tracker.state.value,
        "age_s": round(time.monotonic() - record.began_s, 1),
        "outcomes": [
            {
                "reason": f.reason,
                "outcome": f.outcome,
                "tier": f.tier,
                "worker": f.worker,
                "cut": f.cut,
                "lag": f.lag,
                "gap_ms": f.gap_ms,
                "kv_tokens_loaded": f.kv_tokens_loaded,
                "tokens_recomputed": f.tokens_recomputed,
                "detail": f.detail,
            }
            for f in tracker.failovers
        ],
    }
