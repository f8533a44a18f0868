"""What a process may send by its place in its fleet, and where it finds others' streams."""

import asyncio
import secrets

from midstream.proxy.event_ids import is_token, new_token, prefix_of
from midstream.sidecar.fleet.coordination import Member, Picture
from midstream.sidecar.fleet.local import LocalCoordination
from midstream.sidecar.fleet.presence import Presence
from midstream.sidecar.fleet.proof import SecretBeliever, SecretProver
from midstream.sidecar.fleet.record import MemberId, Record, Role
from midstream.sidecar.fleet_standing import Life, Standing
from midstream.sidecar.fleet_streams import FleetStreams

SECRET = b"of this fleet, and of no other 0"
NODE = Record("a", Role.NODE, "http://a:1/")


async def joined(fleet: LocalCoordination) -> tuple[Standing, Presence]:
    async def told(*_: object) -> None:
        """Nobody asks."""

    standing = Standing(fleet, 0.2)
    presence = await Presence.enter(fleet, NODE, 10, told)
    standing.entered(presence)
    return standing, presence


async def test_a_stream_goes_by_the_life_in_which_it_began() -> None:
    fleet = LocalCoordination()
    standing, presence = await joined(fleet)
    first = standing.now()
    assert first.may_send()
    assert await first.opened()
    await presence.membership.leave()
    assert (first.may_send(), first.is_over, await first.opened()) == (False, True, False)
    async with asyncio.timeout(5):
        while not standing.now().may_send():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    # It is a member again, and may send; what began before may not.
    assert first.is_over
    await presence.close()
    assert not standing.now().may_send()
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

    assert await Life(Closed(), 0.05).opened() is False  # type: ignore[arg-type]


async def test_a_token_tells_who_drew_it_and_nobody_else_is_asked_for_it() -> None:
    fleet = LocalCoordination()
    standing, presence = await joined(fleet)
    streams = FleetStreams(standing)
    token = new_token(secrets.token_bytes(16), streams.own_prefix)
    assert is_token(token)
    assert str(standing.id).endswith(prefix_of(token))
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
        while await streams.base_url_of(streams.own_prefix) != "http://a:1":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
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
    # Where a fleet has no secret, what is passed on is only marked as that.
    open_fleet = FleetStreams(standing)
    assert open_fleet.believes(*said, open_fleet.vouch(*said)) == ""
