"""Hosts of a fleet are emptied under load: each session goes on elsewhere exactly, or ends where it is."""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence

import pytest

from support.host_fleet import Clients, HostFleet, Node, bodies, keeping, told_of

pytestmark = [pytest.mark.engine, pytest.mark.service, pytest.mark.apart, pytest.mark.timeout(600)]

STREAMS = 6
TOKENS = 1200
CUT = 120
DEADLINE_S = 60
EXACT = {"X-Midstream-Policy": "exact"}
# A planned move has nothing to find out and waits for no lease.
PAUSE_S = 1.0


def draining(index: int, addresses: Sequence[str], others: Mapping[str, str]) -> dict[str, object]:
    """Nodes that take what others bring, and bring nothing by themselves; they have a minute to empty."""
    return {**keeping(index, addresses, others), "supervise.stop_timeout_s": DEADLINE_S}


async def test_a_drain_under_load_moves_what_is_there_and_the_node_ends(host_fleet: Callable[..., HostFleet]) -> None:
    fleet = host_fleet(of_each=draining)
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))
    ending: list[asyncio.Task[int]] = []

    async def drain() -> None:
        ending.append(end(fleet.nodes[await fleet.busiest()]))

    async with fleet.http() as http:
        await clients.undisturbed(http)
        answers = await clients.disturbed(http, drain, cut=CUT, headers=EXACT)
        clients.require_same(answers)
        told = told_of(answers)
        print(f"drain under load: {told}")
        assert set(told.outcomes) == {"exact"}
        assert told.p99_s < PAUSE_S
        assert await ending[0] == 0


async def test_two_drains_at_once_leave_everything_to_the_third(host_fleet: Callable[..., HostFleet]) -> None:
    fleet = host_fleet(of_each=draining, nodes=3)
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))
    ending: list[asyncio.Task[int]] = []

    async def drain() -> None:
        async with fleet.http() as http:
            at = await fleet.by_node(http)
        for name in sorted(at, key=lambda name: at[name])[-2:]:
            ending.append(end(fleet.nodes[name]))

    async with fleet.http() as http:
        await clients.undisturbed(http)
        answers = await clients.disturbed(http, drain, cut=CUT, headers=EXACT)
        clients.require_same(answers)
        told = told_of(answers)
        print(f"two drains at once: {told}")
        assert set(told.outcomes) == {"exact"}
        assert await asyncio.gather(*ending) == [0, 0]
        assert await fleet.until_nodes(http, 1, limit_s=10) < 10


async def test_what_finds_no_room_elsewhere_ends_where_it_is(host_fleet: Callable[..., HostFleet]) -> None:
    def small(index: int, addresses: Sequence[str], others: Mapping[str, str]) -> dict[str, object]:
        return {**draining(index, addresses, others), **({"arena.slot_count": 2} if index else {})}

    fleet = host_fleet(of_each=small)
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))
    ending: list[asyncio.Task[int]] = []
    there: list[int] = []

    async def drain() -> None:
        async with fleet.http() as http:
            there.append((await fleet.by_node(http))["node-0"])
        ending.append(end(fleet.nodes["node-0"]))

    async with fleet.http() as http:
        await clients.undisturbed(http)
        answers = await clients.disturbed(http, drain, cut=CUT, headers=EXACT)
        clients.require_same(answers)
        stayed = sum(session["name"] == "node-0" for session in (await fleet.sessions(http))[-STREAMS:])
        # Whoever ends at the target makes room for one more.
        print(f"drain, the target has room for two: of {there[0]} sessions {there[0] - stayed} moved, {stayed} stayed")
        assert there[0] > 2
        assert 0 < stayed < there[0]
        assert await ending[0] == 0


def end(node: Node) -> "asyncio.Task[int]":
    """SIGTERM to a node; its exit status."""
    assert node.process is not None
    node.host.signal(node.process, signal.SIGTERM)
    return asyncio.create_task(asyncio.to_thread(node.process.wait, DEADLINE_S + 30))
