"""Clients that lose their connection and come back: what they get, and what becomes of streams without a reader."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from midstream.proxy.coordinator import Reason
from midstream.proxy.reattach_elsewhere import STREAMS_PATH
from midstream.proxy.settings import ProxySettings
from midstream.session.errors import Refused
from support.answers import Answer
from support.event_answers import RICH
from support.proxying import proxied
from support.raw_engine import SSE_HEAD, RawEngine, chunked, read_request
from support.reconnecting import Connection, connected, position_in, whole_events
from support.scripted import Script, ScriptedCoordinator, ScriptedEngine
from support.scripted_events import EventEngine

ANSWER = Answer.words(40)
SETTINGS = ProxySettings(reattach_s=5.0, keepalive_first_s=0.05, keepalive_s=0.05)
COMPLETIONS = "/v1/completions"
BODY = {"model": "tiny", "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
WAITING = b": waiting\n\n"


@dataclass(frozen=True, slots=True)
class Site:
    """A proxy and its coordinator."""

    url: str
    coordinator: ScriptedCoordinator

    def post(self, path: str = COMPLETIONS, **more: Any) -> Any:
        """A request for a stream; `last` is the id of the last event that the client has."""
        headers = {"Last-Event-ID": last} if (last := more.pop("last", None)) else {}
        headers |= more.pop("headers", {})
        narrow = more.pop("narrow", False)
        return connected(self.url, "POST", path, json.dumps(BODY | more).encode(), headers, narrow=narrow)

    def get(self, token: str, query: str = "", *, method: str = "GET", **headers: str) -> Any:
        """A request for a stream by its name."""
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        return connected(self.url, method, f"{STREAMS_PATH}{token}{query}", headers=told)

    async def rest(self, token: str, position: int) -> bytes:
        """All that follows an event."""
        async with self.get(token, f"?from={position}") as again:
            await again.head()
            assert again.status == 200, await again.read()
            rest = await again.read()
            assert again.ended
            return rest


@asynccontextmanager
async def site(*engines: ScriptedEngine, settings: ProxySettings = SETTINGS, **more: Any) -> AsyncIterator[Site]:
    coordinator = ScriptedCoordinator(*engines)
    async with proxied(coordinator, settings, **more) as client:
        yield Site(client.url, coordinator)


def engine(*scripts: Script, name: str = "a", answer: Answer = ANSWER) -> ScriptedEngine:
    return ScriptedEngine(answer, *scripts, name=name)


class Flood(RawEngine):
    """Says `count` events of `size` letters, as fast as they are taken; counts what it could write.

    After the first ten it waits until it is told to go on.
    """

    def __init__(self, count: int, size: int) -> None:
        super().__init__(self._say)
        self.texts = [f"{n:06d}".ljust(size, "x") for n in range(count)]
        self.go_on = asyncio.Event()
        self.said = 0
        self.gone = asyncio.Event()

    async def _say(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(SSE_HEAD)
        try:
            for n, text in enumerate(self.texts):
                finish = "length" if n + 1 == len(self.texts) else None
                choice = {"index": 0, "text": text, "token_ids": [n], "finish_reason": finish}
                event = {"id": "a", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
                writer.write(chunked(b"data: " + json.dumps(event).encode() + b"\n\n"))
                await writer.drain()
                self.said = n + 1
                if n == 9:
                    await self.go_on.wait()
            writer.write(chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            await reader.read()
        finally:
            self.gone.set()


class Generator(RawEngine):
    """Says an answer of `/generate`, all so far in each event."""

    def __init__(self) -> None:
        super().__init__(self._say)

    async def _say(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(SSE_HEAD)
        for n in range(1, 21):
            finish = {"type": "length", "length": 20} if n == 20 else None
            meta = {"id": "g", "completion_tokens": n, "finish_reason": finish}
            event = {"text": " w" * n, "output_ids": list(range(n)), "meta_info": meta}
            writer.write(chunked(b"data: " + json.dumps(event).encode() + b"\n\n"))
            await asyncio.sleep(0.001)
        writer.write(chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def text_in(data: bytes) -> str:
    """The text of a completion's stream, whose ids go on by one each."""
    assert ids_in(data) == list(range(1, len(ids_in(data)) + 1))
    chunks = [json.loads(event) for event in re.findall(rb"data: (\{.*\})", data)]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


async def until(true: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def without_ids(data: bytes) -> bytes:
    return re.sub(rb"id: [A-Za-z0-9_-]{22}\.\d+\n", b"", data)


def nameless(data: bytes) -> bytes:
    """Without what engines and proxy draw anew for each answer."""
    return re.sub(rb'"(?:chat)?cmpl-[^"]*"|\d{10}', b"", without_ids(data))


def ids_in(data: bytes) -> list[int]:
    return [int(n) for n in re.findall(rb"\nid: [A-Za-z0-9_-]{22}\.(\d+)\n\n", data)]


async def plain(engine: ScriptedEngine, path: str = COMPLETIONS, **more: Any) -> bytes:
    """What a client gets where nothing is kept."""
    async with site(engine, settings=ProxySettings()) as here, here.post(path, **more) as client:
        await client.head()
        return await client.read()


async def cut_after(client: Connection, count: int) -> tuple[str, bytes]:
    """Read so many bytes, and break off; the stream's name, and what was got."""
    await client.head()
    have = (await client.read(count))[:count]
    client.cut()
    return client.headers["x-midstream-stream"], have


# ---- the bytes


async def test_an_answer_that_nobody_breaks_off_is_the_same_but_for_its_ids() -> None:
    async with site(engine()) as here, here.post() as client:
        await client.head()
        got = await client.read()
    assert client.ended
    assert ids_in(got) == list(range(1, got.count(b"\n\n") + 1))
    assert without_ids(got) == await plain(engine())


async def test_where_nothing_is_kept_there_are_no_ids_and_nothing_answers_at_their_path() -> None:
    async with site(engine(), settings=ProxySettings()) as here:
        async with here.post(last="AAECAwQFBgcICQoLDA0ODw.3") as client:
            await client.head()
            got = await client.read()
        assert b"\nid:" not in got
        assert "x-midstream-stream" not in client.headers
        assert here.coordinator.engines[0].seen[0].headers["Last-Event-ID"] == "AAECAwQFBgcICQoLDA0ODw.3"
        async with here.get("AAECAwQFBgcICQoLDA0ODw") as other:
            await other.head()
        assert other.headers["x-path"].startswith(STREAMS_PATH)


CASES: dict[str, tuple[Callable[[], ScriptedEngine], str, dict[str, Any]]] = {
    "completions": (engine, COMPLETIONS, {}),
    "chat": (engine, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "responses": (lambda: EventEngine(RICH, name="a"), "/v1/responses", {"input": "x"}),
    "messages": (lambda: EventEngine(RICH, name="a"), "/v1/messages", {"messages": []}),
    "generate": (Generator, "/generate", {"text": "x", "sampling_params": {"temperature": 0}}),
    "choices": (lambda: engine(Script(gap_s=0.001)), COMPLETIONS, {"n": 3}),
    "stop strings": (engine, COMPLETIONS, {"stop": ["w17"], "return_token_ids": True}),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_client_that_is_cut_off_anywhere_gets_the_rest_by_get_and_the_whole_is_one_stream(name: str) -> None:
    make, path, more = CASES[name]
    async with site(make()) as here:
        async with here.post(path, **more, headers={"X-Midstream-Report": "1"}) as client:
            token, _ = await cut_after(client, 1)
        whole = await here.rest(token, 0)
        assert whole.endswith(b"\n\n")
        assert b": midstream outcome=undisturbed" in whole.rpartition(b"\n\n")[0].rpartition(b"\n\n")[2]
        step = max(1, len(whole) // 9)
        for cut in [*range(0, len(whole), step), len(whole) - 1]:
            async with here.post(path, **more, headers={"X-Midstream-Report": "1"}) as client:
                token, have = await cut_after(client, cut)
            have = whole_events(have)
            joined = have + await here.rest(token, position_in(have))
            assert joined == await here.rest(token, 0), "what was sent first is what is kept"
            assert ids_in(joined) == list(range(1, joined.count(b"\n\n") + 1))
            # Choices take turns as they like.
            order = sorted if name == "choices" else list
            assert order(nameless(joined).split(b"\n\n")) == order(nameless(whole).split(b"\n\n"))
        assert {call[1] for call in here.coordinator.of("ended")} == {"finished"}


async def test_the_same_request_with_the_last_id_goes_on_there_and_is_no_new_session() -> None:
    async with site(engine(Script(gap_s=0.005))) as here:
        async with here.post() as client:
            token, have = await cut_after(client, 2000)
        have = whole_events(have)
        async with here.post(last=f"{token}.{position_in(have)}", headers={"X-Request-Id": "mine"}) as again:
            await again.head()
            have += await again.read()
        assert again.ended
        assert again.headers["x-request-id"] == "mine"
        assert again.headers["x-midstream-stream"] == token
        assert without_ids(have) == without_ids(await here.rest(token, 0))
        assert len(here.coordinator.of("admit")) == 1
        assert len(here.coordinator.engines[0].seen) == 1


async def test_a_browser_comes_back_by_itself_with_the_last_id_and_stops_at_the_end() -> None:
    async with site(engine()) as here:
        async with here.post() as client:
            token, _ = await cut_after(client, 1)
        whole = await here.rest(token, 0)
        async with here.get(token, "?from=0", Last_Event_ID=f"{token}.3") as again:
            await again.head()
            assert whole.endswith(await again.read())
        assert again.headers["cache-control"] == "no-store"
        assert again.headers["content-type"].startswith("text/event-stream")
        async with here.get(token, Last_Event_ID=f"{token}.{ids_in(whole)[-1]}") as at_end:
            await at_end.head()
        assert at_end.status == 204
        async with here.post(last=f"{token}.{ids_in(whole)[-1]}") as empty:
            await empty.head()
            assert await empty.read() == b""
        assert (empty.status, empty.ended) == (200, True)


async def test_several_cuts_of_one_stream_make_one_whole() -> None:
    async with site(engine(Script(gap_s=0.004))) as here:
        async with here.post() as client:
            token, have = await cut_after(client, 700)
        for more in (1, 333, 1500):
            have = whole_events(have)
            async with here.get(token, f"?from={position_in(have)}") as again:
                have += (await cut_after(again, more))[1]
        have = whole_events(have)
        have += await here.rest(token, position_in(have))
        assert have == await here.rest(token, 0)
    assert nameless(have) == nameless(await plain(engine()))


@examples(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 2500), st.booleans()), max_size=6),
    st.integers(0, 45),
    # Those whose engines can be told when to die, and how long their answer is.
    st.sampled_from([name for name in CASES if name not in ("generate", "stop strings")]),
)
async def test_however_often_a_client_is_cut_off_and_wherever_its_worker_dies_it_has_each_event_once(
    cuts: list[tuple[int, bool]], death: int, name: str
) -> None:
    make, path, more = CASES[name]
    dying, standby = make(), make()
    dying.scripts, standby.name = [Script(at=death, ahead=2, gap_s=0.0005)], "b"
    async with asyncio.timeout(30), site(dying, standby) as here:
        token, have = "", b""
        for size_bytes, by_post in [*cuts, (1 << 30, False)]:
            last = f"{token}.{position_in(have)}"
            asked = here.post(path, **more, last=last) if by_post else here.get(token, Last_Event_ID=last)
            async with asked if token else here.post(path, **more) as client:
                await client.head()
                have = whole_events(have + (await client.read(size_bytes))[:size_bytes])
                client.cut()
            token = token or client.headers["x-midstream-stream"]
        assert have.replace(WAITING, b"") == await here.rest(token, 0)
        numbers = ids_in(have.replace(WAITING, b""))
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(here.coordinator.of("admit")) == more.get("n", 1)
        assert {call[1] for call in here.coordinator.of("ended")} == {"finished"}


# ---- takeovers


async def test_a_client_that_comes_back_while_a_takeover_is_under_way_waits_and_gets_the_rest() -> None:
    engines = engine(Script(at=8, ahead=3)), engine(name="b")
    async with site(*engines) as here:
        here.coordinator.takeover_wait_s = 0.6
        async with here.post(headers={"X-Midstream-Report": "1"}) as client:
            await client.head()
            have = await client.read(1500)
            await until(lambda: bool(here.coordinator.of("take_over")))
            client.cut()
        token, have = client.headers["x-midstream-stream"], whole_events(have)
        async with here.get(token, f"?from={position_in(have)}") as again:
            await again.head()
            rest = await again.read()
        assert again.ended
        assert WAITING in rest, "who waits is told that it does"
        joined = (have + rest).replace(WAITING, b"")
        assert joined == await here.rest(token, 0), "comments that bridge a wait are not kept"
    assert b"outcome=exact takeovers=1" in joined
    assert text_in(joined) == ANSWER.text()
    assert ids_in(joined) == list(range(1, len(ids_in(joined)) + 1))


async def test_a_worker_may_die_while_nobody_reads() -> None:
    engines = engine(Script(at=20, gap_s=0.01, ahead=2)), engine(Script(gap_s=0.005), name="b")
    async with site(*engines) as here:
        async with here.post() as client:
            token, have = await cut_after(client, 600)
        await until(lambda: bool(here.coordinator.of("ended")))
        have = whole_events(have)
        have += await here.rest(token, position_in(have))
        assert here.coordinator.of("take_over")[0][1] is Reason.EOF
        assert here.coordinator.of("ended") == [("ended", "finished")]
    assert text_in(have) == ANSWER.text()


async def test_a_refusal_that_nobody_read_is_there_for_who_comes_back() -> None:
    async with site(engine(Script(at=5))) as here:
        here.coordinator.takeover_refusal = Refused("no_standby", "nobody is there: send it again")
        async with here.post(headers={"X-Midstream-Report": "1"}) as client:
            token, have = await cut_after(client, 300)
        await until(lambda: bool(here.coordinator.of("ended")))
        have = whole_events(have)
        rest = await here.rest(token, position_in(have))
        assert b'"code":"no_standby"' in rest or b'"no_standby"' in rest
        assert rest.endswith(b"\n\n")
        assert b": midstream outcome=refused" in rest
        assert here.coordinator.of("ended") == [("ended", "failed")]


async def test_an_answer_that_is_refused_before_it_begins_is_an_answer_as_ever() -> None:
    async with site(engine()) as here:
        here.coordinator.refusal = Refused("draining", "this sidecar is draining", retry_after_s=1)
        async with here.post() as client:
            await client.head()
            assert b"draining" in await client.read()
        assert (client.status, client.headers["retry-after"]) == (503, "1")
        assert "x-midstream-stream" not in client.headers
        async with here.post(n=2) as several:
            await several.head()
        assert several.status == 503


async def test_who_comes_back_is_not_refused_while_the_sidecar_takes_nobody_new() -> None:
    async with site(engine(Script(gap_s=0.01))) as here:
        async with here.post() as client:
            token, have = await cut_after(client, 600)
        here.coordinator.refusal = Refused("draining", "this sidecar is draining", retry_after_s=1)
        have = whole_events(have)
        async with here.post(last=f"{token}.{position_in(have)}") as again:
            await again.head()
            have += await again.read()
        assert again.ended
        assert have.rstrip().rpartition(b"\nid")[0].endswith(b"[DONE]")


async def test_a_broken_coordinator_breaks_the_stream_off_and_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with site(engine(Script(at=5, gap_s=0.01)), engine(name="b")) as here:

        async def broken(*_: object, **__: object) -> Any:
            raise KeyError("a bug")

        here.coordinator.take_over = broken  # type: ignore[method-assign]
        async with here.post() as client:
            await client.head()
            await client.read()
        assert not client.ended
        assert [record.getMessage() for record in caplog.records] == ["event=session_broke"]
        caplog.clear()
        async with here.get(client.headers["x-midstream-stream"]) as again:
            await again.head()
        assert again.status == 410
    assert here.coordinator.of("ended") == [("ended", "failed")]


# ---- without a reader


async def test_a_stream_without_a_reader_is_given_up_after_its_time_and_its_engine_with_it() -> None:
    settings = replace(SETTINGS, reattach_s=0.3)
    async with site(engine(Script(gap_s=0.02)), settings=settings) as here:
        async with here.post() as client:
            token, _ = await cut_after(client, 300)
        left_s = asyncio.get_running_loop().time()
        await asyncio.wait_for(here.coordinator.engines[0].seen[0].cancelled.wait(), 5)
        assert 0.25 < asyncio.get_running_loop().time() - left_s < 0.7
        await until(lambda: here.coordinator.of("ended") == [("ended", "cancelled")])
        async with here.get(token, "?from=1") as again:
            await again.head()
            assert b"stream_gone" in await again.read()
        assert again.status == 410


async def test_a_whole_answer_is_kept_for_as_long_and_coming_back_begins_that_time_anew() -> None:
    settings = replace(SETTINGS, reattach_s=0.4)
    async with site(engine(), settings=settings) as here:
        async with here.post() as client:
            await client.head()
            whole = await client.read()
        token = client.headers["x-midstream-stream"]
        for _ in range(4):
            await asyncio.sleep(0.25)
            assert await here.rest(token, 0) == whole
        await asyncio.sleep(0.6)
        async with here.get(token) as again:
            await again.head()
        assert again.status == 410


async def test_a_client_that_leaves_before_it_has_a_name_for_the_stream_ends_it_at_once() -> None:
    async with site(engine()) as here:
        admitting, given_up = asyncio.Event(), asyncio.Event()

        async def admit(facts: Any) -> Any:
            admitting.set()
            try:
                await asyncio.sleep(60)
            finally:
                given_up.set()

        here.coordinator.admit = admit  # type: ignore[method-assign]
        async with here.post() as client:
            await asyncio.wait_for(admitting.wait(), 5)
            client.cut()
        await asyncio.wait_for(given_up.wait(), 2)


async def test_an_engine_that_is_silent_at_first_is_given_up_with_a_client_that_leaves_then() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        asked.set()
        await reader.read()
        left.set()

    asked, left = asyncio.Event(), asyncio.Event()
    async with site(RawEngine(mute)) as here:
        async with here.post() as client:
            await asyncio.wait_for(asked.wait(), 5)
            client.cut()
        await asyncio.wait_for(left.wait(), 2)
        await until(lambda: here.coordinator.of("ended") == [("ended", "cancelled")])


async def test_a_proxy_that_ends_gives_up_what_nobody_reads_and_leaves_nothing_running() -> None:
    async with site(engine(Script(gap_s=0.05)), engine(Script(gap_s=0.05), name="b")) as here:
        for more in ({}, {"n": 3}):
            async with here.post(**more) as client:
                await cut_after(client, 300)
        async with here.post() as whole:
            await whole.head()
            await whole.read()
        seen = here.coordinator.engines[0].seen
    assert (
        here.coordinator.of("ended").count(("ended", "cancelled"))
        + here.coordinator.of("ended").count(("ended", "finished"))
        == len(seen)
        == 5
    )
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_nobody_reads_is_bounded_and_the_engine_waits_until_somebody_does() -> None:
    # More than all sockets on the way can hold.
    flood = Flood(10_000, 5000)
    settings = replace(SETTINGS, reattach_s=30.0, reattach_stream_bytes_max=400_000)
    async with site(flood, settings=settings) as here:
        async with here.post() as client:
            token, have = await cut_after(client, 30_000)
        flood.go_on.set()
        # Sockets on the way hold something, too.
        before = 0
        while before != flood.said:
            before = flood.said
            await asyncio.sleep(0.3)
        assert 80 < before < len(flood.texts)
        assert not flood.gone.is_set()
        have = whole_events(have)
        have += await here.rest(token, position_in(have))
        assert here.coordinator.of("ended") == [("ended", "finished")]
    assert text_in(have) == "".join(flood.texts)


async def test_a_stream_whose_room_is_full_is_still_given_up_in_time() -> None:
    # More than all sockets on the way can hold.
    flood = Flood(10_000, 5000)
    flood.go_on.set()
    settings = replace(SETTINGS, reattach_s=1.0, reattach_stream_bytes_max=50_000)
    async with site(flood, settings=settings) as here:
        async with here.post() as client:
            await cut_after(client, 10_000)
        await asyncio.wait_for(flood.gone.wait(), 5)
        assert flood.said < len(flood.texts)
        await until(lambda: here.coordinator.of("ended") == [("ended", "cancelled")])


async def test_all_streams_together_are_bounded_and_those_who_wait_go_on_when_there_is_room() -> None:
    flood = Flood(60, 2000)
    settings = replace(SETTINGS, reattach_s=30.0, reattach_bytes_max=200_000, reattach_stream_bytes_max=190_000)
    async with site(flood, settings=settings) as here:
        tokens = []
        for _ in range(4):
            async with here.post() as client:
                tokens.append((await cut_after(client, 100))[0])
        flood.go_on.set()
        await asyncio.sleep(0.3)
        assert len(here.coordinator.of("ended")) < 2, "one takes 135 kB, and two would be too much"
        wholes = [await here.rest(token, 0) for token in tokens]
        assert [text_in(whole) for whole in wholes] == ["".join(flood.texts)] * 4
        assert here.coordinator.of("ended") == [("ended", "finished")] * 4


async def test_a_position_that_is_no_longer_kept_or_not_yet_there_is_a_416_with_words() -> None:
    settings = replace(SETTINGS, reattach_stream_bytes_max=8_000)
    async with site(engine(), settings=settings) as here:
        async with here.post() as client:
            await client.head()
            whole = await client.read()
        token, last = client.headers["x-midstream-stream"], ids_in(whole)[-1]
        for position in (0, last + 1):
            async with here.get(token, f"?from={position}") as again:
                await again.head()
                told = json.loads(await again.read())["error"]
            assert (again.status, told["code"]) == (416, "position_not_kept")
            assert f"event {position} " in told["message"]
        first = int(re.findall(r"events (\d+) to", told["message"])[0])
        assert 1 < first < last
        assert whole.endswith(await here.rest(token, first - 1))


# ---- who reads


async def test_a_second_reader_ends_the_first_and_each_event_is_there_once() -> None:
    async with site(engine(Script(gap_s=0.01))) as here, here.post() as first:
        await first.head()
        await first.read(1000)
        token = first.headers["x-midstream-stream"]
        whole = await here.rest(token, 0)
        await first.read()
    assert not first.ended, "a connection that is taken over must not look like an answer's end"
    assert whole.startswith(whole_events(first.body))
    assert here.coordinator.of("ended") == [("ended", "finished")]


async def test_two_readers_that_race_leave_one_and_it_gets_everything() -> None:
    async with site(engine(Script(gap_s=0.01))) as here:
        async with here.post() as client:
            token, _ = await cut_after(client, 200)

        async def read() -> Connection:
            async with here.get(token, "?from=0") as again:
                await again.head()
                await again.read()
                return again

        got = await asyncio.gather(*(read() for _ in range(20)), return_exceptions=True)
        whole = await here.rest(token, 0)
        ended = [one for one in got if isinstance(one, Connection) and one.ended]
        assert len(ended) == 1
        assert ended[0].body == whole
        assert all(whole.startswith(one.body) for one in got if isinstance(one, Connection))
        assert here.coordinator.of("ended") == [("ended", "finished")]


async def test_a_reader_that_takes_nothing_is_none_after_a_while_and_its_stream_ends() -> None:
    # More than all sockets on the way can hold.
    flood = Flood(10_000, 5000)
    flood.go_on.set()
    settings = replace(SETTINGS, reattach_s=0.6, reattach_stream_bytes_max=100_000)
    async with site(flood, settings=settings) as here, here.post(narrow=True) as client:
        await client.head()
        # Nothing more is read, and nothing says so.
        await asyncio.wait_for(flood.gone.wait(), 10)
        assert flood.said < len(flood.texts)
        await until(lambda: here.coordinator.of("ended") == [("ended", "cancelled")])
        async with here.get(client.headers["x-midstream-stream"]) as again:
            await again.head()
        assert again.status == 410


async def test_a_slow_reader_that_takes_something_now_and_then_keeps_its_stream() -> None:
    flood = Flood(3000, 5000)
    flood.go_on.set()
    # Longer than a busy machine keeps a reader from reading, and shorter than all of it takes.
    settings = replace(SETTINGS, reattach_s=1.0, reattach_stream_bytes_max=100_000)
    async with site(flood, settings=settings) as here, here.post() as client:
        await client.head()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while not client.ended:
            await client.read(len(client.body) + 700_000)
            await asyncio.sleep(0.1)
        assert loop.time() - began_s > 1.5
        assert here.coordinator.of("ended") == [("ended", "finished")]
    assert text_in(client.body) == "".join(flood.texts)


async def test_a_peer_that_has_died_is_replaced_by_the_one_that_comes_back() -> None:
    flood = Flood(1000, 5000)
    flood.go_on.set()
    # Sockets of one machine hold far more than those that the daemon listens with.
    settings = replace(SETTINGS, reattach_stream_bytes_max=16 << 20)
    async with site(flood, settings=settings) as here, here.post(narrow=True) as dead:
        await dead.head()
        have = whole_events((await dead.read(30_000))[:30_000])
        await asyncio.sleep(0.3)
        have += await here.rest(dead.headers["x-midstream-stream"], position_in(have))
        assert here.coordinator.of("ended") == [("ended", "finished")]
    assert text_in(have) == "".join(flood.texts)


async def test_an_unstreamed_answer_has_no_name_and_ends_with_its_connection() -> None:
    async with site(engine(Script(gap_s=30.0))) as here, here.post(stream=False) as client:
        await until(lambda: bool(here.coordinator.engines[0].seen))
        client.cut()
        await asyncio.wait_for(here.coordinator.engines[0].seen[0].cancelled.wait(), 5)
        await until(lambda: here.coordinator.of("ended") == [("ended", "cancelled")])
