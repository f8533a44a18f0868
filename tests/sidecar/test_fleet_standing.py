"""What a process may send by its place in its fleet, and where it finds others' streams."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from midstream.proxy.event_ids import is_token, new_token, prefix_of
from midstream.proxy.fleet import Unproven
from midstream.proxy.headers import FLEET
from midstream.session.errors import CoordinationError
from midstream.session.ids import Generation, SessionId
from midstream.sidecar import fleet_standing, fleet_streams
from midstream.sidecar.fleet.coordination import ClaimAnswer, Member, Membership, Picture, Verdict
from midstream.sidecar.fleet.local import LocalCoordination
from midstream.sidecar.fleet.presence import Presence
from midstream.sidecar.fleet.proof import SecretBeliever, SecretProver
from midstream.sidecar.fleet.record import MemberId, Record, Role
from midstream.sidecar.fleet_standing import Life, Standing
from midstream.sidecar.fleet_streams import FleetStreams, prefix_of_member

SECRET = b"of this fleet, and of no other 0"
SESSION, FREE, MINE = SessionId("5" * 32), SessionId("6" * 32), SessionId("7" * 32)
FORMER = MemberId("b.10s.ffeeddccbbaa9988")
NODE = Record("a", Role.NODE, "http://a:1/")


async def joined(fleet: LocalCoordination) -> tuple[Standing, Presence]:
    standing = Standing(fleet, 5)
    presence = await Presence.enter(fleet, NODE, 10, standing.rejoined)
    standing.entered(presence)
    return standing, presence


async def gone(fleet: LocalCoordination, session: SessionId) -> None:
    async with asyncio.timeout(2):
        while await fleet.holder(session) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_stream_goes_on_under_the_next_lease_once_its_sessions_are_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_standing, "_RELEASE_AFTER_S", 0.3)
    fleet = LocalCoordination()
    standing, presence = await joined(fleet)
    stream, once = standing.now(), presence.membership.id
    stream.cover([SESSION])
    assert stream.may_send()
    await presence.membership.leave()
    assert not stream.may_send()
    assert await stream.opened()
    assert stream.may_send()
    assert standing.id != once
    held = await fleet.holder(SESSION)
    assert held is not None
    assert held.owner == standing.id
    stream.ended()
    await asyncio.sleep(0.1)
    # Whoever looks for it a little later is to know that it went on.
    assert await fleet.holder(SESSION) == held
    await gone(fleet, SESSION)
    await presence.close()
    await standing.close()


async def test_a_stream_whose_session_another_has_taken_up_is_over_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_standing, "_RELEASE_AFTER_S", 0.05)
    fleet = LocalCoordination()
    standing, presence = await joined(fleet)
    other = await fleet.join(Record("b", Role.GATEWAY, "http://b:1"), 10)
    stream, mine = standing.now(), standing.now()
    stream.cover([FREE, SESSION])
    mine.cover([MINE])
    once = presence.membership.id
    await presence.membership.leave()
    assert (await other.claim(SESSION, Generation(2), once)).verdict is Verdict.WON
    assert not await stream.opened()
    assert (stream.may_send(), stream.is_over) == (False, True)
    # What it held in vain is let go of after its end; a stream of its own goes on.
    held = await fleet.holder(FREE)
    assert held is not None
    assert held.owner == standing.id
    stream.ended()
    await gone(fleet, FREE)
    assert await mine.opened()
    assert mine.may_send()
    await presence.close()
    assert not mine.may_send()
    standing.left()
    assert not await mine.opened()
    await standing.close()


async def test_a_service_that_does_not_say_whose_a_session_is_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_standing, "_ASK_AGAIN_S", 0.01)

    class Silent(LocalCoordination):
        silences = 3

        async def join(self, record: Record, lease_s: int) -> Membership:
            made = await super().join(record, lease_s)
            claim = made.claim

            async def silent(*asked: Any) -> ClaimAnswer:
                self.silences -= 1
                if self.silences >= 0:
                    raise CoordinationError("no answer")
                return await claim(*asked)

            made.claim = silent  # type: ignore[method-assign]
            return made

    fleet = Silent()
    standing, presence = await joined(fleet)
    stream = standing.now()
    stream.cover([SESSION])
    await presence.membership.leave()
    assert await stream.opened()
    assert fleet.silences == -1
    await presence.close()
    await standing.close()


async def test_what_the_service_does_not_release_at_once_is_released_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_standing, "_RELEASE_AFTER_S", 0.0)
    monkeypatch.setattr(fleet_standing, "_RELEASE_AGAIN_S", 0.05)
    fleet = LocalCoordination()
    standing, presence = await joined(fleet)
    release, silences = presence.membership.release, 2

    async def silent(session: SessionId) -> None:
        nonlocal silences
        silences -= 1
        if silences >= 0:
            raise CoordinationError("no answer")
        await release(session)

    monkeypatch.setattr(presence.membership, "release", silent)
    stream = standing.now()
    stream.cover([SESSION, FREE])
    assert await stream.record(2)
    stream.ended()
    await gone(fleet, SESSION)
    await gone(fleet, FREE)
    assert silences == -2
    await presence.close()
    await standing.close()


async def test_a_claim_in_vain_that_is_claimed_again_is_the_later_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_standing, "_RELEASE_AFTER_S", 0.1)
    fleet = LocalCoordination()
    standing, presence = await joined(fleet)
    member, lost = presence.membership, await fleet.join(Record("b", Role.GATEWAY, "http://b:1"), 10)
    await lost.leave()
    once = standing.claiming(member, SESSION, Generation(2))
    once.ended()
    again = standing.claiming(member, SESSION, Generation(2))
    assert (await member.claim(SESSION, Generation(2), lost.id)).verdict is Verdict.WON
    await asyncio.sleep(0.3)
    assert await fleet.holder(SESSION) is not None
    again.ended()
    await gone(fleet, SESSION)
    # It goes by the lease under which it was claimed.
    assert again.may_send()
    await member.leave()
    assert not again.may_send()
    await presence.close()
    await standing.close()


async def test_the_wait_until_the_service_knows_an_owner_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_standing, "_ASK_AGAIN_S", 0.01)
    fleet = LocalCoordination()
    standing = Standing(fleet, 0.3)
    presence = await Presence.enter(fleet, NODE, 10, standing.rejoined)
    standing.entered(presence)
    asked = 0

    async def silent(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise CoordinationError("no answer")

    monkeypatch.setattr(presence.membership, "give", silent)
    stream = standing.now()
    stream.cover([SESSION])
    async with asyncio.timeout(2):
        assert await stream.record(2) is False
    assert asked > 3
    # While the fence is closed nobody is asked.
    before = asked
    monkeypatch.setattr(presence.membership, "may_send", lambda: False)
    async with asyncio.timeout(2):
        assert await stream.record(2) is False
    assert asked == before
    await presence.close()
    await standing.close()


async def test_before_a_process_has_joined_nobody_could_take_anything_from_it() -> None:
    standing = Standing(LocalCoordination(), 5)
    permission = standing.now()
    assert (permission.may_send(), permission.is_over, await permission.opened()) == (True, False, True)
    await standing.close()


async def test_the_wait_for_a_fence_is_bounded() -> None:
    class Closed:
        is_lost = False

        def may_send(self) -> bool:
            return False

        async def opened(self) -> bool:
            return await asyncio.Event().wait()

    standing = Standing(LocalCoordination(), 5)
    assert await Life(standing, Closed(), 0.05).opened() is False  # type: ignore[arg-type]


async def test_a_token_tells_who_drew_it_and_nobody_else_is_asked_for_it() -> None:
    fleet = LocalCoordination()
    standing, presence = await joined(fleet)
    streams = FleetStreams(standing)
    token = new_token(secrets.token_bytes(16), streams.own_prefix)
    assert is_token(token)
    assert str(standing.id).endswith(prefix_of(token))
    # What a process says for as long as nobody tells it otherwise, nobody else may go on with.
    assert (streams.own_name, FleetStreams(standing, stops_alone=True).own_name) == ("", standing.id)
    other = MemberId("b.10s.00112233445566ff")
    streams.take(Picture({other: Member(other, Record("b", Role.GATEWAY, "https://b:8843/x/"))}))
    assert await streams.base_url_of("00112233445566ff") == "https://b:8843/x"
    assert await streams.base_url_of("ffffffffffffffff") is None
    assert await streams.base_url_of("") is None
    # One that fades may be there still; one that is over has nothing.
    fading = Member(other, Record("b", Role.GATEWAY, "https://b:8843"), is_fading=True)
    streams.take(Picture({other: fading}, stale_since_s=1.0))
    assert await streams.base_url_of("00112233445566ff") == "https://b:8843"
    streams.take(Picture({}))
    assert await streams.base_url_of("00112233445566ff") is None
    await presence.close()
    await standing.close()


async def test_pictures_are_followed_while_it_runs() -> None:
    fleet = LocalCoordination()
    standing, presence = await joined(fleet)
    streams = FleetStreams(standing)
    async with streams.following(), asyncio.timeout(5):
        other = await fleet.join(Record("b", Role.NODE, "http://b:1/", formerly=FORMER), 10)
        while await streams.base_url_of(prefix_of_member(other.id)) != "http://b:1":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        # One that joined again has what it had; and nobody asks itself.
        assert await streams.base_url_of(prefix_of_member(FORMER)) == "http://b:1"
        assert await streams.base_url_of(streams.own_prefix) is None
    await presence.close()
    await standing.close()


async def test_a_watch_that_breaks_is_begun_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_streams, "_FOLLOW_AGAIN_S", 0.01)

    class Breaks(LocalCoordination):
        breaks = 2

        async def watch(self) -> AsyncIterator[Picture]:
            if self.breaks:
                self.breaks -= 1
                raise ValueError("a defect")
            async for picture in super().watch():
                yield picture

    fleet = Breaks()
    standing, presence = await joined(fleet)
    streams = FleetStreams(standing)
    async with streams.following(), asyncio.timeout(5):
        other = await fleet.join(Record("b", Role.NODE, "http://b:1/"), 10)
        while await streams.base_url_of(prefix_of_member(other.id)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert caplog.text.count("event=streams_unwatched") == 2
    assert streams.has_seen(prefix_of_member(other.id))
    await presence.close()
    await standing.close()


def test_what_is_passed_on_is_proven_by_the_fleets_secret_and_believed_once() -> None:
    standing = Standing(LocalCoordination(), 5)
    streams = FleetStreams(standing, SecretProver(SECRET), SecretBeliever(SECRET))
    said = ("POST", "/v1/completions", b"{}")
    proof = streams.vouch(*said)
    assert streams.believes(*said, proof) == ""
    assert "before" in streams.believes(*said, proof)
    assert streams.believes("POST", "/v1/completions", b"{ }", streams.vouch(*said)) != ""
    assert streams.believes(*said, "1") != ""
    stranger = FleetStreams(standing, SecretProver(b"another secret, of somebody else"))
    assert "another secret" in streams.believes(*said, stranger.vouch(*said))
    # It is no proof of a gateway's own request, nor is that one of this: each is good for one thing.
    with pytest.raises(Unproven):
        SecretBeliever(SECRET).check(*said[:2], streams.vouch(*said))
    assert streams.believes(*said, SecretProver(SECRET).headers(*said)[FLEET]) != ""
    # Where a fleet has no secret, what is passed on is only marked as that.
    open_fleet = FleetStreams(standing)
    assert open_fleet.believes(*said, open_fleet.vouch(*said)) == ""
