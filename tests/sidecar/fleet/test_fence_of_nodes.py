"""Real nodes with leases at a real etcd: what clients get when a node or etcd stops, or the network between is cut."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from midstream.session.ids import Generation, SessionId
from midstream.sidecar.config import Fleet
from midstream.sidecar.fleet.coordination import Verdict
from midstream.sidecar.fleet.fence import MARGIN
from midstream.sidecar.fleet.opening import open_coordination
from midstream.sidecar.fleet.record import Record, Role
from support.etcd_server import binary
from support.leased_nodes import LEASE_S, LeasedFleet, Stream
from support.peers import Wire, wire_to

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(binary() is None, reason="MIDSTREAM_TEST_ETCD names no etcd"),
    pytest.mark.timeout(120),
]

TOKENS, GAP_S = 400, 0.02
LONG = {"max_tokens": TOKENS, "bench_gap_s": GAP_S}
# A busy machine writes and reads a little later than it wanted to.
SLACK_S = 1.0


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LeasedFleet, Wire]]:
    fleet = LeasedFleet(tmp_path_factory.mktemp("fence"))
    try:
        with wire_to(urlsplit(fleet.etcd.url).port or 0) as wire:
            fleet.node("stops", {"fleet.when_alone": "stop", "proxy.keepalive_s": 1})
            fleet.node("serves", {"fleet.when_alone": "serve"})
            fleet.node(
                "apart", {"fleet.when_alone": "stop", "proxy.keepalive_s": 1}, etcd=f"http://127.0.0.1:{wire.port}"
            )
            fleet.listening("stops", "serves", "apart")
            yield fleet, wire
    finally:
        fleet.stop()


@pytest_asyncio.fixture
async def fleet(started: tuple[LeasedFleet, Wire]) -> AsyncIterator[tuple[LeasedFleet, Wire, aiohttp.ClientSession]]:
    nodes, wire = started
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as http:
        for name in ("stops", "serves", "apart"):
            await nodes.serving(http, name)
            async with asyncio.timeout(20):
                while "joined as member=" not in nodes.log(name):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        yield nodes, wire, http


async def under_way(nodes: LeasedFleet, http: aiohttp.ClientSession, name: str) -> tuple[Stream, "asyncio.Task[None]"]:
    """A stream that has begun, and its reading."""
    got = Stream()
    reading = asyncio.create_task(nodes.read(http, name, got, **LONG))
    async with asyncio.timeout(20):
        while got.token_count < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return got, reading


async def test_a_node_that_was_stopped_for_longer_than_its_lease_sends_nothing_before_its_fence_is_open_again(
    fleet: tuple[LeasedFleet, Wire, aiohttp.ClientSession],
) -> None:
    nodes, _, http = fleet
    got, reading = await under_way(nodes, http, "stops")
    nodes.signal("stops", signal.SIGSTOP)
    # Longer than any lease of its own can last, at etcd too. And etcd does not say anything when it wakes.
    await asyncio.sleep(2.5 * LEASE_S)
    nodes.etcd.freeze()
    had, woke_s = got.token_count, time.monotonic()
    nodes.signal("stops", signal.SIGCONT)
    await asyncio.sleep(2)
    assert got.token_count == had < TOKENS
    thawed_s = time.monotonic()
    nodes.etcd.thaw()
    await asyncio.wait_for(reading, 40)
    # It is another member now, and has claimed what was its own.
    assert [at_s for at_s in got.tokens_s() if woke_s < at_s < thawed_s] == []
    assert (got.ended, got.token_count) == (True, TOKENS)
    assert "event=fleet_joined_again" in nodes.log("stops")


async def test_what_another_has_taken_up_meanwhile_is_broken_off(
    fleet: tuple[LeasedFleet, Wire, aiohttp.ClientSession],
) -> None:
    nodes, _, http = fleet
    got, reading = await under_way(nodes, http, "stops")
    async with http.get(f"{nodes.urls['stops']}/midstream/v1/sessions") as answer:
        session = SessionId((await answer.json())["sessions"][-1]["session"])
    taker = open_coordination(Fleet(coordination="etcd", etcd_endpoints=nodes.etcd.url))
    try:
        joined = await taker.join(Record("taker", Role.GATEWAY, "http://127.0.0.1:1"), LEASE_S)
        [once] = [id for id in (await anext(taker.watch())).members if id.startswith("stops.")]
        nodes.signal("stops", signal.SIGSTOP)
        async with asyncio.timeout(20):
            while (await joined.claim(session, Generation(2), once)).verdict is not Verdict.WON:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        had = got.token_count
        nodes.signal("stops", signal.SIGCONT)
        await asyncio.wait_for(reading, 20)
    finally:
        await taker.close()
    assert (got.broken, got.ended, got.token_count) == (True, False, had)


async def test_while_etcd_is_silent_one_that_serves_goes_on_and_one_that_stops_waits_and_then_goes_on(
    fleet: tuple[LeasedFleet, Wire, aiohttp.ClientSession],
) -> None:
    nodes, _, http = fleet
    (stopping, one), (serving, other) = await asyncio.gather(
        under_way(nodes, http, "stops"), under_way(nodes, http, "serves")
    )
    nodes.etcd.freeze()
    frozen_s = time.monotonic()
    try:
        await asyncio.sleep(2 * LEASE_S)
        refused = await nodes.stream(http, "stops", max_tokens=1)
        assert (refused.status, b"no_lease" in refused.raw) == (503, True)
        assert (await nodes.stream(http, "serves", max_tokens=1)).token_count == 1
    finally:
        thawed_s = time.monotonic()
        nodes.etcd.thaw()
    await asyncio.wait_for(asyncio.gather(one, other), 60)
    assert serving.ended
    assert serving.longest_gap_s() < 1 + SLACK_S
    assert stopping.ended
    assert stopping.token_count == serving.token_count == TOKENS
    closed_s = frozen_s + LEASE_S * (1 - MARGIN) + SLACK_S
    assert [at_s for at_s in stopping.tokens_s() if closed_s < at_s < thawed_s] == []
    assert b": waiting\n\n" in stopping.raw
    assert b": waiting\n\n" not in serving.raw


async def test_a_node_that_is_cut_off_stops_before_its_lease_is_over_and_goes_on_with_what_nobody_took(
    fleet: tuple[LeasedFleet, Wire, aiohttp.ClientSession],
) -> None:
    nodes, wire, http = fleet
    got, reading = await under_way(nodes, http, "apart")
    wire.bytes_per_s = 0.0
    cut_s = time.monotonic()
    try:
        await asyncio.sleep(3 * LEASE_S)
        assert not reading.done()
    finally:
        back_s = time.monotonic()
        wire.bytes_per_s = None
    await asyncio.wait_for(reading, 60)
    closed_s = cut_s + LEASE_S * (1 - MARGIN) + SLACK_S
    assert [at_s for at_s in got.tokens_s() if closed_s < at_s < back_s] == []
    assert (got.ended, got.token_count) == (True, TOKENS)
