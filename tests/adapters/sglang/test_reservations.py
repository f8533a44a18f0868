"""Pages of sessions that may come back: never in two hands, and all of them free again at the end."""

from hypothesis import given
from hypothesis import strategies as st

from midstream.adapters.sglang.reservations import Reservations
from midstream.session.ids import SessionId
from support.fake_pages import FakePages

A, B, C = (SessionId(letter * 32) for letter in "abc")


def test_reserved_pages_are_handed_to_nobody_else() -> None:
    pages = FakePages(8)
    Reservations(pages, {A: [3, 5]})
    assert pages.take(5) == [1, 2, 4, 6, 7]
    assert pages.take(1) is None


def test_a_session_that_comes_back_gets_its_own_pages_in_order_and_the_rest_is_free() -> None:
    pages = FakePages(8)
    reserved = Reservations(pages, {A: [5, 3, 6]})
    taken = reserved.take(A, 2)
    assert taken is not None
    assert (taken.pages, taken.complete) == ([5, 3], True)
    assert pages.held == {5, 3}
    assert sorted(pages.free) == [1, 2, 4, 6, 7]
    assert len(reserved) == 0


def test_more_pages_than_were_reserved_are_none() -> None:
    pages = FakePages(8)
    reserved = Reservations(pages, {A: [5, 3]})
    assert reserved.take(A, 3) is None
    assert reserved.take(B, 1) is None
    assert sorted(pages.free) == [1, 2, 3, 4, 5, 6, 7]


def test_a_shared_page_is_given_to_the_last_of_its_sessions_only() -> None:
    pages = FakePages(8)
    reserved = Reservations(pages, {A: [1, 2], B: [1, 3]})
    first = reserved.take(A, 2)
    assert first is not None
    assert first.pages[1:] == [2]
    assert first.pages[0] not in (1, 2, 3)
    assert not first.complete
    second = reserved.take(B, 2)
    assert second is not None
    assert (second.pages, second.complete) == ([1, 3], True)


def test_without_a_page_for_a_copy_the_reservation_is_lost_and_nothing_leaks() -> None:
    pages = FakePages(4)
    reserved = Reservations(pages, {A: [1, 2], B: [1, 3]})
    assert reserved.take(A, 2) is None
    second = reserved.take(B, 2)
    assert second is not None
    assert second.complete
    assert sorted(pages.free) == [2]


def test_a_session_with_a_page_that_is_taken_is_left_out_and_counted() -> None:
    pages = FakePages(8)
    assert pages.take(1) == [1]
    pages.hand_over([1])
    reserved = Reservations(pages, {A: [1, 2], B: [0], C: [4]})
    assert (reserved.lost, len(reserved)) == (2, 1)
    assert 2 in pages.free


TABLES = st.lists(st.lists(st.integers(1, 9), unique=True, min_size=1, max_size=5), min_size=1, max_size=3)


@given(TABLES, st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.booleans()), max_size=6))
def test_whatever_happens_no_page_is_in_two_hands_and_all_are_free_at_the_end(
    tables: list[list[int]], acts: list[tuple[int, int, bool]]
) -> None:
    pages = FakePages(10)
    reserved = Reservations(pages, dict(zip((A, B, C), tables, strict=False)))
    owned: list[int] = []
    for who, count, leaves in acts:
        session = (A, B, C)[who]
        if leaves:
            reserved.release(session)
        elif (taken := reserved.take(session, count)) is not None:
            pages.hand_over(taken.pages)
            owned += taken.pages
        assert len(owned) == len(set(owned))
        assert not set(owned) & (set(pages.free) | pages.held)
    reserved.release_all()
    assert pages.held == set()
    assert sorted([*owned, *pages.free]) == list(range(1, 10))
