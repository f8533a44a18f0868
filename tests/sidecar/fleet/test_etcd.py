"""A fleet in a real etcd, and what befalls it."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
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
    until,
)

from midstream.session.errors import ConfigError, CoordinationError
from midstream.session.ids import Generation
from midstream.session.ports import free_port
from midstream.sidecar.fleet.clock import boot_clock_s
from midstream.sidecar.fleet.coordination import Coordination, Verdict
from midstream.sidecar.fleet.etcd import EtcdService
from midstream.sidecar.fleet.etcd_http import EtcdAccess
from midstream.sidecar.fleet.fence import MARGIN, WhenAlone
from midstream.sidecar.fleet.leased import LeasedCoordination
from midstream.sidecar.fleet.record import Readiness
from support.certificates import make_certificates
from support.etcd_server import VARIABLE, EtcdServer, binary

Opened = Callable[..., LeasedCoordination]

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(binary() is None, reason=f"{VARIABLE} is not set"),
]


def connection(
    *urls: str,
    when_alone: WhenAlone = WhenAlone.STOP,
    sweep_every_s: float = 300.0,
    claim_kept_s: float = 3600.0,
    **access: Any,
) -> LeasedCoordination:
    service = EtcdService(EtcdAccess(urls, **access), "fleet")
    return LeasedCoordination(service, when_alone, sweep_every_s=sweep_every_s, claim_kept_s=claim_kept_s)


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A call of an operator."""
    request = urllib.request.Request(f"{url}/v3/{path}", json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def revision(url: str) -> int:
    return int(ask(url, "kv/range", {"key": base64.b64encode(b"none").decode()})["header"]["revision"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """For tests that leave it as it was."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield server
    server.kill()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """For tests that do something to it."""
    server = EtcdServer(tmp_path).start()
    yield server
    server.kill()


@pytest_asyncio.fixture
async def opened() -> AsyncIterator[Opened]:
    """Connections, closed at the end whatever comes of the test."""
    async with AsyncExitStack() as stack:

        def opened(*urls: str, **options: Any) -> LeasedCoordination:
            made = connection(*urls, **options)
            stack.push_async_callback(made.close)
            return made

        yield opened


@pytest_asyncio.fixture
async def connect(request: pytest.FixtureRequest, opened: Opened) -> Connect:
    server = request.getfixturevalue("etcd" if "etcd" in request.fixturenames else "shared")

    async def connect() -> Coordination:
        return opened(server.url)

    return connect


class TestEtcd(CoordinationContract):
    @pytest.fixture(autouse=True)
    def empty(self, shared: EtcdServer) -> Iterator[None]:
        yield
        everything = base64.b64encode(b"\0").decode()
        ask(shared.url, "kv/deleterange", {"key": everything, "range_end": everything})


async def test_who_is_not_renewed_any_more_is_over_a_lease_after_etcd_took_it_away(
    shared: EtcdServer, connect: Connect
) -> None:
    one, other = await connect(), await connect()
    silent, taker = await one.join(NODE, LEASE_S), await other.join(OTHER, LEASE_S)
    pictures = other.watch()
    await until(pictures, lambda p: silent.id in p.members)
    silent._task.cancel()  # type: ignore[attr-defined]
    await until(pictures, lambda p: p.members[silent.id].is_fading)
    faded_s = boot_clock_s()
    assert (await taker.claim(new_session(), Generation(2), silent.id)).verdict is Verdict.NOT_OVER
    await until(pictures, lambda p: silent.id not in p.members)
    assert LEASE_S - 0.2 < boot_clock_s() - faded_s < LEASE_S + 3
    assert (await taker.claim(new_session(), Generation(2), silent.id)).verdict is Verdict.WON


async def test_an_etcd_that_is_stopped_loses_nobody_and_what_is_known_is_said_to_be_stale(
    etcd: EtcdServer, connect: Connect
) -> None:
    one, other = await connect(), await connect()
    joined = await one.join(NODE, 12)
    pictures = other.watch()
    await until(pictures, lambda p: joined.id in p.members)
    frozen_s = boot_clock_s()
    etcd.freeze()
    [*_, stale] = await until(pictures, lambda p: p.stale_since_s is not None, 20)
    assert joined.id in stale.members
    assert stale.stale_since_s is not None
    assert stale.stale_since_s < frozen_s + 0.5
    with pytest.raises(CoordinationError, match=r"no answer within 3 s|does not answer"):
        await joined.claim(new_session(), Generation(2), joined.id)
    etcd.thaw()
    [*_, again] = await until(pictures, lambda p: p.stale_since_s is None, 20)
    assert names(again) == ["node-a"]
    await eventually(joined.may_send)


async def test_a_fence_closes_while_etcd_is_stopped_and_only_that_of_who_stops_alone(
    etcd: EtcdServer, connect: Connect, opened: Opened
) -> None:
    stops = await (await connect()).join(NODE, LEASE_S)
    serving = opened(etcd.url, when_alone=WhenAlone.SERVE)
    serves = await serving.join(OTHER, LEASE_S)
    etcd.freeze()
    closes_s = stops.fence_s()
    assert closes_s <= boot_clock_s() + LEASE_S * (1 - MARGIN)
    await asyncio.sleep(closes_s - boot_clock_s() + 0.05)
    assert not stops.may_send()
    assert serves.may_send()
    opening = asyncio.create_task(stops.opened())
    await asyncio.sleep(0.2)
    assert not opening.done()
    etcd.thaw()
    # Its lease is still its own, or was given up; nobody else could say so.
    assert await asyncio.wait_for(opening, 20) is stops.may_send()


async def test_an_etcd_that_is_killed_and_started_again_finds_all_members_still_there(
    etcd: EtcdServer, connect: Connect
) -> None:
    one, other = await connect(), await connect()
    a, b = await one.join(NODE, 6), await other.join(OTHER, 6)
    gone = await one.join(replace(NODE, name="gone"), 6)
    await gone.leave()
    session = new_session()
    await claimed(b, session, 2, gone.id)
    pictures = other.watch()
    await until(pictures, lambda p: names(p) == ["node-a", "node-b"])
    etcd.kill()
    await until(pictures, lambda p: p.stale_since_s is not None, 20)
    await asyncio.sleep(1)
    etcd.start(wait=False)
    seen = await until(pictures, lambda p: p.stale_since_s is None, 20)
    assert all(set(p.members) == {a.id, b.id} for p in seen)
    holder = await one.holder(session)
    assert holder is not None
    assert holder.owner == b.id
    a.update(replace(NODE, readiness=Readiness.READY))
    await until(pictures, lambda p: p.members[a.id].record.readiness is Readiness.READY)
    assert a.may_send()
    assert b.may_send()


async def test_all_leases_that_an_etcd_forgot_are_lost_and_their_members_join_again(
    etcd: EtcdServer, connect: Connect
) -> None:
    one = await connect()
    former = await one.join(NODE, LEASE_S)
    etcd.kill()
    etcd.forget()
    etcd.start()
    await asyncio.wait_for(former.lost(), 15)
    assert not former.may_send()
    again = await one.join(replace(NODE, formerly=former.id), LEASE_S)
    assert (await again.claim(new_session(), Generation(1), former.id)).verdict is Verdict.WON


async def test_a_history_that_was_compacted_under_a_watch_is_read_anew(etcd: EtcdServer, connect: Connect) -> None:
    one, other = await connect(), await connect()
    a = await one.join(NODE, 12)
    pictures = other.watch()
    await until(pictures, lambda p: names(p) == ["node-a"])
    # The watch begins where there is nothing any more: changes while it is away, then a compaction.
    etcd.kill()
    await until(pictures, lambda p: p.stale_since_s is not None, 20)
    etcd.start()
    a.update(replace(NODE, readiness=Readiness.READY))
    b = await one.join(OTHER, 12)
    ask(etcd.url, "kv/compaction", {"revision": revision(etcd.url), "physical": True})
    [*_, last] = await until(pictures, lambda p: p.stale_since_s is None and b.id in p.members, 20)
    await until(other.watch(), lambda p: p.members[a.id].record.readiness is Readiness.READY)
    assert set(last.members) == {a.id, b.id}
    # And of a living watch.
    ask(etcd.url, "kv/put", {"key": base64.b64encode(b"x").decode()})
    ask(etcd.url, "kv/compaction", {"revision": revision(etcd.url), "physical": True})
    a.update(replace(NODE, readiness=Readiness.DRAINING))
    await until(pictures, lambda p: p.members[a.id].record.readiness is Readiness.DRAINING)


async def test_a_watch_from_a_revision_that_is_compacted_says_so(shared: EtcdServer) -> None:
    service = EtcdService(EtcdAccess((shared.url,)), "compacted")
    for number in range(3):
        ask(shared.url, "kv/put", {"key": base64.b64encode(b"x").decode(), "value": str(number) * 4})
    ask(shared.url, "kv/compaction", {"revision": revision(shared.url)})
    changes = service.follow(60.0)
    await anext(changes)
    await changes.aclose()  # type: ignore[attr-defined]
    from midstream.sidecar.fleet.etcd import _Seen

    heard: asyncio.Queue[Any] = asyncio.Queue()
    await asyncio.wait_for(service._watch(_Seen(set(), 0), heard), 10)
    with pytest.raises(CoordinationError, match="compacted"):
        raise heard.get_nowait()
    await service.close()


async def test_a_process_that_was_stopped_for_longer_than_its_lease_wakes_with_its_fence_closed(
    shared: EtcdServer, connect: Connect
) -> None:
    other = await connect()
    taker = await other.join(OTHER, LEASE_S)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "support.fleet_member", shared.url, str(LEASE_S)),
        stdout=asyncio.subprocess.PIPE,
        env=environ,
    )
    assert process.stdout is not None
    lines: list[tuple[float, str]] = []

    async def read() -> None:
        async for line in process.stdout or ():
            time_s, _, word = line.decode().strip().partition(" ")
            lines.append((float(time_s), word))

    reading = asyncio.create_task(read())
    await eventually(lambda: len(lines) > 20, 30)
    victim = lines[0][1].removeprefix("joined ")
    stopped_s = boot_clock_s()
    process.send_signal(signal.SIGSTOP)
    pictures = other.watch()
    await until(pictures, lambda p: not any(m.startswith("victim") for m in p.members), 30)
    session = new_session()
    answer = await taker.claim(session, Generation(2), victim)  # type: ignore[arg-type]
    assert answer.verdict is Verdict.WON
    won_s = boot_clock_s()
    process.send_signal(signal.SIGCONT)
    await asyncio.wait_for(reading, 20)
    assert await process.wait() == 0
    sent = [time_s for time_s, word in lines if word == "send"]
    assert sent
    assert max(sent) < stopped_s + 0.5 < won_s, "nothing was sent after it was stopped"
    after = [word for time_s, word in lines if time_s > won_s]
    assert after[0] == "hold"
    assert after[-1] == "lost"


async def test_users_and_passwords_are_what_etcd_has_and_tokens_are_had_anew(
    etcd: EtcdServer, tmp_path: Path, opened: Opened
) -> None:
    for path, body in (
        ("auth/user/add", {"name": "root", "password": "secret"}),
        ("auth/role/add", {"name": "root"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/enable", {}),
    ):
        ask(etcd.url, path, body)
    file = tmp_path / "password"
    file.write_text("wrong\n")
    one = opened(etcd.url, user="root", password_file=str(file))
    with pytest.raises(ConfigError, match=r"check fleet\.etcd_user and fleet\.etcd_password_file"):
        await one.join(NODE, LEASE_S)
    anonymous = opened(etcd.url)
    with pytest.raises(ConfigError, match=r"nobody \(fleet\.etcd_user is not set\)"):
        await anonymous.join(NODE, LEASE_S)
    file.write_text("secret\n")
    joined = await one.join(NODE, 6)
    pictures = one.watch()
    await until(pictures, lambda p: joined.id in p.members)
    etcd.kill()
    etcd.start()  # its tokens are forgotten
    await asyncio.sleep(3)
    joined.update(replace(NODE, readiness=Readiness.READY))
    await until(pictures, lambda p: p.members[joined.id].record.readiness is Readiness.READY)
    assert joined.may_send()


async def test_an_etcd_with_certificates_is_reached_by_who_has_them(tmp_path: Path, opened: Opened) -> None:
    made = make_certificates(tmp_path)
    server = EtcdServer(
        tmp_path,
        *("--client-cert-auth", "--trusted-ca-file", str(made.ca)),
        *("--cert-file", str(made.server_cert), "--key-file", str(made.server_key)),
        scheme="https",
    )
    files = {"ca_file": str(made.ca), "cert_file": str(made.client_cert), "key_file": str(made.client_key)}
    try:
        server.start(wait=False)
        one = opened(server.url, **files)
        for _ in range(100):
            try:
                joined = await one.join(NODE, LEASE_S)
                break
            except CoordinationError:
                await asyncio.sleep(0.1)
        await until(one.watch(), lambda p: joined.id in p.members)
        for without in ("ca_file", "cert_file"):
            stranger = opened(server.url, **{k: v for k, v in files.items() if k != without})
            told = ""
            for _ in range(5):  # a busy machine may take too long to be refused
                with pytest.raises(CoordinationError) as caught:
                    await stranger.join(OTHER, LEASE_S)
                told = str(caught.value).lower()
                if "certificate" in told or "ssl" in told:
                    break
            assert "certificate" in told or "ssl" in told
    finally:
        server.kill()


async def test_an_endpoint_that_is_dead_is_passed_over(shared: EtcdServer, opened: Opened) -> None:
    one = opened(f"http://127.0.0.1:{free_port()}", shared.url)
    joined = await one.join(NODE, LEASE_S)
    await until(one.watch(), lambda p: joined.id in p.members)
    await joined.leave()


async def test_an_endpoint_that_says_nothing_costs_no_lease(shared: EtcdServer, opened: Opened) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    one = opened(url, shared.url)
    joined = await one.join(NODE, LEASE_S)
    lost = asyncio.ensure_future(joined.lost())
    await asyncio.sleep(LEASE_S * 2)
    assert not lost.done()
    await eventually(joined.may_send)
    await joined.leave()
    listener.close()
    await lost


async def test_an_etcd_that_was_stopped_for_longer_than_all_leases_makes_no_two_owners(
    etcd: EtcdServer, connect: Connect
) -> None:
    one, other = await connect(), await connect()
    former, taker = await one.join(NODE, LEASE_S), await other.join(OTHER, 12)
    await until(other.watch(), lambda p: len(p.members) == 2)
    etcd.freeze()
    await asyncio.sleep(LEASE_S + 2)
    etcd.thaw()
    # Alone it ends leases that are over by its clock as it wakes, or hears a renewal first: either will do.
    session = new_session()
    for _ in range(80):
        answer = None
        with contextlib.suppress(CoordinationError):
            answer = await taker.claim(session, Generation(2), former.id)
        if answer is not None and answer.verdict is Verdict.WON:
            assert not former.may_send()
            break
        await asyncio.sleep(0.1)
    else:
        assert former.may_send()


async def test_nothing_that_answers_is_said_in_words(opened: Opened) -> None:
    one = opened(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(CoordinationError, match="is it up, and reached from here"):
        await one.join(NODE, LEASE_S)


async def test_claims_of_owners_who_are_over_are_swept_a_while_later(shared: EtcdServer, opened: Opened) -> None:
    one = opened(shared.url, sweep_every_s=0.5, claim_kept_s=2.0)
    gone, taker = await one.join(NODE, LEASE_S), await one.join(replace(NODE, name="zz"), LEASE_S)
    await gone.leave()
    session, kept = new_session(), new_session()
    stays = await one.join(replace(NODE, name="a"), LEASE_S)
    await claimed(taker, session, 2, gone.id)
    await claimed(stays, kept, 2, gone.id)
    await taker.leave()
    await asyncio.sleep(1)
    assert await one.holder(session) is not None
    for _ in range(100):
        if await one.holder(session) is None:
            break
        await asyncio.sleep(0.1)
    assert await one.holder(session) is None
    assert await one.holder(kept) is not None
    await stays.leave()


@pytest.mark.parametrize("stopped", ["leader", "asked"])
async def test_a_cluster_of_which_one_is_stopped_goes_on_by_its_others(
    tmp_path: Path, stopped: str, opened: Opened
) -> None:
    peers = {name: f"http://127.0.0.1:{free_port()}" for name in ("x", "y", "z")}
    servers = [EtcdServer(tmp_path, name=name, peers=peers) for name in peers]
    try:
        for server in servers:
            server.start(wait=False)
        for server in servers:
            server.wait_ready()
        one = opened(*(s.url for s in servers), when_alone=WhenAlone.STOP)
        joined = await one.join(NODE, 12)
        pictures = one.watch()
        await until(pictures, lambda p: joined.id in p.members)
        # The watch goes on at the one that was asked, which then says nothing any more, of changes neither.
        victim = servers[0] if stopped == "asked" else next(s for s in servers if _leads(s))
        victim.freeze()
        joined.update(replace(NODE, readiness=Readiness.READY))
        await until(
            pictures, lambda p: joined.id in p.members and p.members[joined.id].record.readiness is Readiness.READY, 40
        )
        await eventually(joined.may_send)
        victim.thaw()
        await asyncio.sleep(3)
        await eventually(joined.may_send)
        await until(one.watch(), lambda p: p.stale_since_s is None and joined.id in p.members)
    finally:
        for server in servers:
            server.kill()


def _leads(server: EtcdServer) -> bool:
    said = ask(server.url, "maintenance/status", {})
    return bool(said["leader"] == said["header"]["member_id"])
