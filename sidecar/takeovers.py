"""How an interrupted session gets its next owner: what is known of it, the plan, and the worker that is told.

Owns a takeover from the interruption to its placement. Invariant: the place that holds a session's KV is known and kept
until its next owner has produced a token. All waits are bounded. What is best is `choice`'s to decide; what the
takeover came to, once its owner writes, is `settling`'s.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from ..proxy.coordinator import Outcome, Placement, Reason
from ..proxy.problems import NOT_EXACT
from ..session.errors import Refused
from ..session.key import CompatibilityKey
from ..session.marker import Marker, Resume
from ..session.records import LoadState, Slot, SlotState
from ..session.tracker import SessionState
from .choice import (
    KV_TIERS,
    RANKS_BEHIND,
    Account,
    Plan,
    Tier,
    exactly,
    has_any_kv,
    is_good_enough,
    is_near_enough,
    known_outputs,
    matching,
    others_first,
    plan,
)
from .kv_restores import KvRestores
from .metrics import Metrics
from .mover.protocol import Reason as MoverReason
from .mover.protocol import RestoreResult, StoredResult
from .session_record import Place, Record, finish_of, outcome_of, output_max, wants_logprobs
from .settling import Settling
from .workers import Workers

_LOG = logging.getLogger("midstream.coordinator")

RETRY_AFTER_S = 2
# An engine whose connection broke is most likely dying; this long it is not asked again.
SUSPECT_S = 3.0
# How often a waiting takeover looks again even if nothing was announced.
LOOK_AGAIN_S = 0.5
# The kernel tells of a death within this time of the connection that broke.
DEATH_NEWS_S = 0.25
# How often a session is placed anew because its KV was unfit where it was looked for: in a pool, then in memory.
KV_RETRIES_MAX = 2


class Takeovers:
    """The takeovers of one sidecar. `tiers`: where KV may come from. `suspect`: told of engines that broke off."""

    def __init__(
        self,
        workers: Workers,
        kv: KvRestores,
        metrics: Metrics,
        settling: Settling,
        *,
        timeout_s: float,
        tiers: frozenset[Tier],
        suspect: Callable[[str, int, Reason], None],
        draining: Callable[[], bool],
    ) -> None:
        self._workers = workers
        self._kv = kv
        self._metrics = metrics
        self._settling = settling
        self._timeout_s = timeout_s
        self._tiers = tiers
        self._suspect = suspect
        self._draining = draining
        self._changed = asyncio.Event()

    def look_again(self) -> None:
        """Some worker is in a new state."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def take_over(self, record: Record, reason: Reason, delivered: Sequence[int]) -> Placement:
        """Where the session goes on; waits for a worker to come up. Raises Refused."""
        self._settling.interrupted(record, delivered)
        if self.settle_source(record) and record.tracker.state is SessionState.RESTORING:
            # Nothing of it was sent yet, but it counts: what follows goes on from this owner's own tokens.
            self._settling.came_to(record, record.owner.slot(), None)
        record.tracker = record.tracker.interrupted(reason.value)
        self._settling.stop_restore(record)
        await self._settle_adopted(record)
        _LOG.info(
            "event=interrupted session=%s worker=%s generation=%d reason=%s delivered=%d journal=%d",
            record.facts.session, record.owner.epoch.worker, record.owner.generation, reason.value,
            len(delivered), len(record.known),
        )  # fmt: skip
        owner = record.owner.epoch
        if reason is not Reason.MOVE:
            record.wish = None
        if reason not in (Reason.MISMATCH, Reason.MOVE):
            record.suspects[owner.id] = time.monotonic() + SUSPECT_S
            if not owner.dead:
                self._suspect(owner.worker, owner.number, reason)
        return await self.placed(record, delivered, without_kv=reason is Reason.MISMATCH)

    def fits(self, record: Record, tier: Tier) -> bool:
        """Whether a ready worker could go on with the KV that the session has in a tier, the present one included."""
        return tier in self._tiers and bool(matching(record.source.epoch.key, self._workers.candidates()))

    async def placed(self, record: Record, delivered: Sequence[int], *, without_kv: bool = False) -> Placement:
        """The session's next place; waits for a worker to come up. Raises Refused."""
        try:
            async with asyncio.timeout(self._timeout_s):
                chosen = await self._plan_when_possible(record, delivered, without_kv)
        except TimeoutError:
            raise self._refuse(
                record, "takeover_timeout",
                f"no worker came up within {self._timeout_s:g} s; see `midstream status`, "
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
            tiers = self._tiers
            if record.wish is not None:
                candidates = others_first(candidates, account)
                tiers &= record.wish.tiers
            chosen = plan(account, candidates, without_kv=without_kv, tiers=tiers)
            if chosen is not None and not is_good_enough(chosen):
                account = await self._with_kept(record, account)
                chosen = plan(account, candidates, without_kv=without_kv, tiers=tiers)
            if chosen is not None and not is_good_enough(chosen):
                # Asked for only here: a disk that is slow or hangs must not keep a session from KV in memory.
                account = await self._with_stored(record, account)
                chosen = plan(account, candidates, without_kv=without_kv, tiers=tiers)
            if chosen is not None and not is_near_enough(chosen):
                # And asked for here alone: the network must not keep it from what there is on disk.
                account = await self._with_replica(record, account)
                chosen = plan(account, candidates, without_kv=without_kv, tiers=tiers)
            if chosen is not None and record.wish is not None and not tiers:
                chosen = replace(chosen, detail="its move asked for that")
            if chosen is not None and record.demands_exact:
                allowed = exactly(chosen, account, candidates)
                if allowed is None and (without_kv or not has_any_kv(account, tiers)):
                    raise self.not_exact(record, chosen.detail)
                chosen = allowed
            if chosen is not None and chosen.tier is Tier.IN_PLACE and not await self._kv.verified(record):
                record.kv_lost = True
                continue
            if chosen is not None and chosen.tier is Tier.HELD and not await self._kv.untouched(record):
                record.kv_lost = True
                continue
            if chosen is not None:
                if self._still_there(chosen):
                    return chosen
                continue
            waiting_for_suspects = any(until > now for until in record.suspects.values())
            if not (self._workers.coming() or waiting_for_suspects):
                if self._draining():
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
            output_max=output_max(record.facts),
            wants_logprobs=wants_logprobs(record.facts.body),
            streamed=record.facts.stream,
            held_kv=held,
            stored_kv_len=0,
            epoch=record.source.epoch.id,
            key=record.source.epoch.key,
            held_outputs=_committed_by_all(record.source, slot),
            has_unseen=record.has_unseen,
            is_stopped=record.is_stopped,
        )

    async def _with_kept(self, record: Record, account: Account) -> Account:
        kept = await self._kv.kept(record)
        if kept is None:
            return account
        if not account.prompt_len:
            record.prompt_hash = kept.prompt_hash
        return replace(account, prompt_len=account.prompt_len or kept.prompt_len, kept_kv_len=kept.kv_len)

    async def _with_stored(self, record: Record, account: Account) -> Account:
        stored = await self._kv.stored(record)
        if stored is None:
            return account
        known = _known_by(record, account, stored)
        return replace(known, stored_kv_len=stored.kv_len, stored_again=stored.recomputed)

    async def _with_replica(self, record: Record, account: Account) -> Account:
        found = await self._kv.replicated(record)
        if found is None:
            return account
        known = _known_by(record, account, found)
        return replace(known, replica_kv_len=found.kv_len, replica_again=found.recomputed)

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
        if chosen.detail == RANKS_BEHIND:
            self._tell_of_ranks(record, chosen)
        # What was journaled beyond this is given up: the new owner may go on otherwise.
        record.known = chosen.expected
        record.plan = chosen
        record.owner = Place(record.facts.session, epoch, generation)
        record.interrupted = asyncio.get_running_loop().create_future()
        self._workers.assign(record.facts.session, epoch)
        if chosen.tier in KV_TIERS:
            record.restore = asyncio.create_task(self._restored(record, chosen.tier))
        return Placement(
            worker.name,
            worker.url,
            Marker(record.facts.session, generation, resume),
            record.interrupted,
            expected=chosen.expected,
            finish=chosen.finish or None,
            fetched=record.fetched,
            front_ends=epoch.front_ends,
        )

    def _tell_of_ranks(self, record: Record, chosen: Plan) -> None:
        source = record.source.epoch
        self._metrics.restores_refused.labels(MoverReason.RANKS.value).inc()
        _LOG.warning(
            "event=ranks_behind session=%s worker=%s generation=%d committed=%s journal=%d cut=%d tier=%s",
            record.facts.session, source.worker, record.source.generation,
            "-" if source.arena is None else ",".join(map(str, source.arena.commits())), len(record.known),
            len(chosen.outputs), chosen.tier.value,
        )  # fmt: skip

    async def _restored(self, record: Record, tier: Tier) -> RestoreResult:
        """What the mover says, and what follows from it: nobody sees the one without the other."""
        result = await self._kv.restore(record, tier)
        if not result.ok and record.restore is asyncio.current_task() and not record.interrupted.done():
            self._restore_failed(record, result)
        return result

    def _restore_failed(self, record: Record, result: RestoreResult) -> None:
        """A restore that failed may leave something better than to compute the KV again where the session is now.

        A planned move leaves its old owner at work. That may have written the whole answer meanwhile: then the ending
        is in its journal. Else it has all KV still, should the next owner never take the session up.
        """
        owner = record.owner
        if self._may_go_on_from_memory(record, result):
            record.kv_retries += 1
            record.kv_lost = True
            _LOG.warning(
                "event=kv_unfit session=%s worker=%s generation=%d reason=%s kept_tokens=%d",
                record.facts.session, owner.epoch.worker, owner.generation, result.reason, result.kept_tokens,
            )  # fmt: skip
            record.interrupted.set_result(Reason.MOVE)
            return
        never = result.reason == MoverReason.DESTINATION and record.gap_s is None and owner.slot() is None
        if never:
            # It may have no room yet. Whether it hangs is found out, and its death takes its sessions elsewhere.
            self._suspect(owner.epoch.worker, owner.epoch.number, Reason.STALL)
        if self._take_whole_answer(record):
            record.interrupted.set_result(Reason.MOVE)
        elif never and record.fetched is not None:
            record.interrupted.set_result(Reason.STALL)

    def _may_go_on_from_memory(self, record: Record, result: RestoreResult) -> bool:
        """Whether the new owner, which was told nothing yet, is to be left again for the sake of KV in memory."""
        if not result.kept_tokens or Tier.MEMORY not in self._tiers or record.kv_retries >= KV_RETRIES_MAX:
            return False
        slot = record.owner.slot()
        moving = record.fetched is not None
        return not moving and slot is not None and len(record.owner.journal(slot)) <= slot.resumed

    def _take_whole_answer(self, record: Record) -> bool:
        """Whether the source's engine, which goes on after a planned move, has come to the end; it is known then."""
        slot = record.source.slot()
        # Its request is open until its KV was fetched, so it was its own front end that aborted it: for a stop string,
        # which the next one finds as well (or because the engine is being stopped, and then the next one computes on).
        if record.fetched is None or slot is None or slot.finish not in ("stop", "length", "abort"):
            return False
        whole = record.source.journal(slot)
        if known_outputs(whole, record.known) != whole:
            return False
        record.known = whole
        record.is_stopped = slot.finish == "abort"
        return True

    def settle_source(self, record: Record) -> bool:
        """After an interruption: which place has the KV, and what was journaled; True if it is the owner's now."""
        owner = record.owner
        slot = owner.slot()
        if owner is not record.source and record.demands_exact and slot is not None:
            outcome, _ = outcome_of(record, slot, 0.0)
            if outcome is Outcome.RECOMPUTED:
                # Nothing of what it computed may be sent, and nothing was: what there was before is there still.
                self._take_whole_answer(record)
                return False
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
        self._take_whole_answer(record)
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

    def not_exact(self, record: Record, detail: str) -> Refused:
        """The refusal of a session that could not go on exactly, whose policy demands that."""
        return self._refuse(
            record, NOT_EXACT,
            f"the session could only be recomputed ({detail}), which its policy forbids; send it again",
        )  # fmt: skip

    def _refuse(self, record: Record, reason: str, text: str) -> Refused:
        record.tracker = record.tracker.ended(SessionState.REFUSED)
        self._metrics.failover(reason=record.tracker.failovers[-1].reason, outcome="refused", tier=Tier.NONE.value)
        return Refused(reason, text, retry_after_s=RETRY_AFTER_S)


def _committed_by_all(place: Place, slot: Slot | None) -> int | None:
    """How many of the outputs that were journaled at a place are of steps that all of its engine's ranks have done.

    None where there is one rank: all of them.
    """
    arena = place.epoch.arena
    if slot is None or arena is None or not arena.commits():
        return None
    return arena.committed(slot, len(arena.journal(slot)))


def _id(chosen: Plan) -> tuple[str, int]:
    return chosen.candidate.worker, chosen.candidate.epoch


def _known_by(record: Record, account: Account, stored: StoredResult) -> Account:
    """What a snapshot tells of a session that was another node's, or whose arena is gone.

    The mover compares all of it once more before it copies.
    """
    key = account.key
    if not account.prompt_len:
        record.prompt_hash = stored.prompt_hash
    if key is None and stored.key is not None:
        with suppress(ValueError):
            key = CompatibilityKey.from_json(stored.key)
    return replace(account, prompt_len=account.prompt_len or stored.prompt_len, key=key)
