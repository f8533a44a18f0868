"""Streams and answers of a process that may not send: they wait, go on, or are broken off, and never look whole."""

import asyncio

import aiohttp
import pytest

from midstream.proxy.elsewhere import Nowhere
from midstream.proxy.reattach_elsewhere import STREAMS_PATH
from midstream.proxy.settings import ProxySettings
from support.answers import Answer
from support.permits import Life, Lives
from support.proxying import Client, proxied
from support.reconnecting import connected, position_in, whole_events
from support.scripted import Script, ScriptedCoordinator, ScriptedEngine

ANSWER = Answer.words(30)
QUICK = ProxySettings(keepalive_s=0.05)
KEPT = ProxySettings(keepalive_s=0.05, reattach_s=20.0)
BODY = {"model": "tiny", "prompt": "x", "stream": True}


def slow(gap_s: float = 0.01) -> ScriptedCoordinator:
    return ScriptedCoordinator(ScriptedEngine(ANSWER, Script(gap_s=gap_s)))


async def read_until(answer: aiohttp.ClientResponse, count: int) -> bytes:
    """What comes until there are so many tokens."""
    got = b""
    while got.count(b'"text"') < count:
        got += await answer.content.readany()
    return got


async def test_each_write_is_asked_for() -> None:
    lives = Lives()
    async with proxied(slow(), permits=lives) as client:
        got = await client.complete()
    assert got.text == ANSWER.text()
    assert lives.life.asked > len(ANSWER.pieces)


@pytest.mark.parametrize("fields", [{}, {"n": 3}])
async def test_a_stream_waits_and_goes_on_where_it_was(fields: dict[str, int]) -> None:
    lives = Lives()
    async with (
        proxied(slow(), QUICK, permits=lives) as client,
        client.session.post(client.url + "/v1/completions", json=BODY | fields) as answer,
    ):
        got = await read_until(answer, 5)
        lives.life.close()
        # What was on its way may still come; after that, only comments do.
        got += await answer.content.readany()
        more = b""
        while more.count(b": waiting\n\n") < 3:
            more += await answer.content.readany()
        quiet = more[more.index(b": waiting") :]
        assert quiet.replace(b": waiting\n\n", b"") == b""
        lives.life.open()
        got += more + await answer.content.read()
    assert got.endswith(b"data: [DONE]\n\n")
    assert got.count(b'"text"') >= len(ANSWER.pieces) * fields.get("n", 1)
    assert b"error" not in got


async def test_a_stream_whose_lease_is_over_is_broken_off_and_its_engine_freed() -> None:
    lives, coordinator = Lives(), slow()
    async with (
        proxied(coordinator, QUICK, permits=lives) as client,
        client.session.post(client.url + "/v1/completions", json=BODY) as answer,
    ):
        got = await read_until(answer, 5)
        lives.life.close()
        await asyncio.sleep(0.1)
        lives.life.lose()
        with pytest.raises(aiohttp.ClientPayloadError):
            got += await answer.content.read()
        async with asyncio.timeout(5):
            await coordinator.engines[0].seen[0].cancelled.wait()
    assert b"[DONE]" not in got
    assert [call[1] for call in coordinator.of("ended")] == ["cancelled"]


async def test_not_even_the_end_is_told_without_permission() -> None:
    class ClosesAtTheEnd(Life):
        def may_send(self) -> bool:
            # The last write of tokens is the last that is allowed.
            if self.asked > len(ANSWER.pieces) + 1:
                self.lose()
            return super().may_send()

    lives = Lives()
    lives.life = ClosesAtTheEnd()
    async with (
        proxied(slow(), QUICK, permits=lives) as client,
        client.session.post(client.url + "/v1/completions", json=BODY) as answer,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()


async def test_an_answer_in_one_piece_waits_or_is_refused() -> None:
    lives, coordinator = Lives(), slow(0.2)
    async with proxied(coordinator, QUICK, permits=lives) as client:
        for ending in (Life.open, Life.lose):
            asking = asyncio.create_task(client.complete(stream=False))
            async with asyncio.timeout(5):
                while not lives.life.asked:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            lives.life.close()
            await asyncio.sleep(0.5)
            assert not asking.done()
            ending(lives.life)
            got = await asking
            if ending is Life.open:
                assert got.json["choices"][0]["text"] == ANSWER.text()
            else:
                assert (got.status, got.json["error"]["code"]) == (503, "no_lease")
            lives.life.asked = 0


async def test_nothing_new_is_begun_while_nothing_may_be_sent() -> None:
    lives, coordinator = Lives(), slow()
    lives.life.close()
    async with proxied(coordinator, permits=lives) as client:
        got = await client.complete()
        assert (got.status, got.json["error"]["code"]) == (503, "no_lease")
        assert int(got.headers["Retry-After"]) >= 1
        lives.life.open()
        assert (await client.complete()).text == ANSWER.text()
    assert len(coordinator.of("admit")) == 1


async def begun(client: Client) -> tuple[str, bytes]:
    """A kept stream of which the client has some events when it is cut off."""
    async with connected(client.url, "POST", "/v1/completions", b'{"prompt":"x","stream":true}', {}) as first:
        await first.head()
        have = await first.read(400)
        first.cut()
        return first.headers["x-midstream-stream"], whole_events(have)


async def test_who_comes_back_waits_as_well_and_gets_all_of_it() -> None:
    lives = Lives()
    async with proxied(slow(0.02), KEPT, permits=lives) as client:
        token, have = await begun(client)
        lives.life.close()
        path = f"{STREAMS_PATH}{token}?from={position_in(have)}"
        async with client.session.get(client.url + path) as answer:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await answer.content.readany()
            lives.life.open()
            have += await answer.content.read()
        async with client.session.get(f"{client.url}{STREAMS_PATH}{token}?from=0") as answer:
            assert await answer.content.read() == have
    assert have.count(b'"text"') == len(ANSWER.pieces)


async def test_a_kept_stream_of_a_life_that_is_over_is_nobodys_here() -> None:
    lives, coordinator = Lives(), slow(0.05)
    async with proxied(coordinator, KEPT, permits=lives) as client:
        token, have = await begun(client)
        path = f"{client.url}{STREAMS_PATH}{token}?from={position_in(have)}"
        async with client.session.get(path) as answer:
            await answer.content.readany()
            lives.life.lose()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
        async with asyncio.timeout(5):
            await coordinator.engines[0].seen[0].cancelled.wait()
        lives.life = Life()
        async with client.session.get(path) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (410, "stream_gone")


async def test_one_that_nobody_reads_is_given_up_when_it_is_asked_for() -> None:
    lives, coordinator = Lives(), slow(0.05)
    async with proxied(coordinator, KEPT, permits=lives) as client:
        token, have = await begun(client)
        lives.life.lose()
        async with client.session.get(f"{client.url}{STREAMS_PATH}{token}?from={position_in(have)}") as answer:
            assert answer.status == 410
        async with asyncio.timeout(5):
            await coordinator.engines[0].seen[0].cancelled.wait()


class Named(Nowhere):
    """A gateway whose streams another one could go on with."""

    own_name = "gateway.10s.00112233445566ff"
    own_prefix = "00112233445566ff"


async def test_nothing_of_a_later_owner_is_sent_before_the_fleet_knows_of_it() -> None:
    lives = Lives()
    lives.life.may_record.clear()
    coordinator = ScriptedCoordinator(
        ScriptedEngine(ANSWER, Script(at=5), name="a"), ScriptedEngine(ANSWER, Script(), name="b")
    )
    async with (
        proxied(coordinator, KEPT, Named(), lives) as client,
        client.session.post(client.url + "/v1/completions", json=BODY) as answer,
    ):
        got = await read_until(answer, 5)
        async with asyncio.timeout(5):
            while len(coordinator.engines[1].seen) == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert lives.life.recorded == []
        lives.life.may_record.set()
        rest = await answer.content.read()
    assert (got + rest).count(b'"text"') >= len(ANSWER.pieces)
    assert got.count(b'"text"') == 5
    assert lives.life.recorded == [2]


async def test_who_may_not_send_takes_nothing_up() -> None:
    lives = Lives()
    coordinator = ScriptedCoordinator(
        ScriptedEngine(ANSWER, Script(at=5, gap_s=0.01), name="a"), ScriptedEngine(ANSWER, Script(), name="b")
    )
    async with (
        proxied(coordinator, QUICK, permits=lives) as client,
        client.session.post(client.url + "/v1/completions", json=BODY) as answer,
    ):
        await read_until(answer, 3)
        lives.life.close()
        await coordinator.engines[0].meets_fate.wait()
        await asyncio.sleep(0.3)
        assert coordinator.of("take_over") == []
        lives.life.lose()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()
    assert coordinator.of("take_over") == []
