"""Requests that kill their workers, and those that are only near when it happens."""

import pytest

from midstream.proxy.coordinator import Reason, SessionFacts
from midstream.proxy.failover import Failover
from midstream.proxy.settings import ProxySettings
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from support.answers import Answer
from support.proxying import proxied
from support.scripted import Fate, Script, ScriptedCoordinator, ScriptedEngine

ANSWER = Answer.words(12)


def dying(*at: int, **script: int) -> ScriptedCoordinator:
    """Workers that die at these tokens, one after the other, and one that does not."""
    engines = [ScriptedEngine(ANSWER, Script(at=a, **script), name=f"d{i}") for i, a in enumerate(at)]  # type: ignore[arg-type]
    return ScriptedCoordinator(*engines, ScriptedEngine(ANSWER, name="lives"))


@pytest.mark.parametrize("stream", [True, False])
async def test_what_kills_each_worker_before_its_first_token_costs_three_and_is_not_sent_again(stream: bool) -> None:
    coordinator = dying(*[0] * 9)
    async with proxied(coordinator) as client:
        got = await client.complete(stream=stream)
    assert [len(engine.seen) for engine in coordinator.engines] == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    # A client that sends again what was answered 5xx would do all of this once more.
    if stream and got.status == 200:
        assert got.chunks[-1]["error"]["code"] == "poison_request"
    else:
        assert (got.status, got.json["error"]["code"]) == (422, "poison_request")


async def test_a_token_that_kills_whoever_computes_it_is_noticed_as_well() -> None:
    coordinator = dying(*[4] * 9)
    async with proxied(coordinator) as client:
        got = await client.complete()
    assert got.chunks[-1]["error"]["code"] == "poison_request"
    assert got.text == ANSWER.visible(4)
    assert sum(len(engine.seen) for engine in coordinator.engines) == 4


@pytest.mark.parametrize("stream", [True, False])
async def test_a_session_that_gets_on_with_each_worker_is_taken_up_as_often_as_ever(stream: bool) -> None:
    coordinator = dying(*range(1, 9))
    async with proxied(coordinator) as client:
        got = await client.complete(stream=stream)
    assert got.status == 200
    assert len(coordinator.of("take_over")) == 8
    assert ANSWER.text() in (got.text if stream else got.raw.decode())


async def test_who_has_got_on_is_left_when_the_request_beside_it_is_given_up() -> None:
    # It was under way when the first worker died, and lost two more to a request that began with these.
    coordinator = dying(3, 3, 3)
    async with proxied(coordinator) as client:
        got = await client.complete()
    assert (got.text, got.finishes) == (ANSWER.text(), [ANSWER.finish])


async def test_text_without_ids_counts_as_getting_on() -> None:
    coordinator = ScriptedCoordinator(*(ScriptedEngine(ANSWER, name=f"w{i}") for i in range(9)))
    facts = SessionFacts(SessionId("5" * 32), "/v1/responses", {}, stream=True)
    failover = Failover(coordinator, facts, 8, 0)
    placement = await coordinator.admit(facts)
    for _ in range(3):
        placement = await failover.take_over(placement, Reason.EOF, "it broke", (), unseen=True)
        failover.resumed(placement)
    placement = await failover.take_over(placement, Reason.EOF, "it broke", (), unseen=True)
    with pytest.raises(Refused, match="1 workers in a row"):
        await failover.take_over(placement, Reason.EOF, "it broke", (), unseen=True)


async def test_a_worker_that_cannot_be_reached_says_nothing_of_the_request() -> None:
    coordinator = ScriptedCoordinator(*(ScriptedEngine(ANSWER, name=f"w{i}") for i in range(6)))
    async with proxied(coordinator) as client:
        for engine in coordinator.engines[:5]:
            engine.url = "http://127.0.0.1:9"
        got = await client.complete()
    assert (got.text, len(coordinator.of("take_over"))) == (ANSWER.text(), 5)


async def test_how_many_may_be_lost_for_nothing_is_a_setting() -> None:
    coordinator = dying(*[0] * 9)
    async with proxied(coordinator, ProxySettings(fruitless_takeovers_max=5)) as client:
        await client.complete()
    assert sum(len(engine.seen) for engine in coordinator.engines) == 6
    with pytest.raises(ValueError, match="fruitless_takeovers_max"):
        ProxySettings(fruitless_takeovers_max=-1)


async def test_an_engine_that_only_errs_is_given_up_in_the_same_way() -> None:
    engines = [ScriptedEngine(ANSWER, Script(at=0, fate=Fate.ERRS), name=f"e{i}") for i in range(9)]
    coordinator = ScriptedCoordinator(*engines)
    async with proxied(coordinator) as client:
        await client.complete()
    assert sum(len(engine.seen) for engine in engines) == 3
