"""Hosts of a fleet are lost without a word: their sessions go on elsewhere, exactly where a replica is, and in time."""

import asyncio
from collections.abc import Callable

import pytest

from support.host_fleet import Clients, HostFleet, bodies, told_of, with_replicas

pytestmark = [pytest.mark.engine, pytest.mark.service, pytest.mark.timeout(600)]

STREAMS = 6
TOKENS = 600
CUT = 120
EXACT = {"X-Midstream-Policy": "exact"}


async def test_a_host_that_is_lost_under_load_costs_a_pause_and_no_token(host_fleet: Callable[..., HostFleet]) -> None:
    fleet = host_fleet(of_each=with_replicas)
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))
    async with fleet.http() as http:
        await clients.undisturbed(http)
        answers = await clients.disturbed(http, lambda: lose(fleet), cut=CUT, headers=EXACT)
        clients.require_same(answers)
        told = told_of(answers)
        print(f"host lost, replicas, lease {fleet.lease_s} s: {told}")
        assert set(told.outcomes) == {"exact"}
        assert told.p99_s < fleet.lease_s + 1
        tiers = {outcome["tier"] for session in await fleet.sessions(http) for outcome in session["outcomes"]}
        assert tiers == {"replica"}


@pytest.mark.apart
async def test_a_lease_of_ten_seconds_is_waited_for_and_not_longer(host_fleet: Callable[..., HostFleet]) -> None:
    fleet = host_fleet(of_each=with_replicas, lease_s=10)
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))
    async with fleet.http() as http:
        await clients.undisturbed(http)
        answers = await clients.disturbed(http, lambda: lose(fleet), cut=CUT, headers=EXACT)
        clients.require_same(answers)
        told = told_of(answers)
        print(f"host lost, replicas, lease {fleet.lease_s} s: {told}")
        assert set(told.outcomes) == {"exact"}
        assert told.p99_s < fleet.lease_s + 1


@pytest.mark.apart
async def test_without_replicas_what_a_lost_host_had_is_computed_again(host_fleet: Callable[..., HostFleet]) -> None:
    fleet = host_fleet()
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))
    async with fleet.http() as http:
        await clients.undisturbed(http)
        answers = await clients.disturbed(http, lambda: lose(fleet), cut=CUT)
        clients.require_same(answers)
        told = told_of(answers)
        print(f"host lost, no replicas, lease {fleet.lease_s} s: {told}")
        assert set(told.outcomes) == {"recomputed"}
        assert told.p99_s < fleet.lease_s + 1


@pytest.mark.apart
async def test_a_node_whose_processes_are_killed_is_lost_at_once_for_its_host_says_so(
    host_fleet: Callable[..., HostFleet],
) -> None:
    fleet = host_fleet(of_each=with_replicas)
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))
    async with fleet.http() as http:
        await clients.undisturbed(http)
        answers = await clients.disturbed(http, lambda: lose(fleet, silently=False), cut=CUT, headers=EXACT)
        clients.require_same(answers)
        told = told_of(answers)
        print(f"node killed, replicas: {told}")
        assert set(told.outcomes) == {"exact"}
        # Connections break: no lease is waited for.
        assert told.p99_s < 1.5


async def lose(fleet: HostFleet, *, silently: bool = True) -> None:
    """The host that has most sessions; unless it is silent, its connections are closed."""
    host = fleet.nodes[await fleet.busiest()].host
    await asyncio.to_thread(host.destroy if silently else host.close)
