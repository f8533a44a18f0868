"""Who is sent next, how much of the network that takes, and what is still missing: pure."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.session.disk_store import Head
from midstream.session.ids import SessionId
from midstream.sidecar.replicas.backlog import Backlog, Shape
from midstream.sidecar.replicas.budget import BURST_S, Account
from midstream.sidecar.replicas.urgency import WAIT_DOUBLES_S, Behind, cost, most_urgent, urgency

A, B = SessionId("a" * 32), SessionId("b" * 32)
BYTES = 1000


def behind(session: str = "x", *, prompt: int = 100, kv_len: int = 200, covered: int = 0, **changes: float) -> Behind:
    facts = Behind(session, prompt, kv_len, covered, (kv_len - covered) * BYTES, 1000.0, 0.0)
    return replace(facts, **changes)  # type: ignore[arg-type]


def chosen(*candidates: Behind) -> str:
    found = most_urgent(list(candidates))
    assert found is not None
    return found.session


def test_outputs_are_dearer_than_a_prompt_of_as_many_bytes() -> None:
    assert chosen(behind("prompt", prompt=190), behind("outputs", prompt=10)) == "outputs"
    assert chosen(behind("new", prompt=190), behind("tail", prompt=190, covered=190)) == "tail"


def test_of_equal_kinds_the_longer_is_dearer_per_byte() -> None:
    assert chosen(behind("short", kv_len=2000, prompt=1000), behind("long", kv_len=40_000, prompt=20_000)) == "long"


def test_what_is_there_already_makes_the_rest_more_urgent_than_all_of_it() -> None:
    half = behind("half", prompt=100, kv_len=1000, covered=900)
    assert urgency(half) > urgency(behind("all", prompt=100, kv_len=1000))


def test_of_equals_the_newest_goes_first() -> None:
    assert chosen(behind("old"), behind("new", created_at=2000.0)) == "new"
    assert chosen(behind("new", created_at=2000.0), behind("old")) == "new"


def test_nobody_waits_for_ever() -> None:
    cheap = behind("cheap", prompt=199)
    for waited_s in (0.0, 10.0, 100.0, 1000.0):
        if chosen(behind("tail", prompt=100, covered=190), replace(cheap, waited_s=waited_s)) == "cheap":
            break
    assert 10.0 < waited_s <= 1000.0
    assert urgency(replace(cheap, waited_s=WAIT_DOUBLES_S)) == pytest.approx(2 * urgency(cheap))


def test_nobody_is_nobody() -> None:
    assert most_urgent([]) is None


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 5000))
def test_costs_of_two_parts_are_the_cost_of_both(prompt: int, first: int, one: int, two: int) -> None:
    whole = cost(prompt, first, first + one + two)
    parts = cost(prompt, first, first + one) + cost(prompt, first + one, first + one + two)
    assert whole == pytest.approx(parts)
    assert cost(prompt, first, first) == 0


@given(st.integers(1000, 10**9), st.lists(st.tuples(st.integers(1, 10**8), st.floats(0, 5)), min_size=1, max_size=50))
def test_a_budget_is_never_exceeded(bytes_per_s: int, sends: list[tuple[int, float]]) -> None:
    account, now_s = Account(bytes_per_s), 100.0
    begun: list[tuple[float, int]] = []
    for size, pause_s in sends:
        now_s += pause_s
        begun.append((now_s + account.reserve(size, now_s), size))
    for index, (from_s, _) in enumerate(begun):
        total = 0
        for at_s, size in begun[index:]:
            # All but the one that begins just now.
            assert total <= bytes_per_s * (at_s - from_s + BURST_S) * 1.000001 + begun[index][1] + 1
            total += size


def test_a_budget_that_nobody_used_is_no_credit() -> None:
    account = Account(1000)
    assert account.reserve(500, 0.0) == 0
    assert account.reserve(5000, 10_000.0) == 0
    assert account.reserve(1, 10_000.0) == pytest.approx(5.0 - BURST_S)


def head(session: SessionId = A, kv_len: int = 100, generation: int = 1, *, finished: bool = False) -> Head:
    return Head(session, f"{generation:010d}-{kv_len:010d}-{0:017d}", generation, kv_len, 1000.0, finished)


SHAPES = {A: Shape(10, 16, 1600), B: Shape(10, 16, 1600)}


def test_a_session_is_behind_from_when_it_was_seen_until_it_is_there() -> None:
    backlog = Backlog()
    backlog.see([head()], 5.0)
    assert backlog.lag_of_each(7.0) == {A: (100, 2.0)}
    backlog.see([head(kv_len=120)], 8.0)
    lag = backlog.lag(10.0)
    assert (lag.sessions, lag.tokens, lag.tokens_max, lag.seconds_max) == (1, 120, 120, 5.0)
    backlog.published(A, 1, 100, 11.0)
    # What came meanwhile is behind since now, as nobody could have sent it before.
    assert backlog.lag_of_each(12.0) == {A: (20, 1.0)}
    backlog.published(A, 1, 120, 13.0)
    assert backlog.lag(14.0).sessions == 0
    assert backlog.behind(SHAPES, 14.0) == []


def test_of_a_new_generation_everything_is_missing_until_it_was_published() -> None:
    backlog = Backlog()
    backlog.see([head()], 1.0)
    backlog.published(A, 1, 100, 2.0)
    backlog.see([head(generation=2, kv_len=90)], 3.0)
    assert backlog.lag_of_each(3.0) == {A: (90, 0.0)}
    # An older owner's that is said late changes nothing.
    backlog.published(A, 2, 90, 4.0)
    backlog.published(A, 1, 500, 5.0)
    assert backlog.lag(5.0).sessions == 0


def test_what_is_over_or_gone_is_not_behind_and_is_told_once() -> None:
    backlog = Backlog()
    backlog.see([head(), head(B)], 1.0)
    backlog.see([head(finished=True)], 2.0)
    assert backlog.lag(2.0).sessions == 0
    assert [over.session for over in backlog.over(2.0)] == [A]
    # The store had trouble with it: it is told later.
    backlog.put_off(A, 5.0)
    assert backlog.over(4.9) == []
    assert [over.session for over in backlog.over(5.0)] == [A]
    backlog.told(A)
    assert backlog.over(6.0) == []


def test_only_what_is_missing_counts_and_who_was_put_off_waits() -> None:
    backlog = Backlog()
    backlog.see([head(kv_len=160)], 1.0)
    backlog.published(A, 1, 100, 1.0)
    backlog.see([head(kv_len=160)], 1.0)
    [found] = backlog.behind(SHAPES, 2.0)
    # Blocks 6 to 9: of the sixth only a part was there.
    assert (found.covered, found.kv_len, found.missing_bytes) == (100, 160, 4 * 1600)
    assert backlog.behind({}, 2.0) == []
    assert backlog.unshaped({}) == [A]
    backlog.put_off(A, 5.0)
    assert backlog.behind(SHAPES, 4.9) == []
    assert len(backlog.behind(SHAPES, 5.0)) == 1


def test_a_store_that_is_sent_to_now_and_then_is_left_alone_in_between() -> None:
    backlog = Backlog(every_s=60.0)
    backlog.see([head(kv_len=100)], 1.0)
    assert len(backlog.behind(SHAPES, 1.0)) == 1
    backlog.published(A, 1, 100, 2.0)
    backlog.see([head(kv_len=160)], 3.0)
    assert backlog.behind(SHAPES, 61.9) == []
    assert backlog.lag(61.9).tokens == 60
    assert len(backlog.behind(SHAPES, 62.0)) == 1
    # Of a new owner nothing is there yet.
    backlog.see([head(kv_len=160, generation=2)], 4.0)
    assert len(backlog.behind(SHAPES, 5.0)) == 1


def test_what_was_published_long_ago_is_looked_at_again_and_sent_again_if_it_is_gone() -> None:
    backlog = Backlog()
    backlog.see([head(), head(B)], 1.0)
    backlog.published(A, 1, 100, 2.0)
    backlog.published(B, 1, 100, 3.0)
    assert backlog.unchecked(2.0) is None
    assert backlog.unchecked(10.0) == A
    backlog.found(A, 1, 100, 11.0)
    assert backlog.unchecked(10.0) == B
    backlog.found(B, 0, 0, 11.0)
    assert backlog.lag_of_each(12.0) == {B: (100, 1.0)}
