"""Drains of a node: until when they wait, what cancels them, and what is told of them."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from midstream.proxy.coordinator import SessionFacts
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.sidecar.drain import phase
from midstream.sidecar.drain.node import NodeDrain
from midstream.sidecar.drain.order import Leaving, dearest_first, leaving_of, left_s
from midstream.sidecar.drain.phase import Drain, Phase
from midstream.sidecar.drain.room import HELD_S, Free, Rooms
from support.coordinating import Rig, S


def facts_of(session: str = S) -> SessionFacts:
    return SessionFacts(SessionId(session), "/v1/completions", {}, True)


def test_of_two_orders_the_nearer_deadline_holds_whichever_comes_first() -> None:
    far_first = phase.ordered(phase.ordered(Drain(), "operator", 100, 0), "SIGTERM", 30, 10)
    near_first = phase.ordered(phase.ordered(Drain(), "SIGTERM", 30, 10), "operator", 100, 10)
    assert far_first.deadline_s == near_first.deadline_s == 40
    assert far_first.reasons == ("operator", "SIGTERM")


def test_a_drain_is_over_when_nothing_is_left_or_its_time_has_passed() -> None:
    drain = phase.ordered(Drain(), "operator", 30, 0)
    assert phase.looked(drain, 2, 29.9).phase is Phase.DRAINING
    assert phase.looked(drain, 2, 30).phase is Phase.OVER
    assert phase.looked(drain, 0, 1).phase is Phase.OVER


def test_a_cancelled_drain_is_as_if_it_had_not_been_and_one_that_is_over_stays_so() -> None:
    drain = phase.looked(phase.ordered(Drain(), "operator", 30, 0), 3, 1)
    assert phase.cancelled(drain) == Drain(left=3)
    again = phase.ordered(phase.cancelled(drain), "SIGTERM", 100, 20)
    assert (again.reasons, again.deadline_s) == (("SIGTERM",), 120)
    over = phase.looked(drain, 0, 2)
    assert phase.cancelled(over) is over
    assert phase.ordered(over, "operator", 5, 3) is over


def test_an_order_that_is_taken_back_leaves_those_of_others() -> None:
    both = phase.ordered(phase.ordered(Drain(), "notice:aws", 30, 0), "operator", 100, 0)
    left = phase.withdrawn(both, "notice:aws")
    assert (left.phase, left.reasons, left.deadline_s) == (Phase.DRAINING, ("operator",), 100)
    assert phase.withdrawn(left, "notice:gcp") is left
    assert phase.withdrawn(left, "operator").phase is Phase.SERVING


def test_an_order_without_a_deadline_empties_and_leaves_the_end_to_others() -> None:
    drain = phase.ordered(Drain(), "notice:kubernetes", None, 0)
    assert phase.looked(drain, 0, 10**9).is_under_way
    assert "deadline_in_s" not in phase.told(drain, 0)
    assert phase.looked(phase.ordered(drain, "SIGTERM", 30, 5), 0, 6).phase is Phase.OVER


def test_who_orders_again_may_want_it_sooner_and_not_later() -> None:
    drain = phase.ordered(phase.ordered(Drain(), "operator", 30, 0), "operator", 100, 5)
    assert drain.deadline_s == 30
    assert phase.ordered(drain, "operator", 5, 10).deadline_s == 15


def test_the_dearest_leave_first_and_the_short_ones_not_at_all() -> None:
    sessions = [Leaving("a", 100, 10), Leaving("b", 900, 10, 1.5), Leaving("c", 500, 10, 60.0)]
    assert [one.session for one in dearest_first(sessions, 2.0)] == ["c", "a"]
    assert [one.session for one in dearest_first(sessions, 0.0)] == ["b", "c", "a"]


def test_a_session_is_short_only_where_its_request_and_its_pace_say_so() -> None:
    assert left_s(50, None, 10) is None
    assert left_s(3, 100, 1) is None
    assert left_s(50, 100, 10) == pytest.approx(10)
    assert left_s(100, 100, 10) == 0


def test_what_a_node_tells_of_its_sessions_is_read_back_or_refused() -> None:
    one = Leaving("a", 100, 10, 2.5, "k")
    assert leaving_of([one.told()]) == [one]
    for wrong in (None, {}, [1], [{"session": "a"}], [{**one.told(), "positions": "many"}]):
        with pytest.raises(ValueError, match="sessions"):
            leaving_of(wrong)


def test_no_more_is_promised_than_is_free() -> None:
    rooms, free = Rooms(), [Free("k", 2, 1000), Free("other", 9, 9000)]
    rooms.hold("a", 600, {"k"}, free, 0)
    with pytest.raises(Refused, match="400 positions") as refused:
        rooms.hold("b", 600, {"k"}, free, 1)
    assert refused.value.reason == "no_room"
    rooms.hold("b", 400, {"k"}, free, 1)
    with pytest.raises(Refused, match="0 places"):
        rooms.hold("c", 1, {"k"}, free, 1)


def test_a_promise_ends_in_time_or_when_it_is_given_back_and_is_one_however_often_it_is_asked_for() -> None:
    rooms, free = Rooms(), [Free("k", 1, None)]
    for _ in range(3):
        rooms.hold("a", 600, {"k"}, free, 0)
    assert rooms.count(0) == 1
    rooms.release("a")
    rooms.hold("b", 600, {"k"}, free, 1)
    with pytest.raises(Refused, match="0 places"):
        rooms.hold("a", 600, {"k"}, free, 1)
    rooms.hold("a", 600, {"k"}, free, 1 + HELD_S)


def test_a_session_that_has_come_is_counted_once() -> None:
    rooms = Rooms()
    rooms.hold("a", 600, {"k"}, [Free("k", 2, 2000)], 0)
    rooms.arrived({"a", "z"})
    rooms.hold("b", 600, {"k"}, [Free("k", 1, 1400)], 1)
    assert rooms.count(1) == 1


def test_a_node_without_a_worker_of_the_key_promises_nothing() -> None:
    with pytest.raises(Refused) as refused:
        Rooms().hold("a", 1, {"k"}, [Free("other", 9, 9000)], 0)
    assert refused.value.reason == "no_key"


async def test_nothing_new_is_taken_while_a_node_drains_and_everything_again_after_a_cancel(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.start("a")
    drain = NodeDrain(rig.coordinator)
    over = asyncio.create_task(drain.over())
    running = await rig.coordinator.admit(facts_of())
    drain.order("operator", 60)
    with pytest.raises(Refused, match="draining"):
        await rig.coordinator.admit(facts_of("6" * 32))
    assert (drain.told()["phase"], drain.told()["sessions_left"]) == ("draining", 1)
    assert drain.cancel()
    assert not drain.cancel()
    other = facts_of("6" * 32)
    await rig.coordinator.admit(other)
    assert not over.done()
    drain.order("SIGTERM", 60)
    rig.coordinator.ended(facts_of(), "finished")
    await asyncio.sleep(0.05)
    assert not over.done()
    rig.coordinator.ended(other, "finished")
    await asyncio.wait_for(over, 2)
    assert running.worker == "a"


async def test_a_drain_ends_at_its_deadline_whatever_is_left(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.start("a")
    await rig.coordinator.admit(facts_of())
    drain = NodeDrain(rig.coordinator)
    over = asyncio.create_task(drain.over())
    drain.order("operator", 60)
    await asyncio.sleep(0.01)
    drain.order("SIGTERM", 0.05)
    await asyncio.wait_for(over, 2)
    assert drain.told() == {**drain.told(), "phase": "over", "sessions_left": 1, "reasons": ["operator", "SIGTERM"]}


async def test_an_empty_node_stays_for_a_session_whose_next_node_might_not_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.sidecar.coordinator.GIVEN_S", 0.5)
    rig = Rig(tmp_path, stores=True)
    rig.start("a")
    await rig.coordinator.admit(facts_of())
    drain = NodeDrain(rig.coordinator)
    over = asyncio.create_task(drain.over())
    drain.order("SIGTERM", 60)
    rig.coordinator.lend(S, 60)
    rig.coordinator.ended(facts_of(), "cancelled")
    await asyncio.sleep(0.2)
    assert not over.done()
    await rig.coordinator.take_in(facts_of(), (1, 2))
    await asyncio.sleep(0.6)
    assert not over.done()
    rig.coordinator.ended(facts_of(), "finished")
    await asyncio.wait_for(over, 2)


async def test_a_session_that_was_given_away_may_come_back_to_a_node_that_takes_nothing_else(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stores=True)
    rig.start("a")
    facts = facts_of()
    await rig.coordinator.admit(facts)
    rig.coordinator.draining = True
    rig.coordinator.lend(S, 60)
    rig.coordinator.ended(facts, "cancelled")
    await asyncio.sleep(0)
    assert rig.mover.finished == []
    with pytest.raises(Refused, match="draining"):
        await rig.coordinator.take_in(facts_of("6" * 32), (1, 2))
    assert (await rig.coordinator.take_in(facts, (1, 2))).worker == "a"


async def test_the_end_of_a_session_that_came_from_elsewhere_is_told_to_who_keeps_what_was_brought(
    tmp_path: Path,
) -> None:
    told: list[str] = []

    async def over(session: str) -> None:
        told.append(session)

    rig = Rig(tmp_path)
    rig.start("a")
    rig.coordinator._brought_over = over
    own, guest = facts_of("6" * 32), replace(facts_of(), generation=4096)
    await rig.coordinator.admit(own)
    await rig.coordinator.take_in(guest, (1, 2))
    for facts in (own, guest):
        rig.coordinator.ended(facts, "finished")
    await asyncio.sleep(0.02)
    assert told == [S]
