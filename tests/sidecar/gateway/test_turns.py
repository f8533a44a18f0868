"""Turns at being saved: one at a time, tails first, and nobody keeps them for good."""

import asyncio
from contextlib import suppress

from midstream.sidecar.gateway.turns import Turns, Urgency


async def test_of_those_that_wait_a_tail_comes_before_the_first_snapshots_of_others() -> None:
    turns, order = Turns(), []

    async def save(name: str, urgency: Urgency) -> None:
        async with turns.turn(urgency):
            order.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for name, urgency in (
            ("a", Urgency.FIRST), ("b", Urgency.FIRST), ("c", Urgency.MORE), ("d", Urgency.FIRST), ("e", Urgency.TAIL)
        ):  # fmt: skip
            tasks.create_task(save(name, urgency))
    assert order == ["a", "e", "c", "b", "d"]


async def test_whoever_takes_long_goes_on_beside_the_next_one() -> None:
    turns, done = Turns(alone_s=0.05), asyncio.Event()
    inside: list[int] = []
    most = 0

    async def save(number: int) -> None:
        nonlocal most
        async with turns.turn(Urgency.FIRST):
            inside.append(number)
            most = max(most, len(inside))
            if number == 0:
                await done.wait()
            await asyncio.sleep(0.01)
            inside.remove(number)

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(save(0))
        others = [tasks.create_task(save(number)) for number in (1, 2, 3)]
        await asyncio.gather(*others)
        assert not first.done()
        # Of the others one at a time still.
        assert most == 2
        done.set()
    # Its end gives nobody a turn a second time.
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        most = 0
        for number in (4, 5, 6):
            tasks.create_task(save(number))
    assert most == 1


async def test_a_turn_that_comes_to_who_has_just_given_up_goes_to_the_next() -> None:
    turns = Turns()

    async def save() -> None:
        async with turns.turn(Urgency.MORE):
            pass

    async with turns.turn(Urgency.FIRST):
        waiting = [asyncio.create_task(save()) for _ in range(3)]
        await asyncio.sleep(0)
        # One before the turn comes to it, one just after.
        waiting[0].cancel()
    waiting[1].cancel()
    async with asyncio.timeout(5):
        await waiting[2]
        async with turns.turn(Urgency.TAIL):
            pass
    for task in waiting[:2]:
        with suppress(asyncio.CancelledError):
            await task
