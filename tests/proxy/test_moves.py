"""A planned move: the old worker's request is kept until the next owner has what it needs, and then given up."""

import asyncio
from collections.abc import Callable

import pytest

from midstream.proxy.coordinator import Reason
from midstream.proxy.kept import Kept
from midstream.proxy.settings import ProxySettings
from support.answers import Answer
from support.proxying import proxied
from support.scripted import Fate, Script, ScriptedCoordinator, ScriptedEngine

ANSWER = Answer.words(8)
# Long enough in writing the rest for a look at what is kept, which the end of the answer would end.
SLOW = Script(gap_s=0.5)


def moving(then: Script | None = None) -> ScriptedCoordinator:
    """A worker that would never end, and one that takes over and does what `then` says."""
    stalls = Script(at=3, fate=Fate.STALLS)
    second = ScriptedEngine(ANSWER, then or Script(), name="b")
    return ScriptedCoordinator(ScriptedEngine(ANSWER, stalls, name="a"), second)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that makes no noise."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_stream_goes_on_elsewhere_while_its_old_request_is_kept() -> None:
    coordinator = moving(SLOW)
    old = coordinator.engines[0]
    async with proxied(coordinator) as client:
        coordinator.fetched = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(client.complete())
        await old.meets_fate.wait()
        coordinator.interrupt(Reason.MOVE)
        await until(lambda: bool(coordinator.of("resumed")))
        assert not old.seen[0].cancelled.is_set()
        coordinator.fetched.set_result(None)
        await asyncio.wait_for(old.seen[0].cancelled.wait(), 5)
        got = await asking
    assert got.text == ANSWER.text()
    assert coordinator.of("take_over")[0][1] is Reason.MOVE


async def test_an_unstreamed_request_is_kept_although_it_has_no_answer_yet() -> None:
    never = Script(gap_s=60)
    coordinator = ScriptedCoordinator(ScriptedEngine(ANSWER, never, name="a"), ScriptedEngine(ANSWER, SLOW, name="b"))
    old = coordinator.engines[0]
    async with proxied(coordinator) as client:
        coordinator.fetched = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(client.complete(stream=False))
        await until(lambda: bool(old.seen))
        coordinator.interrupt(Reason.MOVE)
        await until(lambda: bool(coordinator.engines[1].seen))
        assert not old.seen[0].cancelled.is_set()
        coordinator.fetched.set_result(None)
        await asyncio.wait_for(old.seen[0].cancelled.wait(), 5)
        got = await asking
    assert got.json["choices"][0]["text"] == ANSWER.text()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_old_request_is_given_up_with_the_session(stream: bool) -> None:
    slow = Script(at=3, fate=Fate.STALLS) if stream else Script(gap_s=60)
    coordinator = ScriptedCoordinator(ScriptedEngine(ANSWER, slow, name="a"), ScriptedEngine(ANSWER, name="b"))
    old = coordinator.engines[0]
    async with proxied(coordinator) as client:
        coordinator.fetched = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(client.complete(stream=stream))
        await until(lambda: old.meets_fate.is_set() if stream else bool(old.seen))
        coordinator.interrupt(Reason.MOVE)
        await asking
        await asyncio.wait_for(old.seen[0].cancelled.wait(), 5)
        coordinator.fetched.cancel()


async def test_without_need_of_the_old_worker_its_request_is_given_up_at_once() -> None:
    coordinator = moving()
    old = coordinator.engines[0]
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(client.complete())
        await old.meets_fate.wait()
        coordinator.interrupt(Reason.MOVE)
        await asyncio.wait_for(old.seen[0].cancelled.wait(), 5)
        assert (await asking).text == ANSWER.text()


async def test_each_attempt_has_an_inner_request_id_of_its_own() -> None:
    coordinator = moving()
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(client.complete())
        await coordinator.engines[0].meets_fate.wait()
        coordinator.interrupt(Reason.MOVE)
        await asking
    first, second = (engine.seen[0].headers["X-Request-Id"] for engine in coordinator.engines)
    assert second == f"{first}-2"


async def test_any_number_of_moves_costs_a_session_nothing_that_deaths_may_need() -> None:
    halts = [ScriptedEngine(ANSWER, Script(at=3, fate=Fate.STALLS), name=f"m{i}") for i in range(4)]
    last = [
        ScriptedEngine(ANSWER, Script(at=4, fate=Fate.DIES), name="dies"),
        ScriptedEngine(ANSWER, Script(), name="ends"),
    ]
    coordinator = ScriptedCoordinator(*halts, *last)
    async with proxied(coordinator, ProxySettings(takeovers_max=1)) as client:
        asking = asyncio.create_task(client.complete())
        async with asyncio.timeout(20):
            for halt in halts:
                await halt.meets_fate.wait()
                coordinator.interrupt(Reason.MOVE)
            got = await asking
    assert (got.text, got.finishes) == (ANSWER.text(), [ANSWER.finish])
    assert [call[1] for call in coordinator.of("take_over")][:4] == [Reason.MOVE] * 4


async def test_what_is_kept_for_a_second_move_is_not_let_go_of_with_the_first() -> None:
    loop = asyncio.get_running_loop()
    kept, first, second = Kept(), loop.create_future(), loop.create_future()
    one, other = loop.create_future(), loop.create_future()
    kept.hold(one)
    kept.until(first)
    # The first move is found to be over when the second is ordered: by then both workers are held.
    kept.hold(other)
    first.set_result(None)
    kept.until(second)
    await asyncio.sleep(0)
    assert (one.cancelled(), other.done()) == (True, False)
    second.set_result(None)
    await asyncio.sleep(0)
    assert other.cancelled()
