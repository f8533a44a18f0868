"""A member that joins again when its lease is lost."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from contracts.coordination_suite import LEASE_S, NODE, eventually, until

from midstream.sidecar.fleet.coordination import Membership
from midstream.sidecar.fleet.fence import WhenAlone
from midstream.sidecar.fleet.kubernetes import KubernetesService
from midstream.sidecar.fleet.kubernetes_access import Credential, KubernetesAccess
from midstream.sidecar.fleet.leased import LeasedCoordination
from midstream.sidecar.fleet.presence import Presence
from midstream.sidecar.fleet.record import MemberId, Readiness
from support.lease_api_server import LeaseApiServer

pytestmark = pytest.mark.service


@pytest_asyncio.fixture
async def server() -> AsyncIterator[LeaseApiServer]:
    async with LeaseApiServer().running() as server:
        yield server


@pytest_asyncio.fixture
async def fleet(server: LeaseApiServer) -> AsyncIterator[LeasedCoordination]:
    access = KubernetesAccess(server.url, "models", True, Credential("good"))
    made = LeasedCoordination(KubernetesService(access, "fleet"), WhenAlone.STOP)
    yield made
    await made.close()


async def test_it_says_what_it_was_and_keeps_what_it_said_of_itself(
    server: LeaseApiServer, fleet: LeasedCoordination
) -> None:
    told: list[tuple[Membership, MemberId]] = []

    async def rejoined(membership: Membership, former: MemberId) -> None:
        told.append((membership, former))
        raise RuntimeError("whoever is told has troubles of its own")

    presence = await Presence.enter(fleet, NODE, LEASE_S, rejoined)
    first = presence.membership.id
    presence.update(replace(NODE, readiness=Readiness.READY))
    await until(fleet.watch(), lambda p: first in p.members and p.members[first].record.readiness is Readiness.READY)
    await server.remove(f"fleet.member.{first}")
    await eventually(lambda: bool(told))
    [(membership, former)] = told
    assert (former, membership) == (first, presence.membership)
    assert presence.membership.may_send()
    [*_, last] = await until(fleet.watch(), lambda p: membership.id in p.members)
    assert last.members[membership.id].record == replace(NODE, readiness=Readiness.READY, formerly=first)
    # And again, whatever came of it the first time.
    await server.remove(f"fleet.member.{membership.id}")
    await eventually(lambda: len(told) == 2)
    await presence.close()
    assert not presence.membership.may_send()
    assert not any(name.startswith("fleet.member.") for name in server.objects)


async def test_it_tries_until_the_service_takes_it(server: LeaseApiServer, fleet: LeasedCoordination) -> None:
    async def rejoined(membership: Membership, former: MemberId) -> None:
        pass

    presence = await Presence.enter(fleet, NODE, LEASE_S, rejoined)
    first = presence.membership.id
    server.tokens = set()
    await server.remove(f"fleet.member.{first}")
    server.tokens = {"good"}
    server.throttle(6)
    await eventually(lambda: presence.membership.id != first and presence.membership.may_send(), 20)
    await presence.close()


async def test_it_can_be_closed_while_it_cannot_join(server: LeaseApiServer, fleet: LeasedCoordination) -> None:
    async def rejoined(membership: Membership, former: MemberId) -> None:
        raise AssertionError("nobody joined")

    presence = await Presence.enter(fleet, NODE, LEASE_S, rejoined)
    await server.remove(f"fleet.member.{presence.membership.id}")
    await asyncio.wait_for(presence.membership.lost(), LEASE_S)
    server.tokens = set()
    await asyncio.wait_for(presence.close(), 10)
    assert not presence.membership.may_send()
