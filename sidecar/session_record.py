"""One session as the coordinator keeps it: who owns it, where its KV is, and what its takeovers came to.

Owns the record and what can be read from it and the arenas. It asks nobody and changes no epoch.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from ..proxy.coordinator import Outcome, Reason, SessionFacts
from ..proxy.dialects.by_path import CHAT_PATH, GENERATE_PATH, RESPONSES_PATH
from ..proxy.eligible_generate import params_of
from ..proxy.policy import Policy
from ..session.ids import SessionId
from ..session.records import LoadState, Slot, SlotState
from ..session.tracker import Failed, SessionState, Tracker
from .choice import KV_TIERS, Plan, Tier
from .mover.protocol import RestoreResult
from .workers import Epoch

NO_HASH = "0" * 32


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

    def journaled(self) -> tuple[int, ...]:
        """What was journaled there so far; nothing where the session has no record."""
        slot = self.slot()
        return () if slot is None else self.journal(slot)


@dataclass(frozen=True, slots=True)
class Wish:
    """A planned move: where KV is to come from. It holds for one takeover."""

    tiers: frozenset[Tier]


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
    # How often its KV was found unfit where it was first looked for, since it had any.
    kv_retries: int = 0
    prompt_hash: str = NO_HASH
    # Its client has text of which nobody sees the ids.
    has_unseen: bool = False
    # A front end has ended it while it was being moved: whoever replays its outputs finds the same stop string.
    is_stopped: bool = False
    gap_s: float | None = None
    concluding: "asyncio.Task[None] | None" = None
    wish: Wish | None = None
    # Done when the owner before a planned move is not needed any more.
    fetched: "asyncio.Future[None] | None" = None

    @property
    def demands_exact(self) -> bool:
        """Whether nothing less than exact is allowed."""
        return self.facts.policy is Policy.EXACT


# By which fields the request of each API limits its outputs; the first that is there counts. Engines pass over those of
# the others: an answer that was cut short by one of these would be cut by nobody but us.
_LIMITS: dict[str, tuple[str, ...]] = {
    CHAT_PATH: ("max_completion_tokens", "max_tokens"),
    RESPONSES_PATH: ("max_output_tokens",),
    GENERATE_PATH: ("max_new_tokens",),
}


def output_limit(facts: SessionFacts) -> tuple[str, int] | None:
    """The field by which a request limits its output tokens, and how many it allows."""
    for name in _LIMITS.get(facts.path, ("max_tokens",)):
        value = (params_of(facts.body) if facts.path == GENERATE_PATH else facts.body).get(name)
        if value is not None:
            return (name, value) if type(value) is int and value > 0 else None
    return None


def output_max(facts: SessionFacts) -> int | None:
    """How many output tokens a request allows at most, if it says so."""
    limit = output_limit(facts)
    return None if limit is None else limit[1]


def wants_logprobs(body: dict[str, Any]) -> bool:
    """Whether a request asks for logprobs (a number for completions, true for chat)."""
    logprobs = body.get("logprobs")
    return logprobs is not None and logprobs is not False


def has_settled(record: Record, slot: Slot | None) -> bool:
    """Whether the new owner's engine has said all about its KV that it will say."""
    if record.plan is None or not record.plan.outputs or record.plan.finish:
        return True
    if slot is None:
        # An engine's front end replays what was journaled before its core has entered the session in the arena.
        return record.owner.epoch.arena is None
    if slot.state is not SlotState.LIVE or slot.loaded + slot.recomputed > 0:
        return True
    return len(record.owner.journal(slot)) > slot.resumed


def is_being_taken_up(record: Record) -> bool:
    """Whether its client has yet to hear of its next owner, or, where its answer comes as a whole, that to get KV."""
    if record.tracker.state is not SessionState.RESTORING:
        return False
    return record.facts.stream or not has_settled(record, record.owner.slot())


def mover_has_the_word(record: Record, slot: Slot | None) -> bool:
    """Whether the new owner was refused its KV, and the mover has yet to say why: it tells the engine first."""
    if record.restore is None or record.restore.done() or slot is None:
        return False
    return slot.load is LoadState.FAILED


def has_only_replayed(record: Record) -> bool:
    """Whether the new owner's engine has the session in its arena, and has computed nothing for it."""
    slot = record.owner.slot()
    return slot is not None and not has_settled(record, slot)


def has_kv(record: Record, slot: Slot | None) -> bool:
    """Whether the new owner has the KV of all that it goes on from; true where it has no use for any."""
    if record.plan is None or not record.plan.outputs or record.owner.epoch.arena is None:
        return True
    if slot is None:
        return False
    return slot.load is LoadState.DONE or len(record.owner.journal(slot)) > slot.resumed


def finish_of(record: Record) -> str:
    """How the engine ended the very outputs that are known, if it did: the end of another story is none.

    Nor is that of the session which a branch goes back to: the branch has limits of its own.
    """
    for place in (record.owner, record.source):
        slot = place.slot() if place.session == record.facts.session else None
        if slot is not None and slot.finish and place.journal(slot) == record.known:
            return slot.finish
    return ""


def outcome_of(record: Record, slot: Slot | None, gap_s: float, *, sent: int | None = None) -> tuple[Outcome, Failed]:
    """What a failover came to, by what the new owner's engine reported of itself.

    `sent` is how many outputs the client had when the answer was over: where these are not more than were journaled, a
    stop string that the new front end found in them has ended it, and nothing that was computed again is in it.
    """
    chosen = record.plan
    assert chosen is not None
    loaded, again = (slot.loaded, slot.recomputed) if slot is not None else (0, 0)
    detail = chosen.detail
    tier = chosen.tier
    if chosen.finish and chosen.outputs:
        outcome, loaded, again = Outcome.EXACT, 0, 0
    elif tier in KV_TIERS:
        if slot is not None and slot.load is LoadState.DONE:
            outcome = Outcome.RECOMPUTED if chosen.of_another_run else Outcome.EXACT
        else:
            outcome, tier = Outcome.RECOMPUTED, Tier.JOURNAL
            detail = _why_not_restored(record.restore) or "the engine did not get its KV"
    elif tier is Tier.JOURNAL and slot is None and sent is not None and sent <= len(chosen.outputs):
        outcome = Outcome.EXACT
    elif tier is Tier.JOURNAL:
        outcome = Outcome.RECOMPUTED
    else:
        outcome = Outcome.RECOMPUTED if chosen.expected or record.has_unseen else Outcome.RESTARTED
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


def _why_not_restored(restore: "asyncio.Task[RestoreResult] | None") -> str:
    """The mover's reason; "" where it gave none. A restore that broke must not break the stream that asks."""
    if restore is None or not restore.done() or restore.cancelled() or restore.exception() is not None:
        return ""
    return restore.result().reason


def told(record: Record) -> dict[str, Any]:
    """A session as `midstream sessions` shows it."""
    tracker = record.tracker
    return {
        "session": record.facts.session,
        "parent": record.facts.parent,
        "path": record.facts.path,
        "obstacle": record.facts.exact_obstacle,
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
