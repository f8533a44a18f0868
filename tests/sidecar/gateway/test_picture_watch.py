"""Nodes as the coordination service has them."""

import asyncio
from dataclasses import replace

from midstream.proxy.coordinator import Reason, SessionFacts
from midstream.session.ids import SessionId
from midstream.sidecar.fleet.coordination import Member, Picture
from midstream.sidecar.fleet.local import LocalCoordination
from midstream.sidecar.fleet.proof import SecretProver
from midstream.sidecar.fleet.record import Readiness, Record, Role, member_id
from midstream.sidecar.gateway.coordinator import GatewayCoordinator
from midstream.sidecar.gateway.picture_watch import PictureWatch
from midstream.sidecar.gateway.verdicts import Verdicts
from midstream.sidecar.metrics import Metrics
from support.storeys import SECRET

READY = Record("a", Role.NODE, "http://a:1/", readiness=Readiness.READY, slot_count=8)
S = SessionId("5" * 32)
FACTS = SessionFacts(S, "/v1/completions", {"prompt": "x"}, True)


def gateway() -> GatewayCoordinator:
    return GatewayCoordinator(Metrics(), Verdicts(SecretProver(SECRET)), takeover_timeout_s=1)


def states(coordinator: GatewayCoordinator) -> dict[str, str]:
    return {node.name: node.state for node in coordinator.nodes.all()}


def picture(*members: Member, stale_since_s: float | None = None) -> Picture:
    return Picture({m.id: m for m in members}, stale_since_s)


A = Member(member_id("a", 10, "a" * 16), READY)
A_AGAIN = Member(member_id("a", 10, "b" * 16), READY)


async def test_nodes_come_change_and_leave_as_the_service_says() -> None:
    fleet, coordinator = LocalCoordination(), gateway()
    following = asyncio.create_task(PictureWatch(fleet, coordinator.nodes).follow())

    async def seen(expected: dict[str, str]) -> None:
        async with asyncio.timeout(2):
            while states(coordinator) != expected:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    a = await fleet.join(replace(READY, readiness=Readiness.NOT_READY), 10)
    await fleet.join(Record("g", Role.GATEWAY, "http://g:1", readiness=Readiness.READY), 10)
    await seen({"a": "not-ready"})
    a.update(READY)
    await seen({"a": "ready"})
    placement = await coordinator.admit(FACTS)
    assert (placement.worker, placement.base_url) == (a.id, "http://a:1")
    await a.leave()
    await seen({})
    assert placement.interrupted.result() is Reason.NODE_LOST
    coordinator.ended(FACTS, "cancelled")
    await fleet.close()
    await asyncio.wait_for(following, 2)


async def test_a_member_whose_lease_fades_is_left_and_gets_nothing() -> None:
    coordinator = gateway()
    watch = PictureWatch(LocalCoordination(), coordinator.nodes)
    watch.take(picture(A))
    placement = await coordinator.admit(FACTS)
    watch.take(picture(replace(A, is_fading=True)))
    assert placement.interrupted.result() is Reason.NODE_LOST
    assert states(coordinator) == {"a": "lost"}
    watch.take(picture())
    assert states(coordinator) == {}
    coordinator.ended(FACTS, "cancelled")


async def test_while_the_service_is_silent_nobody_is_lost() -> None:
    coordinator = gateway()
    watch = PictureWatch(LocalCoordination(), coordinator.nodes)
    watch.take(picture(A))
    placement = await coordinator.admit(FACTS)
    watch.take(picture(A, stale_since_s=1.0))
    assert watch.is_stale
    assert not placement.interrupted.done()
    assert states(coordinator) == {"a": "ready"}
    coordinator.ended(FACTS, "cancelled")


async def test_another_life_of_a_node_does_not_have_the_sessions_of_the_one_before() -> None:
    coordinator = gateway()
    watch = PictureWatch(LocalCoordination(), coordinator.nodes)
    watch.take(picture(A))
    placement = await coordinator.admit(FACTS)
    watch.take(picture(A_AGAIN))
    assert placement.interrupted.result() is Reason.NODE_LOST
    following = await coordinator.take_over(FACTS, placement, Reason.NODE_LOST, (1, 2))
    assert following.worker == A_AGAIN.id
    assert [(node.id, node.open) for node in coordinator.nodes.all()] == [(A_AGAIN.id, 1)]
    coordinator.ended(FACTS, "finished")
    assert [node.open for node in coordinator.nodes.all()] == [0]


async def test_what_others_change_ends_no_suspicion() -> None:
    coordinator = gateway()
    watch = PictureWatch(LocalCoordination(), coordinator.nodes)
    watch.take(picture(A))
    coordinator.nodes.suspect(A.id, 100.0)
    watch.take(picture(A, Member(member_id("b", 10, "b" * 16), replace(READY, name="b"))))
    assert coordinator.nodes.suspects(100.1) == {A.id}
