"""A fleet that is this process alone: no service, no lease that could be lost.

Owns the members that joined here. The fence of each is open until it leaves, for nobody else could take its sessions.
Claims are held to the same rules as anywhere.
"""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator

from ...session.errors import CoordinationError, LeaseLost
from ...session.ids import Generation, SessionId
from .coordination import (
    CLAIMS_MAX,
    MEMBERS_MAX,
    Claim,
    ClaimAnswer,
    Coordination,
    Member,
    Membership,
    Picture,
    Verdict,
)
from .record import MemberId, Record, encode, lease_s_of, member_id


class LocalCoordination(Coordination):
    """All members of one process."""

    def __init__(self) -> None:
        self._members: dict[MemberId, _LocalMembership] = {}
        self._claims: dict[SessionId, Claim] = {}
        self._version = 0
        self._changed = asyncio.Event()
        self._is_closed = False

    async def join(self, record: Record, lease_s: int) -> Membership:
        """A new member."""
        encode(record)  # what would be refused elsewhere is refused here
        if len(self._members) >= MEMBERS_MAX:
            raise CoordinationError(f"{MEMBERS_MAX} members have joined this process; let some leave")
        made = _LocalMembership(self, member_id(record.name, lease_s, secrets.token_hex(8)), record)
        self._members[made.id] = made
        self._told()
        return made

    async def watch(self) -> AsyncIterator[Picture]:
        """Pictures of what has joined here."""
        seen = -1
        while not self._is_closed:
            changed = self._changed
            if seen != self._version:
                seen = self._version
                yield Picture({m: Member(m, one.record) for m, one in sorted(self._members.items())})
            else:
                await changed.wait()

    async def holder(self, session: SessionId) -> Claim | None:
        """Who has claimed a session."""
        return self._claims.get(session)

    async def close(self) -> None:
        """End all watches and memberships."""
        self._is_closed = True
        for one in list(self._members.values()):
            self._left(one)

    def _is_over(self, member: MemberId) -> bool:
        lease_s_of(member)
        return member not in self._members

    def _left(self, membership: "_LocalMembership") -> None:
        if self._members.pop(membership.id, None) is not None:
            # Those are the claims that a sweep would remove.
            self._claims = {s: c for s, c in self._claims.items() if c.owner != membership.id}
            membership.left.set()
        self._told()

    def _told(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()


class _LocalMembership(Membership):
    def __init__(self, fleet: LocalCoordination, member: MemberId, record: Record) -> None:
        self.id = member
        self.record = record
        self.left = asyncio.Event()
        self._fleet = fleet

    def may_send(self) -> bool:
        return not self.left.is_set()

    @property
    def is_lost(self) -> bool:
        return self.left.is_set()

    async def opened(self) -> bool:
        return not self.left.is_set()

    def fence_s(self) -> float:
        return -math.inf if self.left.is_set() else math.inf

    def update(self, record: Record) -> None:
        if record.name != self.record.name:
            raise ValueError(f"record of {record.name!r}: this member is {self.record.name!r}; join as another")
        encode(record)
        if record != self.record and not self.left.is_set():
            self.record = record
            self._fleet._told()

    async def lost(self) -> None:
        await self.left.wait()

    async def claim(self, session: SessionId, generation: Generation, lost: MemberId) -> ClaimAnswer:
        self._require_lease()
        held = self._fleet._claims.get(session)
        if held is None and not self._fleet._is_over(lost):
            return ClaimAnswer(Verdict.NOT_OVER)
        if held is not None and (held.owner != self.id or held.generation > generation):
            return ClaimAnswer(Verdict.TAKEN, held)
        return ClaimAnswer(Verdict.WON, self._write(session, generation, self.id))

    async def give(self, session: SessionId, generation: Generation, to: MemberId) -> None:
        self._require_lease()
        lease_s_of(to)
        held = self._fleet._claims.get(session)
        if held is not None and held.owner != self.id and held != Claim(session, generation, to):
            raise CoordinationError(f"session {session}: {held.owner} has it by now; it is not this member's to give")
        self._write(session, generation, to)

    async def release(self, session: SessionId) -> None:
        held = self._fleet._claims.get(session)
        if held is not None and held.owner == self.id:
            del self._fleet._claims[session]

    async def leave(self) -> None:
        self._fleet._left(self)

    def _write(self, session: SessionId, generation: Generation, owner: MemberId) -> Claim:
        if len(self._fleet._claims) >= CLAIMS_MAX and session not in self._fleet._claims:
            raise CoordinationError(f"{CLAIMS_MAX} claims are held; release those of sessions that have ended")
        self._fleet._claims[session] = claim = Claim(session, generation, owner)
        return claim

    def _require_lease(self) -> None:
        if self.left.is_set():
            raise LeaseLost(f"{self.id}: has left; join again and claim what was its own")
