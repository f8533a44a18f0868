"""Takeovers that come to one worker together are sent to it a few at a time."""

import asyncio
import gc

import pytest

from midstream.proxy import turns
from midstream.proxy.turns import AT_ONCE, Turns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_few_are_served_at_once_and_the_others_in_the_order_in_which_they_came() -> None:
    mine, begun = Turns(), list[int]()
    over = [asyncio.Event() for _ in range(2 * AT_ONCE)]

    async def one(index: int) -> None:
        async with mine.at("w"):
            begun.append(index)
            await over[index].wait()

    running = [asyncio.create_task(one(index)) for index in range(2 * AT_ONCE)]
    await settle()
    assert begun == list(range(AT_ONCE))
    over[1].set()
    await settle()
    assert begun == list(range(AT_ONCE + 1))
    for event in over:
        event.set()
    await asyncio.gather(*running)
    assert begun == list(range(2 * AT_ONCE))


async def test_nobody_waits_long_for_those_who_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONGEST_S", 0.01)
    mine, begun = Turns(), list[int]()
    over = asyncio.Event()

    async def one(index: int) -> None:
        async with mine.at("w"):
            begun.append(index)
            await over.wait()

    running = [asyncio.create_task(one(index)) for index in range(3 * AT_ONCE)]
    async with asyncio.timeout(5):
        while len(begun) < 3 * AT_ONCE:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    over.set()
    await asyncio.gather(*running)
    # No turn was given back twice: as few as ever are served at once.
    begun.clear()
    over.clear()
    monkeypatch.setattr(turns, "LONGEST_S", 60)
    running = [asyncio.create_task(one(index)) for index in range(2 * AT_ONCE)]
    await settle()
    assert len(begun) == AT_ONCE
    over.set()
    await asyncio.gather(*running)


async def test_one_that_gives_up_while_it_waits_keeps_nobody_from_a_turn() -> None:
    mine, over = Turns(), asyncio.Event()

    async def one() -> None:
        async with mine.at("w"):
            await over.wait()

    first = [asyncio.create_task(one()) for _ in range(AT_ONCE)]
    await settle()
    waiting = asyncio.create_task(one())
    await settle()
    waiting.cancel()
    first[0].cancel()
    await settle()
    assert waiting.cancelled()
    last = asyncio.create_task(one())
    over.set()
    await asyncio.wait_for(asyncio.gather(last, *first[1:]), 5)


async def test_workers_do_not_wait_for_each_other_and_are_forgotten() -> None:
    mine = Turns()
    async with mine.at("a"), mine.at("a"), mine.at("a"), mine.at("b"):
        assert len(mine._of_workers) == 2
    gc.collect()
    assert not mine._of_workers


async def test_a_worker_of_several_front_ends_gets_so_many_times_as_many() -> None:
    mine, begun, over = Turns(), list[int](), asyncio.Event()

    async def one(index: int) -> None:
        async with mine.at("w", 2):
            begun.append(index)
            await over.wait()

    running = [asyncio.create_task(one(index)) for index in range(3 * AT_ONCE)]
    await settle()
    assert begun == list(range(2 * AT_ONCE))
    over.set()
    await asyncio.gather(*running)
