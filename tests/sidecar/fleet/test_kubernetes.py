"""A fleet in the Kubernetes API, against a server of Lease objects."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contracts.coordination_suite import (
    LEASE_S,
    NODE,
    OTHER,
    Connect,
    CoordinationContract,
    claimed,
    eventually,
    names,
    new_session,
    over,
    until,
)

from midstream.session.errors import ConfigError
from midstream.session.ids import Generation
from midstream.sidecar.fleet.clock import boot_clock_s
from midstream.sidecar.fleet.coordination import Coordination, Verdict
from midstream.sidecar.fleet.fence import WhenAlone
from midstream.sidecar.fleet.kubernetes import KubernetesService
from midstream.sidecar.fleet.kubernetes_access import Credential, FileCredential, KubernetesAccess
from midstream.sidecar.fleet.lease_service import Whole
from midstream.sidecar.fleet.leased import LeasedCoordination
from midstream.sidecar.fleet.record import Readiness, encode, member_id
from support.lease_api_server import LeaseApiServer

pytestmark = pytest.mark.service

Opened = Callable[..., LeasedCoordination]


def connection(
    server: LeaseApiServer,
    when_alone: WhenAlone = WhenAlone.STOP,
    credential: Credential | None = None,
    sweep_every_s: float = 300.0,
    claim_kept_s: float = 3600.0,
) -> LeasedCoordination:
    access = KubernetesAccess(server.url, "models", True, credential or Credential("good"))
    return LeasedCoordination(
        KubernetesService(access, "fleet"), when_alone, sweep_every_s=sweep_every_s, claim_kept_s=claim_kept_s
    )


@pytest_asyncio.fixture
async def server() -> AsyncIterator[LeaseApiServer]:
    async with LeaseApiServer().running() as server:
        yield server


@pytest_asyncio.fixture
async def opened(server: LeaseApiServer) -> AsyncIterator[Opened]:
    """Connections, closed at the end whatever comes of the test."""
    async with AsyncExitStack() as stack:

        def opened(**options: Any) -> LeasedCoordination:
            made = connection(server, **options)
            stack.push_async_callback(made.close)
            return made

        yield opened


@pytest_asyncio.fixture
async def connect(opened: Opened) -> Connect:
    async def connect() -> Coordination:
        return opened()

    return connect


class TestKubernetes(CoordinationContract):
    pass


async def test_who_is_silent_for_a_lease_is_buried_by_those_who_watch_and_never_comes_back(
    server: LeaseApiServer, connect: Connect
) -> None:
    one, other, third = await connect(), await connect(), await connect()
    silent = await one.join(NODE, LEASE_S)
    taker = await other.join(OTHER, LEASE_S)
    await until(other.watch(), lambda p: silent.id in p.members)
    await until(third.watch(), lambda p: silent.id in p.members)
    silent._task.cancel()  # type: ignore[attr-defined]
    began_s = asyncio.get_running_loop().time()
    await over(other, silent.id)
    waited_s = asyncio.get_running_loop().time() - began_s
    assert LEASE_S * 2 / 3 - 0.5 < waited_s < LEASE_S + 2
    await over(third, silent.id)
    assert f"fleet.member.{silent.id}" not in server.objects
    assert (await taker.claim(new_session(), Generation(2), silent.id)).verdict is Verdict.WON


async def test_a_server_that_says_nothing_loses_nobody_and_what_is_known_is_said_to_be_stale(
    server: LeaseApiServer, connect: Connect
) -> None:
    one, other = await connect(), await connect()
    joined = await one.join(NODE, LEASE_S)
    pictures = other.watch()
    await until(pictures, lambda p: joined.id in p.members)
    server.freeze()
    [*_, stale] = await until(pictures, lambda p: p.stale_since_s is not None, 20)
    assert joined.id in stale.members
    assert not joined.may_send(), "its fence has passed, and nobody said that it may go on"
    await asyncio.sleep(LEASE_S)
    server.thaw()
    seen = await until(pictures, lambda p: p.stale_since_s is None, 20)
    assert all(joined.id in p.members and not p.members[joined.id].is_fading for p in seen)
    await eventually(joined.may_send)  # the lease is still its own


async def test_a_member_that_serves_alone_goes_on_while_the_server_is_silent(
    server: LeaseApiServer, opened: Opened
) -> None:
    one = opened(when_alone=WhenAlone.SERVE)
    joined = await one.join(NODE, LEASE_S)
    server.freeze()
    await asyncio.sleep(LEASE_S + 0.5)
    assert joined.may_send()
    server.thaw()


async def test_a_history_that_was_compacted_is_read_anew(server: LeaseApiServer, connect: Connect) -> None:
    one, other = await connect(), await connect()
    a = await one.join(NODE, LEASE_S)
    pictures = other.watch()
    await until(pictures, lambda p: names(p) == ["node-a"])
    server.freeze()  # so that the change is not told by the old watch
    server.cut_watches()
    server.thaw()
    b = await one.join(OTHER, LEASE_S)
    server.compact()
    await until(pictures, lambda p: names(p) == ["node-a", "node-b"] and p.stale_since_s is None)
    server.compact()
    server.cut_watches()
    a.update(replace(NODE, readiness=Readiness.READY))
    await until(pictures, lambda p: p.members[a.id].record.readiness is Readiness.READY)
    await eventually(b.may_send)


async def test_a_watch_that_the_server_ends_goes_on_where_it_was(
    server: LeaseApiServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.sidecar.fleet.kubernetes._WATCH_S", 1)
    one, other = await connect(), await connect()
    joined = await one.join(NODE, LEASE_S)
    pictures = other.watch()
    await until(pictures, lambda p: joined.id in p.members)
    listed = [r for r in server.requests if r == ("GET", "")]
    await asyncio.sleep(2.5)
    joined.update(replace(NODE, readiness=Readiness.READY))
    [*seen, _] = await until(pictures, lambda p: p.members[joined.id].record.readiness is Readiness.READY)
    assert seen == [], "nothing was stale in between"
    assert [r[0] for r in server.requests].count("WATCH") >= 3
    assert len([r for r in server.requests if r == ("GET", "")]) - len(listed) <= 2, "checks, and no list anew"


async def test_an_object_that_an_operator_deletes_ends_its_member_which_is_over_a_lease_later(
    server: LeaseApiServer, connect: Connect
) -> None:
    one, other = await connect(), await connect()
    victim, taker = await one.join(NODE, LEASE_S), await other.join(OTHER, LEASE_S)
    pictures = other.watch()
    await until(pictures, lambda p: victim.id in p.members)
    await eventually(victim.may_send)
    await server.remove(f"fleet.member.{victim.id}")
    [*_, fading] = await until(pictures, lambda p: victim.id not in p.members or p.members[victim.id].is_fading)
    assert fading.members[victim.id].is_fading
    # It does not know yet, so nobody may take anything from it.
    assert (await taker.claim(new_session(), Generation(2), victim.id)).verdict is Verdict.NOT_OVER
    await asyncio.wait_for(victim.lost(), LEASE_S)
    assert not victim.may_send()
    await until(pictures, lambda p: victim.id not in p.members)
    assert (await taker.claim(new_session(), Generation(2), victim.id)).verdict is Verdict.WON


async def test_a_member_that_somebody_else_has_deleted_is_not_buried(server: LeaseApiServer) -> None:
    # It can have been renewed before that, and whoever buries it has not seen it yet.
    access = KubernetesAccess(server.url, "models", True, Credential("good"))
    service = KubernetesService(access, "fleet")
    try:
        member = member_id("one", LEASE_S, "0" * 16)
        await service.create(member, encode(replace(NODE, name="one")))
        whole = await anext(changes := service.follow(3.0))
        assert isinstance(whole, Whole)
        await service.renew(member)
        assert not await service.bury(member, whole.entries[member].mark), "it was renewed"
        await server.remove(f"fleet.member.{member}")
        assert not await service.bury(member, whole.entries[member].mark), "nobody knows when it was renewed last"
        await changes.aclose()
    finally:
        await service.close()


async def test_an_object_that_somebody_else_changes_is_renewed_all_the_same(
    server: LeaseApiServer, connect: Connect
) -> None:
    joined = await (await connect()).join(NODE, LEASE_S)
    name = f"fleet.member.{joined.id}"
    for _ in range(7):
        found = dict(server.objects[name])
        found["metadata"] = {**found["metadata"], "annotations": {**found["metadata"]["annotations"], "who": "me"}}
        await server._write(("models", name), found, "MODIFIED")
        await asyncio.sleep(0.4)
    await eventually(joined.may_send)
    assert joined.id in (await anext((await connect()).watch())).members


async def test_requests_that_are_throttled_are_made_again(server: LeaseApiServer, connect: Connect) -> None:
    one = await connect()
    server.throttle(1)
    joined = await one.join(NODE, LEASE_S)
    server.throttle(2)
    await asyncio.sleep(LEASE_S)
    await eventually(joined.may_send)


async def test_a_token_that_was_replaced_is_read_again_from_its_file(
    server: LeaseApiServer, tmp_path: Path, opened: Opened
) -> None:
    file = tmp_path / "token"
    file.write_text("good\n")
    one = opened(credential=FileCredential(file))
    joined = await one.join(NODE, LEASE_S)
    file.write_text("better\n")
    server.tokens = {"better"}
    await asyncio.sleep(LEASE_S)
    await eventually(joined.may_send)


async def test_an_account_that_may_not_is_told_at_the_start(server: LeaseApiServer, opened: Opened) -> None:
    one = opened(credential=Credential("bad"))
    with pytest.raises(ConfigError, match="401 Unauthorized; the account needs get, list, watch"):
        await one.join(NODE, LEASE_S)


async def test_claims_of_owners_who_are_over_are_swept(server: LeaseApiServer, opened: Opened) -> None:
    one = opened(sweep_every_s=1.0, claim_kept_s=2.0)
    gone, taker = await one.join(NODE, LEASE_S), await one.join(OTHER, LEASE_S)
    await gone.leave()
    session, kept = new_session(), new_session()
    await claimed(taker, session, 2, gone.id)
    stays = await one.join(NODE, LEASE_S)
    await claimed(stays, kept, 2, gone.id)
    await taker.leave()
    await eventually(lambda: f"fleet.claim.{session}" not in server.objects)
    assert f"fleet.claim.{kept}" in server.objects


async def test_a_member_writes_no_more_for_many_sessions_and_in_a_large_fleet(
    server: LeaseApiServer, connect: Connect
) -> None:
    one = await connect()
    joined = await one.join(NODE, LEASE_S)
    for i in range(20):
        await one.join(replace(OTHER, name=f"n-{i}"), LEASE_S)
    server.requests.clear()
    began_s = boot_clock_s()
    for i in range(100):
        joined.update(replace(NODE, slot_count=i))
        await asyncio.sleep(0.03)
    own = [r for r in server.requests if r == ("PUT", f"fleet.member.{joined.id}")]
    assert len(own) <= 2 * (boot_clock_s() - began_s) + 2, "in each second one renewal and one write"


async def test_wall_clocks_that_jump_change_nothing(
    server: LeaseApiServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await connect(), await connect()
    joined = await one.join(NODE, LEASE_S)
    lost = asyncio.ensure_future(joined.lost())
    pictures = other.watch()
    await until(pictures, lambda p: joined.id in p.members)
    real_s = time.time
    for jump_s in (86_400.0, -86_400.0 * 365 * 40):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real_s() + jump_s)
        # What members write for people, from a clock that is wrong.
        monkeypatch.setattr("midstream.sidecar.fleet.kubernetes._wall_time", lambda: "1970-01-01T00:00:00.000000Z")
        await asyncio.sleep(LEASE_S / 2)
        assert not lost.done()
        await eventually(joined.may_send)
    joined.update(replace(NODE, readiness=Readiness.READY))
    seen = await until(pictures, lambda p: p.members[joined.id].record.readiness is Readiness.READY)
    assert not any(p.members[joined.id].is_fading for p in seen)
    lost.cancel()


async def test_pages_of_many_members_make_one_picture(
    server: LeaseApiServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.sidecar.fleet.kubernetes._PAGE", 3)
    one, other = await connect(), await connect()
    for i in range(10):
        await one.join(replace(NODE, name=f"n-{i}"), LEASE_S)
    [first, *_] = await until(other.watch(), lambda p: True)
    assert len(first.members) == 10


async def test_what_is_no_api_server_is_said_to_be_none() -> None:
    async def html(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1000)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>")
            await writer.drain()
            writer.close()

    listener = await asyncio.start_server(html, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    access = KubernetesAccess(f"http://127.0.0.1:{port}", "models", True, Credential("good"))
    one = LeasedCoordination(KubernetesService(access, "fleet"), WhenAlone.STOP)
    with pytest.raises(Exception, match="no JSON; is this an API server"):
        await one.join(NODE, LEASE_S)
    await one.close()
    listener.close()
