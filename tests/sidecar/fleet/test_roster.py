"""Who is over, and who is only gone: time is counted by who takes over, never told by the service."""

import math
from dataclasses import replace

import pytest

from midstream.session.errors import CoordinationError
from midstream.sidecar.fleet.lease_service import Entry, Renewals
from midstream.sidecar.fleet.record import Readiness, Record, Role, encode, member_id
from midstream.sidecar.fleet.roster import Roster

RECORD = Record("a", Role.NODE, "http://a")
A = member_id("a", 10, "a" * 16)
B = member_id("b", 20, "b" * 16)
STRANGER = member_id("stranger", 30, "c" * 16)
ENTRY = Entry(encode(RECORD), "1")
LEFT = Entry(encode(replace(RECORD, readiness=Readiness.LEFT)), "2")


def roster(renewals: Renewals = Renewals.UNSEEN, now_s: float = 100.0) -> Roster:
    made = Roster(renewals)
    made.whole(now_s, {A: ENTRY, B: ENTRY})
    return made


def test_a_member_whose_lease_the_service_ended_is_over_a_whole_lease_after_that_was_seen() -> None:
    made = roster()
    made.gone(150.0, A)
    assert made.members()[A].is_fading
    assert made.next_s() == 160.0
    made.tick(159.9)
    assert not made.is_over(159.9, A)
    made.tick(160.0)
    assert set(made.members()) == {B}
    assert made.is_over(160.0, A)
    assert not made.members()[B].is_fading


def test_where_renewals_are_seen_the_lease_is_counted_from_the_last() -> None:
    made = roster(Renewals.SEEN)
    made.put(105.0, A, Entry(ENTRY.text, "7"))
    assert made.silent(114.9) == []
    assert made.silent(115.0) == [(A, "7")]
    made.gone(108.0, A)  # an operator deleted it
    assert not made.is_over(114.9, A)
    assert made.is_over(115.0, A)
    made.gone(130.0, B)  # whoever was faster buried it
    assert set(made.members()) == {A}


def test_who_said_that_it_left_is_over_at_once() -> None:
    for renewals in Renewals:
        made = roster(renewals)
        made.put(101.0, A, LEFT)
        assert made.is_over(101.0, A)
        assert set(made.members()) == {B}
        made.gone(101.0, A)
        assert made.is_over(101.0, A)


def test_after_a_gap_every_lease_is_counted_anew() -> None:
    made = roster(Renewals.SEEN)
    made.whole(1000.0, {A: ENTRY})
    assert made.silent(1009.9) == []
    assert made.silent(1010.0) == [(A, "1")]
    assert not made.is_over(1019.9, B), "it can have been renewed in the gap, just before it vanished"
    assert made.is_over(1020.0, B)


def test_one_that_faded_before_a_gap_fades_on() -> None:
    made = roster()
    made.gone(105.0, A)
    made.whole(112.0, {B: ENTRY})
    assert made.is_over(115.0, A)


def test_of_a_member_that_was_never_heard_of_the_lease_is_counted_from_when_the_service_had_none() -> None:
    made = roster()
    assert not made.knows(STRANGER)
    assert not made.is_over(1e9, STRANGER), "its entry can be under way to here"
    made.absent(200.0, STRANGER)
    assert set(made.members()) == {A, B}
    assert not made.is_over(229.9, STRANGER)
    assert made.is_over(230.0, STRANGER)
    made.tick(230.0)
    assert made.is_over(230.0, STRANGER)
    made.absent(300.0, STRANGER)
    assert made.is_over(300.0, STRANGER)
    with pytest.raises(ValueError, match="expected <name>"):
        made.knows("stranger")  # type: ignore[arg-type]


def test_what_is_over_stays_over_through_a_gap() -> None:
    made = roster()
    made.gone(100.0, A)
    made.tick(110.0)
    assert made.is_over(110.0, A)


def test_a_record_that_cannot_be_read_is_no_reason_to_take_anything_from_its_member() -> None:
    for text in ("", "{}", encode(RECORD).replace('"v":1', '"v":2')):
        made = Roster(Renewals.UNSEEN)
        made.whole(0.0, {A: Entry(text)})
        assert made.members() == {}
        assert made.unreadable_count == 1
        assert not made.is_over(1e6, A)


def test_a_renewal_changes_nothing_that_is_shown() -> None:
    made = roster(Renewals.SEEN)
    before = made.version
    made.put(101.0, A, Entry(ENTRY.text, "8"))
    assert made.version == before
    made.put(102.0, A, Entry(encode(replace(RECORD, version="z")), "9"))
    assert made.version == before + 1


def test_who_turns_out_to_be_renewed_is_counted_from_there() -> None:
    made = roster(Renewals.SEEN)
    assert made.next_s() == 110.0
    made.is_alive(110.0, A)
    assert made.silent(119.0) == []
    assert made.silent(120.0) == [(A, "1"), (B, "1")]


def test_nothing_is_waited_for_where_nothing_can_end() -> None:
    assert roster().next_s() == math.inf


def test_members_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.sidecar.fleet.roster.MEMBERS_MAX", 2)
    made = roster()
    with pytest.raises(CoordinationError, match="more than 2 members"):
        made.put(101.0, STRANGER, ENTRY)
