"""What every coordination must do (sidecar/fleet/coordination.py). A test module inherits CoordinationContract.

It gives the fixture `connect`, which makes connections to one and the same fleet and closes them at the end.
"""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from midstream.session.errors import CoordinationError, LeaseLost
from midstream.session.ids import Generation, SessionId, session_id
from midstream.sidecar.fleet.coordination import Claim, ClaimAnswer, Coordination, Membership, Picture, Verdict
from midstream.sidecar.fleet.record import Load, MemberId, Readiness, Record, Role

Connect = Callable[[], Awaitable[Coordination]]

LEASE_S = 3
NODE = Record("node-a", Role.NODE, "http://10.0.0.7:8800")
OTHER = Record("node-b", Role.NODE, "https://10.0.0.8")


def new_session() -> SessionId:
    return session_id(secrets.token_hex(16))


async def until(
    pictures: AsyncIterator[Picture], wanted: Callable[[Picture], bool], within_s: float = 12.0
) -> list[Picture]:
    """The pictures up to the first that is as wanted."""
    seen: list[Picture] = []
    try:
        async with asyncio.timeout(within_s):
            async for picture in pictures:
                seen.append(picture)
                if wanted(picture):
                    return seen
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s; seen: {seen}") from None
    raise AssertionError(f"the watch ended; seen: {seen}")


def names(picture: Picture) -> list[str]:
    """Of the members that can be taken for alive."""
    return sorted(m.record.name for m in picture.members.values() if not m.is_fading)


async def eventually(is_so: Callable[[], bool], within_s: float = 10.0) -> None:
    """Until something is so."""
    for _ in range(int(within_s / 0.05)):
        if is_so():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"not within {within_s:g} s")


async def over(connection: Coordination, member: MemberId, within_s: float = 12.0) -> None:
    """Until the member is out of the picture."""
    await until(connection.watch(), lambda picture: member not in picture.members, within_s)


async def claimed(
    taker: Membership, session: SessionId, generation: int, lost: MemberId, within_s: float = 12.0
) -> ClaimAnswer:
    """What comes of a claim once the member is known to be over, also by who never saw it."""
    for _ in range(int(within_s / 0.1)):
        answer = await taker.claim(session, Generation(generation), lost)
        if answer.verdict is not Verdict.NOT_OVER:
            return answer
        await asyncio.sleep(0.1)
    raise AssertionError(f"{lost} is not over within {within_s:g} s")


class CoordinationContract:
    """Inherit, and define the fixture `connect`."""

    async def test_who_watches_is_told_the_whole_first_and_then_each_change(self, connect: Connect) -> None:
        one, other = await connect(), await connect()
        a = await one.join(NODE, LEASE_S)
        pictures = other.watch()
        [first, *_] = await until(pictures, lambda p: a.id in p.members)
        assert first.stale_since_s is None
        b = await one.join(OTHER, LEASE_S)
        await until(pictures, lambda p: names(p) == ["node-a", "node-b"])
        a.update(replace(NODE, readiness=Readiness.DRAINING))
        [*_, last] = await until(pictures, lambda p: p.members[a.id].record.readiness is Readiness.DRAINING)
        assert last.members[b.id].record == OTHER
        await b.leave()
        await until(pictures, lambda p: names(p) == ["node-a"] and b.id not in p.members)

    async def test_all_that_a_record_says_arrives(self, connect: Connect) -> None:
        one, other = await connect(), await connect()
        former = await one.join(NODE, LEASE_S)
        record = Record(
            name="node-a",
            role=Role.GATEWAY,
            url="https://[fd00::7]:8800/x",
            readiness=Readiness.READY,
            load=Load.FULL,
            models=("llama-🦙", "a/b:c"),
            keys=("f" * 64, "0" * 64),
            slot_count=256,
            version="0.1.0",
            formerly=former.id,
        )
        joined = await one.join(record, LEASE_S)
        [*_, last] = await until(other.watch(), lambda p: joined.id in p.members)
        assert last.members[joined.id].record == record

    async def test_of_many_updates_the_last_is_told(self, connect: Connect) -> None:
        one, other = await connect(), await connect()
        joined = await one.join(NODE, LEASE_S)
        for count in range(1, 200):
            joined.update(replace(NODE, slot_count=count))
        pictures = await until(
            other.watch(), lambda p: joined.id in p.members and p.members[joined.id].record.slot_count == 199
        )
        assert len(pictures) <= 4

    async def test_a_record_that_is_unfit_is_refused_at_once(self, connect: Connect) -> None:
        one = await connect()
        long = replace(NODE, models=tuple(f"{i}-{'x' * 500}" for i in range(60)))
        with pytest.raises(ValueError, match="at most 16384 are kept"):
            await one.join(long, LEASE_S)
        joined = await one.join(NODE, LEASE_S)
        with pytest.raises(ValueError, match="at most 16384 are kept"):
            joined.update(long)
        with pytest.raises(ValueError, match="join as another"):
            joined.update(OTHER)
        with pytest.raises(ValueError, match="3 to 60 s"):
            await one.join(NODE, 2)

    async def test_each_join_is_another_member_also_under_the_same_name(self, connect: Connect) -> None:
        one, other = await connect(), await connect()
        a, again = await one.join(NODE, LEASE_S), await other.join(NODE, LEASE_S)
        assert a.id != again.id
        [*_, last] = await until(one.watch(), lambda p: len(p.members) == 2)
        assert set(last.members) == {a.id, again.id}

    async def test_a_member_may_send_for_as_long_as_it_is_kept_and_not_after_it_left(self, connect: Connect) -> None:
        one, other = await connect(), await connect()
        joined = await one.join(NODE, LEASE_S)
        lost = asyncio.create_task(joined.lost())
        assert joined.may_send()
        assert await joined.opened()
        await asyncio.sleep(LEASE_S * 1.5)
        await eventually(joined.may_send)  # a machine that is busy may be late with a renewal
        assert not lost.done()
        [first, *_] = await until(other.watch(), lambda p: True)
        assert joined.id in first.members
        assert not joined.is_lost
        await joined.leave()
        assert not joined.may_send()
        assert joined.is_lost
        assert not await joined.opened()
        assert joined.fence_s() == -math.inf
        await asyncio.wait_for(lost, 1)
        with pytest.raises(LeaseLost, match="join again"):
            await joined.claim(new_session(), Generation(2), joined.id)
        await joined.leave()  # once more is nothing

    async def test_of_many_who_claim_a_session_at_once_exactly_one_wins(self, connect: Connect) -> None:
        connections = [await connect() for _ in range(3)]
        gone = await connections[0].join(NODE, LEASE_S)
        takers = [await c.join(replace(OTHER, name=f"taker-{i}"), LEASE_S) for i, c in enumerate(connections)]
        await gone.leave()
        for generation in range(2, 8):
            session = new_session()
            answers = await asyncio.gather(*(claimed(t, session, generation, gone.id) for t in takers))
            [winner] = [t for t, a in zip(takers, answers, strict=True) if a.verdict is Verdict.WON]
            assert [a.verdict for a in answers].count(Verdict.TAKEN) == len(takers) - 1
            claim = Claim(session, Generation(generation), winner.id)
            assert {a.holder for a in answers} == {claim}
            assert [await c.holder(session) for c in connections] == [claim] * 3

    async def test_nothing_is_taken_from_a_member_that_can_still_send(self, connect: Connect) -> None:
        one, other = await connect(), await connect()
        alive, taker = await one.join(NODE, LEASE_S), await other.join(OTHER, LEASE_S)
        session = new_session()
        answer = await taker.claim(session, Generation(2), alive.id)
        assert (answer.verdict, answer.holder) == (Verdict.NOT_OVER, None)
        assert await one.holder(session) is None

    async def test_a_claim_can_be_asked_for_again_and_never_goes_back(self, connect: Connect) -> None:
        one = await connect()
        gone, taker = await one.join(NODE, LEASE_S), await one.join(OTHER, LEASE_S)
        await gone.leave()
        session = new_session()
        for generation in (2, 2, 4):
            assert (await claimed(taker, session, generation, gone.id)).verdict is Verdict.WON
        late = await claimed(taker, session, 3, gone.id)
        assert (late.verdict, late.holder) == (Verdict.TAKEN, Claim(session, Generation(4), taker.id))

    async def test_a_claim_goes_with_its_owner_and_not_before(self, connect: Connect) -> None:
        one, other = await connect(), await connect()
        gone = await one.join(NODE, LEASE_S)
        first, second = await one.join(OTHER, LEASE_S), await other.join(OTHER, LEASE_S)
        await gone.leave()
        session = new_session()
        assert (await claimed(first, session, 2, gone.id)).verdict is Verdict.WON
        # Whoever knows of the first owner only is told of the second.
        answer = await claimed(second, session, 3, gone.id)
        assert (answer.verdict, answer.holder) == (Verdict.TAKEN, Claim(session, Generation(2), first.id))
        await first.leave()
        assert (await claimed(second, session, 3, first.id)).verdict is Verdict.WON
        assert await one.holder(session) == Claim(session, Generation(3), second.id)

    async def test_a_session_that_was_given_is_found_and_belongs_to_whom_it_was_given(self, connect: Connect) -> None:
        one, other = await connect(), await connect()
        a, b = await one.join(NODE, LEASE_S), await other.join(OTHER, LEASE_S)
        third = await one.join(OTHER, LEASE_S)
        session = new_session()
        await a.give(session, Generation(2), b.id)
        await a.give(session, Generation(2), b.id)  # its answer was lost
        assert await other.holder(session) == Claim(session, Generation(2), b.id)
        answer = await claimed(b, session, 2, a.id)  # which is not over
        assert answer.verdict is Verdict.WON
        assert (await claimed(third, session, 3, a.id)).verdict is Verdict.TAKEN
        with pytest.raises(CoordinationError, match="not this member's to give"):
            await third.give(session, Generation(3), a.id)
        await a.leave()
        assert (await claimed(third, session, 3, a.id)).verdict is Verdict.TAKEN

    async def test_a_claim_that_is_released_is_gone(self, connect: Connect) -> None:
        one = await connect()
        gone, taker = await one.join(NODE, LEASE_S), await one.join(OTHER, LEASE_S)
        await gone.leave()
        session = new_session()
        await claimed(taker, session, 2, gone.id)
        await taker.release(session)
        await taker.release(session)
        assert await one.holder(session) is None

    async def test_what_a_member_has_known_of_itself_is_its_claim_and_goes_when_it_is_released(
        self, connect: Connect
    ) -> None:
        one, other = await connect(), await connect()
        a, b = await one.join(NODE, LEASE_S), await other.join(OTHER, LEASE_S)
        session, given = new_session(), new_session()
        for generation in (2, 3, 3):
            await a.give(session, Generation(generation), a.id)
            assert await other.holder(session) == Claim(session, Generation(generation), a.id)
        answer = await b.claim(session, Generation(4), a.id)
        assert (answer.verdict, answer.holder) == (Verdict.TAKEN, Claim(session, Generation(3), a.id))
        await a.release(session)
        assert await other.holder(session) is None
        # What another has by now is not this one's to release.
        await a.give(given, Generation(2), a.id)
        await a.give(given, Generation(3), b.id)
        await a.release(given)
        assert await one.holder(given) == Claim(given, Generation(3), b.id)

    async def test_who_joined_again_can_claim_what_was_its_own_before_anybody_else(self, connect: Connect) -> None:
        one, other = await connect(), await connect()
        former, taker = await one.join(NODE, LEASE_S), await other.join(OTHER, LEASE_S)
        await former.leave()
        again = await one.join(replace(NODE, formerly=former.id), LEASE_S)
        session = new_session()
        assert (await claimed(again, session, 1, former.id)).verdict is Verdict.WON
        answer = await claimed(taker, session, 2, former.id)
        assert (answer.verdict, answer.holder) == (Verdict.TAKEN, Claim(session, Generation(1), again.id))

    async def test_a_watch_ends_when_its_connection_is_closed(self, connect: Connect) -> None:
        one = await connect()
        joined: Membership = await one.join(NODE, LEASE_S)
        pictures = one.watch()
        await until(pictures, lambda p: joined.id in p.members)

        async def rest() -> None:
            async for _ in pictures:
                pass

        waiting = asyncio.create_task(rest())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await one.close()
        await asyncio.wait_for(waiting, 5)
        assert not joined.may_send()
