"""What takeovers came to: waits for what the new owner's engine says of its KV, counts it, and lets the old place go.

Owns the end of each takeover. Invariant: a takeover is concluded once, and the place that has a session's KV is kept
until its next owner has it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from ..proxy.coordinator import LEAST_EXACT_FIRST, Outcome
from ..session.records import Slot
from .metrics import Metrics
from .session_record import Place, Record, has_kv, has_only_replayed, has_settled, mover_has_the_word, outcome_of
from .workers import Workers

_LOG = logging.getLogger("midstream.coordinator")

LOOK_EVERY_S = 0.01
# The mover answers right after it has told the engine; whoever waits for the outcome waits no longer for the reason.
REASON_WITHIN_S = 0.25


class Settling:
    """The ends of takeovers. `patience_s`: how long an engine may say nothing of its KV."""

    def __init__(self, workers: Workers, metrics: Metrics, *, patience_s: float) -> None:
        self._workers = workers
        self._metrics = metrics
        self._patience_s = patience_s

    def resumed(self, record: Record, gap_s: float) -> None:
        """The new owner's stream went on; what that came to is known when its engine has reported."""
        record.gap_s = gap_s
        if not self.conclude(record):
            self._stop_waiting(record)
            record.concluding = asyncio.create_task(self._conclude_later(record))

    async def what_became(self, record: Record) -> tuple[Outcome, str] | None:
        """The outcome of the takeover under way and its detail, as soon as its engine has said what it got.

        None: the engine was lost before it had computed anything, so that it came to nothing and is to be done again.
        """
        deadline = time.monotonic() + self._patience_s
        while not has_settled(record, record.owner.slot()) and time.monotonic() < deadline:
            if record.interrupted.done():
                if has_only_replayed(record):
                    return None
                # It may have computed what nothing in its arena tells of: that is not called exact.
                break
            await asyncio.sleep(LOOK_EVERY_S)
        if record.restore is not None and mover_has_the_word(record, record.owner.slot()):
            await asyncio.wait({record.restore}, timeout=REASON_WITHIN_S)
        outcome, failed = outcome_of(record, record.owner.slot(), 0.0)
        return outcome, failed.detail

    def interrupted(self, record: Record, delivered: Sequence[int]) -> None:
        """The takeover's owner is lost. It counts unless all that it sent was journaled by the owner before it."""
        chosen = record.plan
        sent_nothing = chosen is not None and not record.has_unseen and len(delivered) <= len(chosen.expected)
        if record.gap_s is not None and (sent_nothing or has_only_replayed(record)):
            self.give_up(record)
        else:
            self.conclude(record, over=True)

    def conclude(self, record: Record, *, over: bool = False, sent: int | None = None) -> bool:
        """Say what the last failover came to, if it is known; `over`: there is nothing more to wait for.

        `sent`: how many outputs the client had when the answer ended, which it then has.
        """
        if record.gap_s is None:
            return True
        seen = record.owner.slot()
        if not over and (not has_settled(record, seen) or mover_has_the_word(record, seen)):
            return False
        if not over and record.interrupted.done():
            # Whoever takes it over next knows whether anything of this owner was sent.
            return False
        # Read anew: what the engine says of its KV is written before the token by which it is seen to have settled.
        slot = record.owner.slot()
        gap_s, record.gap_s = record.gap_s, None
        self.came_to(record, slot, gap_s, sent=sent)
        # A first token that was only journaled can be sent before the engine has any KV: the old place is kept then.
        if record.source is not record.owner and has_kv(record, slot):
            self.move_source(record, record.owner)
        self.stop_restore(record)
        return True

    def came_to(self, record: Record, slot: Slot | None, gap_s: float | None, *, sent: int | None = None) -> None:
        """The last failover is over; `gap_s` is None if the client has noticed nothing of it yet."""
        outcome, failed = outcome_of(record, slot, gap_s or 0.0, sent=sent)
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

    def worst(self, record: Record, sent: int | None) -> Outcome | None:
        """The least exact takeover of a session whose answer is over."""
        self.conclude(record, over=True, sent=sent)
        known = {f.outcome for f in record.tracker.failovers}
        return next((o for o in LEAST_EXACT_FIRST if o.value in known), None)

    def move_source(self, record: Record, place: Place) -> None:
        """From now on it is `place` that has the session's KV."""
        old, record.source = record.source, place
        record.kv_lost = False
        record.kv_retries = 0
        self.old_owner_done(record)
        if old.epoch is not place.epoch:
            self._workers.unassign(record.facts.session, old.epoch)

    def old_owner_done(self, record: Record) -> None:
        """The owner before a planned move may give its blocks up."""
        if record.fetched is not None:
            record.fetched.set_result(None)
            record.fetched = None

    def stop_restore(self, record: Record) -> None:
        """Nobody waits for the mover any more."""
        if record.restore is not None and not record.restore.done():
            record.restore.cancel()
        record.restore = None

    def give_up(self, record: Record) -> None:
        """The takeover under way comes to nothing."""
        record.gap_s = None
        self._stop_waiting(record)

    def ended(self, record: Record, sent: int | None) -> None:
        """The session is over."""
        self.conclude(record, over=True, sent=sent)
        self.stop_restore(record)
        self._stop_waiting(record)
        self.old_owner_done(record)

    async def _conclude_later(self, record: Record) -> None:
        deadline = time.monotonic() + self._patience_s
        # Shared memory makes no noise: whoever waits for a word in it has to look.
        while not self.conclude(record, over=time.monotonic() > deadline):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)

    def _stop_waiting(self, record: Record) -> None:
        if record.concluding is not None:
            record.concluding.cancel()
            record.concluding = None
