"""What operators ask of single sessions: move one, store one, go back to an earlier point of one.

Decides what may be asked and waits until it can be done, bounded; how a session is then placed is the coordinator's.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..proxy.coordinator import Placement, Reason, SessionFacts
from ..proxy.problems import NOT_EXACT
from ..proxy.sessions import new_session_id
from ..session.errors import Refused
from ..session.ids import SessionId
from ..session.tracker import SessionState, Tracker
from .branching import branch_of, require_beginning
from .choice import KV_TIERS, Tier
from .kv_restores import KvRestores
from .mover.protocol import StoredResult
from .past import PastSessions
from .session_record import Place, Record, Wish
from .workers import Epoch

# A wanted cut is looked for in the journal this often, and for so long.
LOOK_EVERY_S = 0.002
WAIT_S = 600.0
# A takeover that is under way is mostly over within this time.
BUSY_WAIT_S = 10.0
FORK = "fork"


class Operators:
    """`place`: takes a new record, and the outputs that its client is taken to have, to a worker.

    `fits`: whether a worker that is ready could use a session's KV from a tier.
    """

    def __init__(
        self,
        records: Mapping[SessionId, Record],
        past: PastSessions,
        kv: KvRestores,
        place: Callable[[Record, tuple[int, ...]], Awaitable[Placement]],
        fits: Callable[[Record, Tier], bool],
    ) -> None:
        self._records = records
        self._past = past
        self._kv = kv
        self._place = place
        self._fits = fits

    async def move(self, session: SessionId, tier: Tier = Tier.HELD, at: int = 1) -> int:
        """Have a session go on on another worker, or on its own where there is no other. Raises Refused.

        Waits until `at` outputs are journaled and returns how many were, when the cut was made. KV comes from `tier`;
        JOURNAL: it is recomputed.
        """
        record = self._in_flight(session)
        if tier is Tier.JOURNAL and record.demands_exact:
            raise Refused(
                NOT_EXACT, f"session {session} must go on exactly, and from its journal it would be computed again; "
                "give --tier held, memory, disk or replica",
            )  # fmt: skip
        if tier is Tier.DISK and not await self._kv.stored(record):
            raise Refused("no_snapshot", f"session {session}: nothing of it is stored; take a snapshot first")
        if tier is Tier.MEMORY and not await self._kv.kept(record):
            raise Refused("not_kept", f"session {session}: nothing of it is kept in memory; see tier1.bytes")
        if tier is Tier.REPLICA and not await self._kv.replicated(record):
            raise Refused("not_replicated", f"session {session}: nothing of it is elsewhere; see replicas.to")
        deadline = time.monotonic() + WAIT_S
        while (count := len(record.owner.journaled())) < at:
            if session not in self._records:
                raise Refused("ended", f"session {session} ended before {at} tokens")
            if time.monotonic() > deadline:
                raise Refused("timeout", f"session {session}: {count} of {at} tokens within {WAIT_S:g} s")
            await asyncio.sleep(LOOK_EVERY_S)
        # The store was asked meanwhile, and an arena keeps the journal of what is over.
        if self._records.get(session) is not record:
            raise Refused("ended", f"session {session} has ended, so there is nothing to move")
        if record.interrupted.done() or not _goes_on(record):
            raise Refused("busy", f"session {session} is being taken up already; ask again when it goes on")
        if (tier in (Tier.MEMORY, Tier.DISK, Tier.REPLICA) or record.demands_exact) and not self._fits(record, tier):
            raise Refused(
                NOT_EXACT, f"session {session}: no worker that is ready could use its KV from {tier.value}; "
                "see `midstream status`, or move it with another --tier",
            )  # fmt: skip
        record.wish = Wish(frozenset({tier}) & KV_TIERS)
        record.interrupted.set_result(Reason.MOVE)
        return count

    async def snapshot(self, session: SessionId) -> StoredResult:
        """Store a session as it is now. Raises Refused."""
        return await self._kv.snapshot(self._in_flight(session))

    async def stored_now(self, session: SessionId) -> tuple[StoredResult, tuple[int, ...]]:
        """Store a session as it is now, to go on elsewhere: what is stored, and the outputs that it covers.

        Raises Refused, also where its end is journaled already, so that there is nothing to go on with.
        """
        record = self._to_leave(session)
        generation = record.owner.generation
        stored = await self._kv.snapshot(record)
        if stored.generation != generation or record.owner.generation != generation:
            raise Refused("busy", f"session {session} was taken up elsewhere meanwhile; ask again")
        return stored, self.written(session)[: stored.outputs]

    def written(self, session: SessionId) -> tuple[int, ...]:
        """What a session has written so far. Raises Refused as above."""
        record = self._to_leave(session)
        slot = record.owner.slot()
        if slot is not None and slot.finish:
            raise Refused("ended", f"session {session} has come to its end, which its client is about to read")
        return () if slot is None else record.owner.journal(slot)

    def _to_leave(self, session: SessionId) -> Record:
        record = self._in_flight(session)
        if record.interrupted.done() or not _goes_on(record):
            raise Refused("busy", f"session {session} is being taken up just now; ask again when it goes on")
        return record

    async def fork(self, parent: SessionId, at: int, changes: Mapping[str, Any]) -> tuple[SessionFacts, Placement]:
        """A new session that goes on after the first `at` outputs of another. Raises Refused.

        Their KV comes from where the parent runs, or from its snapshot; without either they are computed again.
        """
        facts, outputs, finish, place = await self._point(parent)
        branch = branch_of(facts, new_session_id(), changes)
        require_beginning(branch, at, len(outputs), finish)
        tracker = Tracker(branch.session).placed(place.epoch.worker, place.epoch.number).interrupted(FORK)
        interrupted: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        record = Record(branch, tracker, place, place, interrupted, time.monotonic())
        record.known = outputs[:at]
        return branch, await self._place(record, record.known)

    async def _point(self, session: SessionId) -> tuple[SessionFacts, tuple[int, ...], str, Place]:
        """A session that can be gone back to: its request, its outputs, how these ended, and where its KV is."""
        if session in self._records:
            record = self._in_flight(session)
            deadline = time.monotonic() + BUSY_WAIT_S
            while record.source is not record.owner and session in self._records:
                if time.monotonic() > deadline:
                    raise Refused("busy", f"session {session} is being taken up; ask again when it goes on")
                await asyncio.sleep(LOOK_EVERY_S)
        if session in self._records:
            outputs, slot = record.owner.journaled(), record.owner.slot()
            # Its engine writes on meanwhile: an ending is that of these outputs only if there are no more.
            ended = slot is not None and record.owner.journal(slot) == outputs
            return record.facts, outputs, slot.finish if slot is not None and ended else "", record.owner
        past = self._past.get(session)
        if past is None:
            raise Refused(
                "no_session",
                f"session {session} is not in flight, nor among the last ones that were stored; "
                "`midstream sessions` lists them, and --store-dir has them stored",
            )
        # An epoch that is no more: nothing is there, but its key says which KV in the store is the session's.
        return past.facts, past.outputs, past.finish, Place(session, Epoch(past.worker, 0, None, key=past.key), 0)

    def _in_flight(self, session: SessionId) -> Record:
        record = self._records.get(session)
        if record is None:
            raise Refused("no_session", f"no session {session} is in flight; `midstream sessions` lists them")
        if record.facts.exact_obstacle:
            raise Refused(NOT_EXACT, f"session {session} has {record.facts.exact_obstacle!r}, so no KV of it is known")
        return record


def _goes_on(record: Record) -> bool:
    """Whether its owner has written tokens of its own; that of an unstreamed answer is seen by nothing else."""
    slot = record.owner.slot()
    has_own = slot is not None and len(record.owner.journal(slot)) > slot.resumed
    return record.tracker.state is SessionState.RUNNING or has_own
