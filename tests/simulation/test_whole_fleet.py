"""Whole fleets in virtual time: whatever befalls nodes, links, disks, clocks and services, clients get their answers.

Real gateways, nodes, sessions, leases and fences; see `simulation/fleet`. `make sim` plays thousands of schedules.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from simulation.fleet.growth import measured, told
from simulation.fleet.plants import PLANTS
from simulation.fleet.plot import picture
from simulation.fleet.schedule import Coordinating, Kind, small
from simulation.fleet.shrink import kind_of, shrunk
from simulation.fleet.world import play

SCHEDULES = 40
AT_ONCE = 10
# Within so many schedules each planted defect is found.
FOUND_WITHIN = 40


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, SCHEDULES, AT_ONCE))
def test_no_schedule_breaks_a_promise(first: int) -> None:
    told: Counter[str] = Counter()
    for seed in range(first, first + AT_ONCE):
        told += play(small(seed)).counts
    # A simulation in which nothing happens proves nothing.
    assert sum(told[kind] for kind in Kind) > 6 * AT_ONCE
    assert told["client whole"] > 10 * AT_ONCE
    assert told["takeovers"] > 2 * AT_ONCE
    assert told["outcome exact"] > 0
    assert told["outcome recomputed"] > 0


def test_everything_that_may_befall_a_fleet_does() -> None:
    drawn = Counter(failure.kind for seed in range(SCHEDULES) for failure in small(seed).failures)
    assert set(drawn) == set(Kind)


def test_a_seed_is_one_story() -> None:
    assert play(small(3)).digest() == play(small(3)).digest()


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    plant = PLANTS[name]
    found = []
    for seed in range(plant.near, plant.near + FOUND_WITHIN):
        with plant.plant():
            try:
                play(small(seed))
            except Exception as error:
                found.append(kind_of(error))
                break
    assert found, "the simulation finds nothing"
    assert found[0] in plant.finds


def test_what_a_node_asks_of_the_service_does_not_grow_with_the_fleet() -> None:
    few, many = (measured(0, nodes, 6 * nodes, 0.5, Coordinating.ETCD) for nodes in (3, 12))
    assert 0.3 < few.node_requests_each_s < 1.0, "renewals, and a look whether the service answers"
    assert many.node_requests_each_s < 1.3 * few.node_requests_each_s
    assert many.open_max > 60
    assert many.ends is not None
    assert many.ends["whole"] >= 65
    drawn = picture([json.loads(told(figures)) for figures in (few, many)])
    assert drawn.count("<polyline") == 8
    assert ">12</text>" in drawn


def test_a_failing_schedule_is_made_smaller() -> None:
    # As if it took these two failures, and no others.
    schedule = small(4)
    wanted = {schedule.failures[1], schedule.failures[-1]}
    least = shrunk(schedule, lambda tried: "broken" if wanted <= set(tried.failures) else "")
    assert set(least.failures) == wanted
    assert least.asked == schedule.asked
