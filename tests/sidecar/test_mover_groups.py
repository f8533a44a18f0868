"""Copies into one memory: who goes first, what goes together, and that no place is ever lost."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from midstream.session.errors import PoolError
from midstream.sidecar.mover.burst import CallTimes
from midstream.sidecar.mover.groups import Groups, Work
from midstream.sidecar.mover.pools import Copied, Copies, Pool


class Card:
    """A pool whose copies end when they are let go; it notes what it is asked for together."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Semaphore(0)
        self.error: BaseException | None = None

    def copy_all(self, destination: object, works: Sequence[Copies], started: Callable[[], object]) -> list[Copied]:
        self.calls.append([work.first for work in works])
        self.begun.release()
        started()
        assert self.let_go.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        return [Copied(work.first, 1, 0) for work in works]


def work(card: Card, number: int, to: Card | None = None) -> Work:
    return Work(cast(Pool, card), cast(Pool, to or card), Copies(number, [], [], []))


async def one(groups: Groups, card: Card, number: int, deadline: float = 9.0) -> Copied:
    async with groups.place(deadline) as place:
        return await place.copy(work(card, number))


async def begun(card: Card) -> None:
    assert await asyncio.to_thread(card.begun.acquire, timeout=20)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_so_many_go_together_and_the_most_urgent_first() -> None:
    groups, card = Groups(2, 1), Card()
    deadlines = {1: 9.0, 2: 9.0, 3: 5.0, 4: 1.0, 5: 1.0, 6: 5.0, 7: 20.0}
    tasks = [asyncio.create_task(one(groups, card, number, deadline)) for number, deadline in deadlines.items()]
    await begun(card)
    late = asyncio.create_task(one(groups, card, 8, 0.5))
    for _ in range(5):
        card.let_go.release()
    assert [done.bytes for done in await asyncio.gather(*tasks, late)] == [*deadlines, 8]
    # The next two had been let in when the first two were under way.
    assert card.calls[0] == [4, 5]
    assert [sorted(call) for call in card.calls[1:]] in ([[3, 8], [1, 6], [2, 7]], [[3, 6], [1, 8], [2, 7]])


async def test_the_next_are_prepared_while_the_first_are_copied_and_not_before_they_are_under_way() -> None:
    groups, card, order = Groups(2, 2), Card(), list[str]()
    sent, held = threading.Semaphore(0), threading.Event()

    def slowly(destination: object, works: Sequence[Copies], started: Callable[[], object]) -> list[Copied]:
        order.append("sent")
        sent.release()
        assert held.wait(20)
        return Card.copy_all(card, destination, works, started)

    card.copy_all = slowly  # type: ignore[method-assign]

    async def prepared(number: int) -> None:
        async with groups.place(9.0) as place:
            order.append(f"prepared {number}")
            await place.copy(work(card, number))

    tasks = [asyncio.create_task(prepared(number)) for number in range(4)]
    assert await asyncio.to_thread(sent.acquire, timeout=20)
    # Nobody follows until that call has started its work, however long it takes.
    await asyncio.sleep(0.05)
    assert order == ["prepared 0", "prepared 1", "sent"]
    held.set()
    await begun(card)
    assert await asyncio.to_thread(sent.acquire, timeout=20)
    assert order[3:] == ["prepared 2", "prepared 3", "sent"]
    assert not any(task.done() for task in tasks)
    card.let_go.release()
    card.let_go.release()
    await asyncio.gather(*tasks)


async def test_behind_a_call_that_is_under_way_twice_as_many_go_together() -> None:
    groups, card = Groups(2, 2), Card()
    tasks = [asyncio.create_task(one(groups, card, number)) for number in range(8)]
    for _ in range(2):
        await begun(card)
    assert card.calls == [[0, 1], [2, 3, 4, 5]]
    for _ in range(3):
        card.let_go.release()
    assert [done.bytes for done in await asyncio.gather(*tasks)] == list(range(8))
    assert card.calls[2:] == [[6, 7]]
    # Where one is a call, two would be none the cheaper.
    groups, card = Groups(1, 4), Card()
    tasks = [asyncio.create_task(one(groups, card, number)) for number in range(3)]
    for _ in range(3):
        await begun(card)
        card.let_go.release()
    await asyncio.gather(*tasks)
    assert sorted(card.calls) == [[0], [1], [2]]


async def test_each_call_is_told_with_its_times() -> None:
    told: list[tuple[CallTimes, float]] = []
    groups, card = Groups(2, 1, lambda times, seen_s: told.append((times, seen_s))), Card()
    card.let_go.release()
    await asyncio.gather(*(one(groups, card, number) for number in range(2)))
    [(times, seen_s)] = told
    assert times.handed_s <= times.begun_s <= times.sent_s <= times.over_s <= seen_s
    card.error = PoolError("it is refused; look at it")
    card.let_go.release()
    with pytest.raises(PoolError):
        await one(groups, card, 3)
    assert len(told) == 2


async def test_those_who_leave_with_nothing_hold_nobody_up() -> None:
    groups, card = Groups(2, 1), Card()

    async def fails() -> None:
        async with groups.place(1.0):
            raise LookupError

    first = [asyncio.create_task(fails()) for _ in range(3)]
    second = asyncio.create_task(one(groups, card, 7))
    card.let_go.release()
    assert (await asyncio.wait_for(second, 5)).bytes == 7
    found = await asyncio.gather(*first, return_exceptions=True)
    assert all(isinstance(error, LookupError) for error in found)


async def test_places_of_those_who_are_cancelled_are_given_back() -> None:
    groups, card = Groups(2, 1), Card()
    running = asyncio.create_task(one(groups, card, 1))
    await begun(card)
    waiting = [asyncio.create_task(one(groups, card, number)) for number in (2, 3, 4)]
    await settle()
    # One before its turn, one in the very moment of it.
    waiting[0].cancel()
    card.let_go.release()
    await running
    waiting[1].cancel()
    card.let_go.release()
    assert (await asyncio.wait_for(waiting[2], 5)).bytes == 4
    await asyncio.gather(*waiting[:2], return_exceptions=True)
    card.let_go.release()
    assert (await asyncio.wait_for(one(groups, card, 5), 5)).bytes == 5


async def test_who_is_cancelled_waits_until_nothing_is_written_any_more() -> None:
    groups, card = Groups(2, 1), Card()
    tasks = [asyncio.create_task(one(groups, card, number)) for number in (1, 2)]
    await begun(card)
    tasks[0].cancel()
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in tasks)
    card.let_go.release()
    assert (await tasks[1]).bytes == 2
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]


async def test_what_fails_in_one_pool_is_not_told_to_those_of_another() -> None:
    groups, sound, broken = Groups(4, 1), Card(), Card()
    broken.error = PoolError("it cannot be read; look at it")
    tasks = [asyncio.create_task(one(groups, card, n)) for n, card in enumerate((sound, broken, sound, broken))]
    for card in (sound, broken):
        card.let_go.release()
    found: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    assert (sound.calls, broken.calls) == ([[0, 2]], [[1, 3]])
    assert [getattr(done, "bytes", None) for done in found] == [0, None, 2, None]
    assert all(isinstance(found[n], PoolError) for n in (1, 3))


async def test_a_fault_of_ours_is_told_to_all_and_the_next_are_served() -> None:
    groups, card = Groups(2, 1), Card()
    card.error = ZeroDivisionError()
    tasks = [asyncio.create_task(one(groups, card, number)) for number in (1, 2)]
    card.let_go.release()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, ZeroDivisionError) for error in found)
    card.error = None
    card.let_go.release()
    assert (await asyncio.wait_for(one(groups, card, 3), 5)).bytes == 3
