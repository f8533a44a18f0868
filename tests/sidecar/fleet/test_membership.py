"""What a member releases at a service whose answers are lost: what was done, whether or not anybody said so."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from midstream.session.errors import CoordinationError
from midstream.session.ids import Generation, SessionId
from midstream.sidecar.fleet.coordination import Claim
from midstream.sidecar.fleet.fence import WhenAlone
from midstream.sidecar.fleet.lease_service import Change, Current, Entry, LeaseService, Renewals, Whole
from midstream.sidecar.fleet.leased import LeasedCoordination
from midstream.sidecar.fleet.record import MemberId, Record, Role

SESSION = SessionId("5" * 32)
GATEWAY = Record("a", Role.GATEWAY, "http://a:1")


class Memory(LeaseService):
    """A service in this process. `answers_lost`: so many writes of claims are done, and nobody is told."""

    name = "memory"
    renewals = Renewals.UNSEEN

    def __init__(self) -> None:
        self.members: dict[MemberId, str] = {}
        self.kept: dict[SessionId, Claim] = {}
        self.answers_lost = 0

    async def create(self, member: MemberId, entry: str) -> float:
        self.members[member] = entry
        return 10.0

    async def renew(self, member: MemberId) -> float:
        return 10.0

    async def write(self, member: MemberId, entry: str) -> None:
        self.members[member] = entry

    async def remove(self, member: MemberId) -> None:
        self.members.pop(member, None)

    async def is_there(self, member: MemberId) -> bool:
        return member in self.members

    async def bury(self, member: MemberId, mark: str) -> bool:
        raise AssertionError

    async def claim(self, claim: Claim) -> Claim | None:
        if claim.session in self.kept:
            return self.kept[claim.session]
        self.kept[claim.session] = claim
        self._answer()
        return None

    async def held(self, session: SessionId) -> Claim | None:
        return self.kept.get(session)

    async def replace(self, held: Claim, claim: Claim | None) -> bool:
        if self.kept.get(held.session) != held:
            return False
        if claim is None:
            del self.kept[held.session]
        else:
            self.kept[held.session] = claim
        self._answer()
        return True

    async def claims(self) -> list[Claim]:
        return list(self.kept.values())

    async def follow(self, every_s: float) -> AsyncIterator[Change]:
        yield Whole({member: Entry(text) for member, text in self.members.items()})
        while True:
            await asyncio.sleep(every_s)
            yield Current()

    async def close(self) -> None:
        pass

    def _answer(self) -> None:
        self.answers_lost -= 1
        if self.answers_lost >= 0:
            raise CoordinationError("no answer")


async def test_a_generation_of_which_nobody_said_that_it_was_written_is_released() -> None:
    service = Memory()
    fleet = LeasedCoordination(service, WhenAlone.STOP)
    me = await fleet.join(GATEWAY, 10)
    await me.give(SESSION, Generation(2), me.id)
    # Written, or not at all: its member does not know, and does not ask again.
    service.answers_lost = 1
    with pytest.raises(CoordinationError):
        await me.give(SESSION, Generation(3), me.id)
    assert service.kept[SESSION].generation == 3
    # Its first release is done, too, and not answered.
    service.answers_lost = 1
    with pytest.raises(CoordinationError):
        await me.release(SESSION)
    await me.release(SESSION)
    assert not service.kept
    await me.leave()
    await fleet.close()


async def test_a_first_claim_of_which_nobody_said_that_it_was_written_is_released() -> None:
    service = Memory()
    fleet = LeasedCoordination(service, WhenAlone.STOP)
    me, other = await fleet.join(GATEWAY, 10), await fleet.join(GATEWAY, 10)
    service.answers_lost = 1
    with pytest.raises(CoordinationError):
        await me.give(SESSION, Generation(2), me.id)
    # What is another's is never taken away by who had it before.
    service.kept[SESSION] = theirs = Claim(SESSION, Generation(3), other.id)
    await me.release(SESSION)
    assert service.kept == {SESSION: theirs}
    service.kept[SESSION] = Claim(SESSION, Generation(2), me.id)
    service.answers_lost = 1
    with pytest.raises(CoordinationError):
        await me.give(SESSION, Generation(4), me.id)
    await me.release(SESSION)
    assert not service.kept
    await fleet.close()
