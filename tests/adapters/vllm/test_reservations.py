"""Blocks of sessions that may come back: never in two hands, and all of them back in the free list at the end."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from midstream.adapters.vllm.reservations import Reservations
from midstream.session.ids import SessionId
from support.fake_block_pool import Block, FakeBlockPool

A, B, C = (SessionId(letter * 32) for letter in "abc")


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def free_ids(pool: FakeBlockPool) -> set[int]:
    return set(ids(pool.free_block_queue.order))


def test_reserved_blocks_are_handed_to_nobody() -> None:
    pool = FakeBlockPool(8)
    reserved = Reservations(pool, {A: [3, 5]})
    assert ids(pool.get_new_blocks(5)) == [1, 2, 4, 6, 7]
    assert len(reserved) == 1


def test_a_session_that_comes_back_is_given_its_own_blocks_in_order() -> None:
    pool = FakeBlockPool(8)
    reserved = Reservations(pool, {A: [5, 3, 6]})
    assert reserved.offer(A, 2)
    given = ids(pool.get_new_blocks(2))
    assert given == [5, 3]
    assert reserved.settle(A, given)
    assert reserved.table(A) == (6,)
    reserved.release(A)
    assert free_ids(pool) == {1, 2, 4, 6, 7}


def test_a_longer_table_than_was_reserved_is_not_offered() -> None:
    pool = FakeBlockPool(8)
    reserved = Reservations(pool, {A: [5, 3]})
    assert not reserved.offer(A, 3)
    assert not reserved.offer(B, 1)
    assert 5 not in free_ids(pool)


def test_a_shared_block_is_given_to_the_last_of_its_sessions_only() -> None:
    pool = FakeBlockPool(8)
    reserved = Reservations(pool, {A: [1, 2], B: [1, 3]})
    assert reserved.offer(A, 2)
    given = ids(pool.get_new_blocks(2))
    assert given == [4, 2]
    # Not in place: the first block has to be copied.
    assert not reserved.settle(A, given)
    assert 1 not in free_ids(pool)
    reserved.release(A)
    assert reserved.offer(B, 2)
    given = ids(pool.get_new_blocks(2))
    assert given == [1, 3]
    assert reserved.settle(B, given)


def test_a_shared_block_without_a_free_one_for_its_copy_is_no_offer() -> None:
    pool = FakeBlockPool(5)
    reserved = Reservations(pool, {A: [2, 1], B: [1, 3]})
    pool.get_new_blocks(1)
    assert not reserved.offer(A, 2)
    assert free_ids(pool) == set()
    assert reserved.table(A) == (2, 1)


def test_an_offer_that_was_not_taken_is_withdrawn() -> None:
    pool = FakeBlockPool(8)
    reserved = Reservations(pool, {A: [5, 3]})
    assert reserved.offer(A, 2)
    assert reserved.withdraw() == [A]
    assert free_ids(pool) == {1, 2, 4, 6, 7}
    assert reserved.withdraw() == []


def test_an_offer_made_twice_puts_no_block_into_the_free_list_twice() -> None:
    pool = FakeBlockPool(8)
    reserved = Reservations(pool, {A: [5, 3]})
    assert reserved.offer(A, 2)
    assert reserved.offer(A, 2)
    assert ids(pool.get_new_blocks(2)) == [5, 3]


def test_a_session_that_is_released_while_it_is_offered_leaves_sound_blocks() -> None:
    pool = FakeBlockPool(6)
    reserved = Reservations(pool, {A: [5, 3]})
    assert reserved.offer(A, 2)
    reserved.release(A)
    assert reserved.withdraw() == []
    assert len(pool.get_new_blocks(5)) == 5


def test_a_block_that_another_request_got_costs_all_its_sessions_their_kv_and_is_counted() -> None:
    pool = FakeBlockPool(8)
    reserved = Reservations(pool, {A: [5, 3], B: [2]})
    assert reserved.offer(A, 2)
    stranger = pool.get_new_blocks(1)
    assert ids(stranger) == [5]
    assert reserved.withdraw() == []
    assert (reserved.lost, reserved.table(A), reserved.table(B)) == (1, None, (2,))
    pool.free_blocks(stranger)
    reserved.release_all()
    assert free_ids(pool) == set(range(1, 8))


def test_a_settled_session_that_lost_a_block_has_no_reservation_any_more() -> None:
    pool = FakeBlockPool(8)
    reserved = Reservations(pool, {A: [5, 3]})
    assert reserved.offer(A, 2)
    stranger, given = pool.get_new_blocks(1), pool.get_new_blocks(2)
    assert not reserved.settle(A, ids(given))
    assert reserved.table(A) is None
    pool.free_blocks([*stranger, *given])
    assert free_ids(pool) == set(range(1, 8))


def test_tables_that_are_not_of_this_pool_are_left_out() -> None:
    pool = FakeBlockPool(4)
    reserved = Reservations(pool, {A: [0, 1], B: [2, 9], C: [3]})
    assert (reserved.lost, len(reserved)) == (2, 1)
    assert free_ids(pool) == {1, 2}


SESSIONS = [SessionId(f"{n:032x}") for n in range(4)]
BLOCKS = 14


class ReservationsMachine(RuleBasedStateMachine):
    """An engine that serves others while sessions come back, fail to be given room, or never come."""

    @initialize(
        prefix=st.lists(st.integers(1, 5), unique=True, max_size=3),
        tails=st.lists(st.lists(st.integers(6, BLOCKS - 1), unique=True, max_size=3), min_size=4, max_size=4),
        shares=st.lists(st.booleans(), min_size=4, max_size=4),
    )
    def start(self, prefix: list[int], tails: list[list[int]], shares: list[bool]) -> None:
        self.pool = FakeBlockPool(BLOCKS)
        tables = {
            s: [*(prefix if share else []), *tail] for s, tail, share in zip(SESSIONS, tails, shares, strict=True)
        }
        self.reserved = Reservations(self.pool, tables)
        self.tables = dict(tables)
        self.running: dict[int, list[Block]] = {}
        self.number = 0

    def waiting(self) -> list[SessionId]:
        return [s for s in SESSIONS if self.reserved.table(s) is not None and s in self.tables]

    def run(self, blocks: list[Block]) -> None:
        self.number += 1
        self.running[self.number] = blocks

    @rule(count=st.integers(1, 4))
    def another_request_is_given_blocks(self, count: int) -> None:
        count = min(count, self.pool.free_block_queue.num_free_blocks)
        given = self.pool.get_new_blocks(count)
        reserved = {b for s in self.waiting() for b in self.reserved.table(s) or ()}
        assert not reserved & set(ids(given))
        self.run(given)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_request_ends(self, data: st.DataObject) -> None:
        self.pool.free_blocks(self.running.pop(data.draw(st.sampled_from(sorted(self.running)))))

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), room=st.booleans())
    def a_session_comes_back(self, data: st.DataObject, room: bool) -> None:
        session = data.draw(st.sampled_from(self.waiting()))
        table = self.reserved.table(session) or ()
        count = data.draw(st.integers(0, len(table)))
        if not self.reserved.offer(session, count):
            self.reserved.release(session)
        elif room:
            given = self.pool.get_new_blocks(count)
            in_place = self.reserved.settle(session, ids(given))
            assert in_place == (tuple(ids(given)) == table[:count])
            del self.tables[session]
            self.run(given)
            self.reserved.release(session)
        else:
            assert self.reserved.withdraw() == [session]
            assert self.reserved.table(session) == table

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), offered=st.booleans())
    def a_session_never_comes(self, data: st.DataObject, offered: bool) -> None:
        session = data.draw(st.sampled_from(self.waiting()))
        if offered:
            self.reserved.offer(session, len(self.reserved.table(session) or ()))
        self.reserved.release(session)
        assert self.reserved.table(session) is None

    @invariant()
    def no_block_is_in_two_hands(self) -> None:
        free = ids(self.pool.free_block_queue.order)
        owned = [b.block_id for blocks in self.running.values() for b in blocks]
        reserved = {b for s in SESSIONS for b in self.reserved.table(s) or ()}
        hands = [*free, *owned, *reserved]
        assert sorted(hands) == list(range(1, BLOCKS))
        assert self.reserved.lost == 0 or len(self.reserved) < len(SESSIONS)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.reserved.release_all()
        for blocks in self.running.values():
            self.pool.free_blocks(blocks)
        assert free_ids(self.pool) == set(range(1, BLOCKS))
        assert all(block.ref_cnt == 0 for block in self.pool.blocks)


TestReservations = ReservationsMachine.TestCase
TestReservations.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
