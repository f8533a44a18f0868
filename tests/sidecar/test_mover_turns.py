"""Turns on a GPU: who goes first, and that none is ever lost."""

import asyncio

from midstream.sidecar.mover.turns import Turns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_at_most_so_many_have_a_turn_and_the_most_urgent_is_next() -> None:
    turns, order, let_go = Turns(2), list[str](), dict[str, asyncio.Event]()

    async def one(name: str, deadline: float) -> None:
        async with turns.turn(deadline):
            order.append(name)
            await let_go.setdefault(name, asyncio.Event()).wait()

    tasks = []
    for name, deadline in (("a", 9.0), ("b", 9.0), ("late", 5.0), ("first", 1.0), ("second", 1.0)):
        tasks.append(asyncio.create_task(one(name, deadline)))
        await settle()
    assert order == ["a", "b"]
    for name, now in (("a", "first"), ("first", "second"), ("b", "late")):
        let_go[name].set()
        await settle()
        assert order[-1] == now
    for event in let_go.values():
        event.set()
    await asyncio.gather(*tasks)


async def test_turns_of_those_who_are_cancelled_are_given_back() -> None:
    turns = Turns(1)

    async def hold() -> None:
        async with turns.turn(1.0):
            await asyncio.Event().wait()

    holder = asyncio.create_task(hold())
    await settle()
    waiters = [asyncio.create_task(hold()) for _ in range(3)]
    await settle()
    # One that waits, and one whose turn has just come.
    waiters[0].cancel()
    holder.cancel()
    await asyncio.sleep(0)
    waiters[1].cancel()
    await settle()
    waiters[2].cancel()
    await asyncio.gather(holder, *waiters, return_exceptions=True)
    async with asyncio.timeout(1), turns.turn(1.0):
        pass
