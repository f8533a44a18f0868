"""Links of a fleet are cut and healed: whoever is cut off stops, others take over, and nobody's token is said twice."""

import asyncio
import time
from collections.abc import Callable

import aiohttp
import pytest

from midstream.proxy.upstream_socket import HEARD_S
from support.host_fleet import POLL_S, Clients, HostFleet, Node, bodies, told_of, with_replicas

pytestmark = [pytest.mark.engine, pytest.mark.service, pytest.mark.timeout(600)]

STREAMS = 6
TOKENS = 600
# As long as the model's context lets an answer be.
LONGEST = 1900
CUT = 120
SETTLED_S = 30.0


async def until_idle(fleet: HostFleet, http: aiohttp.ClientSession, node: Node) -> None:
    """Until a node has no session."""
    deadline_s = time.monotonic() + SETTLED_S
    while (await fleet.told(http, "/midstream/v1/status", url=node.url)).get("sessions_open") != 0:
        assert time.monotonic() < deadline_s, fleet.last_lines()
        await asyncio.sleep(POLL_S)


async def test_a_host_that_is_cut_off_is_taken_over_from_and_taken_back_when_it_is_healed(
    host_fleet: Callable[..., HostFleet],
) -> None:
    fleet = host_fleet(of_each=with_replicas)
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))
    cut: list[Node] = []

    async def cut_off() -> None:
        cut.append(fleet.nodes[await fleet.busiest()])
        cut[0].host.cut()

    async with fleet.http() as http:
        await clients.undisturbed(http)
        answers = await clients.disturbed(http, cut_off, cut=CUT)
        clients.require_same(answers)
        told = told_of(answers)
        print(f"host cut off, replicas, lease {fleet.lease_s} s: {told}")
        assert set(told.outcomes) == {"exact"}
        assert told.p99_s < fleet.lease_s + 1
        cut[0].host.heal()
        print(f"healed: in the fleet again after {await fleet.until_nodes(http, 2, limit_s=SETTLED_S):.2f} s")
        await until_idle(fleet, http, cut[0])
        again = await clients.disturbed(http, nothing, cut=1)
        clients.require_same(again)
        assert {session["name"] for session in (await fleet.sessions(http))[-STREAMS:]} == set(fleet.nodes)


@pytest.mark.parametrize("partial", [False, True], ids=["from_all", "from_the_service"])
@pytest.mark.apart
async def test_a_node_that_is_cut_off_has_stopped_before_anybody_takes_over(
    host_fleet: Callable[..., HostFleet], partial: bool
) -> None:
    fleet = host_fleet(of_each=with_replicas, settings={"fleet.when_alone": "stop"})
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))
    sent: list[Callable[[], list[float]]] = []
    cut_at: list[float] = []

    async def cut_off() -> None:
        node = fleet.nodes[await fleet.busiest()]
        sent.append(fleet.witness(node, bodies(1, LONGEST)[0]))
        while not sent[0]():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        if partial:
            node.host.cut_from(fleet.etcd_host)
        else:
            node.host.cut()
        cut_at.append(time.perf_counter())

    async with fleet.http() as http:
        await clients.undisturbed(http)
        answers = await clients.disturbed(http, cut_off, cut=CUT)
        clients.require_same(answers)
        assert told_of(answers).interrupted
        taken_over_s = fleet.said_at("event=resumed")
        last_s = max(at_s for at_s in sent[0]() if at_s < taken_over_s + fleet.lease_s)
        # It went on sending after it was cut off, and stopped before anybody else began.
        print(f"stopped {last_s - cut_at[0]:.2f} s after the cut, taken over {taken_over_s - cut_at[0]:.2f} s after it")
        assert cut_at[0] < last_s < taken_over_s


@pytest.mark.apart
async def test_a_node_that_is_cut_off_from_the_service_alone_is_taken_over_from(
    host_fleet: Callable[..., HostFleet],
) -> None:
    fleet = host_fleet(of_each=with_replicas, settings={"fleet.when_alone": "stop"})
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))

    async def cut_off() -> None:
        (fleet.nodes[await fleet.busiest()]).host.cut_from(fleet.etcd_host)

    async with fleet.http() as http:
        await clients.undisturbed(http)
        answers = await clients.disturbed(http, cut_off, cut=CUT)
        clients.require_same(answers)
        told = told_of(answers)
        print(f"node cut off from the service alone: {told}")
        assert set(told.outcomes) == {"exact"}


@pytest.mark.apart
async def test_a_node_that_is_cut_off_from_the_gateway_alone_is_given_up_for_its_silence(
    host_fleet: Callable[..., HostFleet],
) -> None:
    # Its lease is renewed, and an engine may be silent for long: what tells is that its host's kernel is silent, too.
    fleet = host_fleet(of_each=with_replicas)
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))
    cut: list[Node] = []

    async def cut_off() -> None:
        cut.append(fleet.nodes[await fleet.busiest()])
        cut[0].host.cut_from(fleet.gateway_host)

    async with fleet.http() as http:
        await clients.undisturbed(http)
        answers = await clients.disturbed(http, cut_off, cut=CUT)
        clients.require_same(answers)
        told = told_of(answers)
        print(f"node cut off from the gateway alone: {told}")
        assert set(told.outcomes) == {"exact"}
        assert told.p99_s < HEARD_S + 2
        cut[0].host.heal_from(fleet.gateway_host)
        await until_idle(fleet, http, cut[0])


@pytest.mark.apart
@pytest.mark.parametrize("when_alone", ["serve", "stop"])
async def test_a_service_that_is_away_for_a_minute_costs_no_session(
    host_fleet: Callable[..., HostFleet], when_alone: str
) -> None:
    fleet = host_fleet(of_each=with_replicas, settings={"fleet.when_alone": when_alone})
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))
    away_s = 60.0

    async def away() -> None:
        fleet.etcd_host.cut()
        await asyncio.sleep(away_s)
        fleet.etcd_host.heal()

    async with fleet.http() as http:
        await clients.undisturbed(http)
        began_s = time.monotonic()
        answers = await clients.disturbed(http, away, cut=CUT)
        clients.require_same(answers)
        assert all("outcome=undisturbed" in answer.report for answer in answers)
        print(
            f"service away for {away_s:g} s, {when_alone}: {STREAMS} streams undisturbed, longest silence "
            f"{max(answer.gap_s for answer in answers):.2f} s, all over after {time.monotonic() - began_s:.1f} s"
        )
        await fleet.until_nodes(http, 2, limit_s=SETTLED_S)


async def nothing() -> None:
    """Leave them alone."""
