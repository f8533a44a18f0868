"""Fleets in virtual time: whatever befalls service, network, processes and clocks, one owner of a session may send."""

import asyncio

import pytest

from midstream.sidecar.fleet import fence, roster
from midstream.sidecar.fleet.lease_service import Renewals
from support.sim_fleet import Counts, TwoOwners, World, play
from support.virtual_time import VirtualLoop


def run(seed: int, renewals: Renewals, for_s: float = 200.0) -> Counts:
    world = World(seed, renewals)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play(world, 5, for_s))
    return world.counts


@pytest.mark.parametrize("renewals", Renewals)
@pytest.mark.parametrize("seed", range(12))
def test_at_no_time_two_members_who_may_send_own_a_session(seed: int, renewals: Renewals) -> None:
    counts = run(seed, renewals)
    assert counts.won > 20, counts
    assert counts.taken > 20, counts
    assert counts.given > 2, counts
    assert counts.lost_leases > 5, counts
    assert counts.closed_fences > 100, counts


@pytest.mark.parametrize("renewals", Renewals)
def test_a_fence_that_stays_open_too_long_is_noticed(renewals: Renewals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "MARGIN", -1.5)
    assert_noticed(renewals)


def test_a_roster_that_believes_the_service_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if whoever has gone from the service could not send any more.
    monkeypatch.setattr(roster, "lease_s_of", lambda member: 0)
    assert_noticed(Renewals.UNSEEN)


def assert_noticed(renewals: Renewals) -> None:
    for seed in range(40):
        try:
            run(seed, renewals, 60.0)
        except TwoOwners:
            return
    raise AssertionError("the simulation finds nothing")
