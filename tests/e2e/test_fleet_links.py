"""Links of a fleet are slow, long and lose packets: what was brought elsewhere is exact, the rest is computed again."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from support import mooncakes
from support.host_fleet import MOONCAKE_PORT, Clients, HostFleet, bodies, told_of, with_replicas
from support.host_wire import Link

pytestmark = [pytest.mark.engine, pytest.mark.service, pytest.mark.apart, pytest.mark.timeout(600)]

STREAMS = 4
TOKENS = 600
CUT = 200
POOR = Link(bytes_per_s=2.5e6, delay_s=0.02, loss=0.01)
# So little that no snapshot gets through in time.
HOPELESS = Link(bytes_per_s=60e3, delay_s=0.1, loss=0.02)
LENT_BYTES = 256 << 20


async def test_over_a_slow_and_lossy_link_sessions_are_brought_elsewhere_and_go_on_exactly(
    host_fleet: Callable[..., HostFleet],
) -> None:
    fleet = host_fleet(of_each=with_replicas, links={0: POOR, 1: POOR})
    await lose_one(fleet, f"peers over {POOR}", {"exact"})


async def test_a_link_that_carries_no_snapshot_costs_the_kv_and_no_token(host_fleet: Callable[..., HostFleet]) -> None:
    fleet = host_fleet(of_each=with_replicas, links={0: Link(), 1: Link()})

    def worse() -> None:
        for node in fleet.nodes.values():
            node.host.change_link(HOPELESS)

    await lose_one(fleet, f"peers over {HOPELESS}", {"exact", "recomputed"}, before=worse)


async def test_what_is_in_mooncake_outlives_the_host_that_wrote_it(host_fleet: Callable[..., HostFleet]) -> None:
    await in_mooncake(host_fleet, None, {"exact"})


async def test_over_a_slow_and_lossy_link_to_mooncake_no_token_is_lost(
    host_fleet: Callable[..., HostFleet],
) -> None:
    # Each call there and back takes as long as a token or two: what is not through in time is computed again.
    await in_mooncake(host_fleet, POOR, {"exact", "recomputed"})


async def in_mooncake(host_fleet: Callable[..., HostFleet], link: Link | None, allowed: set[str]) -> None:
    """A fleet whose replicas are in a Mooncake on a host of its own, at the end of this link."""
    if mooncakes.python() is None:
        pytest.skip(f"{mooncakes.VARIABLE} names no Mooncake; `make test-fleet` sets it")
    fleet = host_fleet(of_each=to_mooncake, nodes=2, others={"mooncake": link})
    fleet.start_mooncake("mooncake", LENT_BYTES)
    await lose_one(fleet, f"Mooncake over {link or 'a fast link'}", allowed)


def to_mooncake(index: int, addresses: Sequence[str], others: Mapping[str, str]) -> dict[str, object]:
    """Settings of nodes that keep their replicas there."""
    return {
        "replicas.to": f"mooncake://{others['mooncake']}:{MOONCAKE_PORT}?host={addresses[index]}",
        "replicas.mooncake_python": str(mooncakes.python()),
        "store.snapshot_every_s": 0.05,
        "store.tail_every_tokens": 8,
    }


async def lose_one(
    fleet: HostFleet, what: str, allowed: set[str], *, before: Callable[[], None] = lambda: None
) -> None:
    """The busiest host is lost under load, and what it had comes to one of these."""
    await fleet.start()
    clients = Clients(fleet, bodies(STREAMS, TOKENS))

    async def lose() -> None:
        name = await fleet.busiest()
        await asyncio.to_thread(fleet.nodes[name].host.destroy)

    async with fleet.http() as http:
        await clients.undisturbed(http)
        before()
        answers = await clients.disturbed(http, lose, cut=CUT)
        clients.require_same(answers)
        told = told_of(answers)
        print(f"{what}: {told}")
        assert set(told.outcomes) <= allowed
        for session in await fleet.sessions(http):
            for outcome in session["outcomes"]:
                assert (outcome["tier"] == "replica") == (outcome["outcome"] == "exact"), outcome
