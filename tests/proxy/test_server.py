"""The proxy as a server: bounds, errors, pass-through, clients that leave or read slowly, waiting, endings."""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from midstream.proxy.coordinator import Reason
from midstream.proxy.settings import ProxySettings
from midstream.session.errors import Refused
from support.answers import DONE, Answer, Voice
from support.proxying import proxied
from support.raw_engine import SSE_HEAD, RawEngine, chunked, read_request
from support.scripted import Fate, Script, ScriptedCoordinator, ScriptedEngine

ANSWER = Answer.words(8)


def one(script: Script | None = None, answer: Answer = ANSWER) -> ScriptedCoordinator:
    """A coordinator with one worker."""
    return ScriptedCoordinator(ScriptedEngine(answer, script if script is not None else Script(), name="a"))


def two(first: Script) -> ScriptedCoordinator:
    """A coordinator with a worker that fails and one that does not."""
    return ScriptedCoordinator(ScriptedEngine(ANSWER, first, name="a"), ScriptedEngine(ANSWER, name="b"))


@pytest.mark.parametrize("raw", [b"{not json", b"[1]", b"\xff", b"", b'"x"'])
async def test_a_body_that_is_not_a_json_object_is_a_400_in_openais_shape(raw: bytes) -> None:
    coordinator = one()
    async with proxied(coordinator) as client:
        got = await client.post("/v1/chat/completions", raw)
        assert (await client.complete()).status == 200
    assert got.status == 400
    assert set(got.json["error"]) == {"message", "type", "param", "code"}
    assert "request body" in got.json["error"]["message"]


async def test_a_body_of_100_mb_is_refused_without_being_read() -> None:
    async with proxied(one()) as client:
        got = await client.post("/v1/completions", io.BytesIO(b"x" * (100 << 20)))
        assert got.status == 413
        assert "33554432 bytes" in got.json["error"]["message"]
        assert "body_bytes_max" in got.json["error"]["message"]
        assert (await client.complete()).text == ANSWER.text()


async def test_a_body_without_a_length_is_refused_as_soon_as_it_is_too_long() -> None:
    sent_bytes = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent_bytes
        while sent_bytes < 100 << 20:
            yield b"x" * 100_000
            sent_bytes += 100_000

    async with proxied(one(), ProxySettings(body_bytes_max=1 << 20)) as client:
        async with client.session.post(client.url + "/v1/completions", data=body()) as answer:
            assert answer.status == 413
        assert (await client.complete()).text == ANSWER.text()
    assert sent_bytes < 100 << 20


async def test_bodies_of_all_requests_together_are_bounded_and_given_back() -> None:
    leaving = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield b"x" * 40_000
        await leaving.wait()

    settings = ProxySettings(bodies_bytes_max=100_000)
    async with proxied(one(), settings) as client:
        url = client.url + "/v1/completions"
        halves = [asyncio.create_task(client.session.post(url, data=half())) for _ in range(2)]
        while (await client.post("/v1/completions", io.BytesIO(b"x" * 40_000))).status != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await client.complete()).text == ANSWER.text(), "a small one still fits"
        leaving.set()
        for answer in await asyncio.gather(*halves):
            assert answer.status == 400
            answer.close()
        for _ in range(5):
            assert (await client.post("/v1/completions", io.BytesIO(b"x" * 90_000))).status == 400


async def test_a_body_of_a_few_megabytes_goes_through_whole() -> None:
    coordinator = one()
    async with proxied(coordinator) as client:
        got = await client.post("/v1/completions", {"prompt": "é" * 3_000_000, "stream": True})
    assert got.text == ANSWER.text()
    assert len(coordinator.engines[0].seen[0].body["prompt"]) == 3_000_000


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_an_engines_own_error_is_passed_on_as_it_is(status: int, stream: bool) -> None:
    body = b'{"error": {"message": "The model `x` does not exist.",  "code": 404}}'
    coordinator = one(Script(status=status, body=body))
    async with proxied(coordinator, ProxySettings(error_grace_s=0.01)) as client:
        got = await client.complete(stream=stream)
    assert (got.status, got.raw) == (status, body)
    assert got.headers["Content-Type"].startswith("application/json")
    assert coordinator.of("take_over") == []
    assert len(coordinator.of("ended")) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_500_from_an_engine_that_is_dying_is_an_interruption(stream: bool) -> None:
    coordinator = two(Script(status=500, body=b"{}"))
    async with proxied(coordinator, ProxySettings(error_grace_s=1)) as client:
        asking = asyncio.create_task(client.complete(stream=stream))
        await asyncio.sleep(0.2)
        coordinator.interrupt(Reason.PROCESS_DEATH)
        got = await asking
    assert got.status == 200
    assert [call[1] for call in coordinator.of("take_over")] == [Reason.PROCESS_DEATH]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_worker_that_is_down_is_gone_around(stream: bool) -> None:
    coordinator = two(Script())
    async with proxied(coordinator, ProxySettings()) as client:
        coordinator.engines[0].url = "http://127.0.0.1:9"
        got = await client.complete(stream=stream)
    assert got.status == 200
    assert [call[1] for call in coordinator.of("take_over")] == [Reason.UNREACHABLE]


async def test_everything_else_is_passed_through_byte_for_byte() -> None:
    raw = b'{"input" :"x",\n "n":1.50}'
    async with proxied(one()) as client:
        got = await client.post("/v1/embeddings?a=%2F&b=c+d", raw, X_Request_Id="mine", Accept_Encoding="gzip")
        assert got.raw == raw
        assert got.headers["X-Path"] == "/v1/embeddings?a=%2F&b=c+d"
        assert got.headers["X-Engine"] == "a"
        async with client.session.get(client.url + "/metrics") as answer:
            assert answer.status == 200


async def test_a_large_upload_that_is_no_json_is_streamed_through() -> None:
    coordinator = one()
    async with proxied(coordinator, ProxySettings(body_bytes_max=1000)) as client:
        got = await client.post("/v1/audio/transcriptions", b"\0" * 500_000, Content_Type="audio/wav")
        assert len(got.raw) == 500_000
        refused = await client.post("/v1/embeddings", b" " * 2000)
        assert refused.status == 413


@pytest.mark.parametrize("at_token", [0, 3])
async def test_a_client_that_leaves_ends_the_engines_work_within_a_second(at_token: int) -> None:
    coordinator = one(Script(at=at_token, fate=Fate.STALLS))
    engine = coordinator.engines[0]
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(client.complete())
        await engine.meets_fate.wait()
        asking.cancel()
        left_s = time.monotonic()
        await asyncio.wait_for(engine.seen[0].cancelled.wait(), 1)
        assert time.monotonic() - left_s < 1
        await asyncio.sleep(0.05)
    assert coordinator.of("ended") == [("ended", "cancelled")]


async def test_a_client_that_leaves_as_soon_as_it_has_everything_was_served() -> None:
    # The engine's connection stays open after [DONE], and the client does not wait for its end.
    left = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        voice = Voice(ANSWER, chat=False, wants_ids=True)
        said = voice.tokens(0, 8, first=True, finish=ANSWER.finish) + DONE
        writer.write(SSE_HEAD + chunked(said))
        await left.wait()

    coordinator = ScriptedCoordinator(RawEngine(peer))
    async with proxied(coordinator) as client:
        body = {"prompt": "x", "stream": True}
        async with client.session.post(client.url + "/v1/completions", json=body) as answer:
            while not (await answer.content.readuntil(b"\n\n")).endswith(b"[DONE]\n\n"):
                pass
            answer.close()
        async with asyncio.timeout(5):
            while not coordinator.of("ended"):  # noqa: ASYNC110 (nobody tells that it has ended)
                await asyncio.sleep(0.01)
        left.set()
    assert coordinator.of("ended") == [("ended", "finished")]


async def test_an_unstreamed_client_that_leaves_ends_the_engines_work_too() -> None:
    coordinator = one(Script(gap_s=30))
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(client.complete(stream=False))
        while not coordinator.engines[0].seen:  # noqa: ASYNC110 (the engine has no event for an arrival)
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait_for(coordinator.engines[0].seen[0].cancelled.wait(), 1)
        await asyncio.sleep(0.05)
    assert coordinator.of("ended") == [("ended", "cancelled")]


async def test_a_client_that_leaves_while_its_session_waits_is_noticed() -> None:
    coordinator = two(Script(at=3))
    coordinator.takeover_wait_s = 30
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(client.complete())
        await coordinator.engines[0].meets_fate.wait()
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.sleep(0.3)
        assert coordinator.of("ended") == [("ended", "cancelled")]


async def test_the_engine_is_read_no_faster_than_the_client_reads() -> None:
    event = b'data: {"id":"a","choices":[{"index":0,"text":"' + b"x" * 100_000 + b'"}]}\n\n'
    written_bytes = 0

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written_bytes
        await read_request(reader)
        writer.write(SSE_HEAD)
        while written_bytes < 400_000_000:
            writer.write(chunked(event))
            await writer.drain()
            written_bytes += len(event)

    async with (
        proxied(ScriptedCoordinator(RawEngine(peer))) as client,
        client.session.post(client.url + "/v1/completions", json={"prompt": "x", "stream": True}) as got,
    ):
        await got.content.read(100)
        before = -1
        while before != written_bytes:
            before = written_bytes
            await asyncio.sleep(0.5)
        at_rest = written_bytes
        got.close()
    # What lies in between are the kernel's socket buffers and the bounded ones of both libraries.
    assert at_rest < 100_000_000


async def test_while_a_session_waits_its_client_gets_comments() -> None:
    coordinator = two(Script(at=3))
    coordinator.takeover_wait_s = 0.5
    settings = ProxySettings(keepalive_first_s=0.05, keepalive_s=0.1)
    async with proxied(coordinator, settings) as client:
        got = await client.complete()
    assert got.text == ANSWER.text()
    assert 3 <= got.raw.count(b": waiting\n\n") <= 10  # on a busy machine the wait is longer
    before, _, after = got.raw.partition(b": waiting\n\n")
    assert before.count(b"data: ") == 3
    assert b": waiting" not in after.split(b"data: ", 1)[1]


@pytest.mark.parametrize("comments_first", [False, True])
async def test_a_session_that_nobody_can_take_ends_in_one_clear_error(comments_first: bool) -> None:
    coordinator = two(Script(at=0))
    coordinator.takeover_refusal = Refused("no_worker", "no worker is left: start one", retry_after_s=4)
    coordinator.takeover_wait_s = 0.2 if comments_first else 0
    # Before anything was sent the whole answer is an error; the engine's stream has begun here, so it is in-band.
    async with proxied(coordinator, ProxySettings(keepalive_first_s=0.05)) as client:
        got = await client.complete()
        unstreamed = await client.complete(stream=False)
        coordinator.engines[0].url = "http://127.0.0.1:9"
        nothing_sent = await client.complete() if not comments_first else None
    assert got.chunks == [
        {
            "error": {
                "message": "no worker is left: start one",
                "type": "service_unavailable",
                "param": None,
                "code": "no_worker",
            }
        }
    ]
    for whole in (unstreamed, nothing_sent):
        if whole is not None:
            assert whole.status == 503
            assert whole.headers["Retry-After"] == "4"
            assert whole.json["error"]["code"] == "no_worker"
    assert {call[1] for call in coordinator.of("ended")} == {"failed"}


async def test_takeovers_are_bounded() -> None:
    coordinator = one(Script(at=2))
    async with proxied(coordinator, ProxySettings(takeovers_max=3)) as client:
        got = await client.complete()
    assert len(coordinator.of("take_over")) == 3
    assert got.chunks[-1]["error"]["code"] == "takeovers_exhausted"
    assert got.text == "".join(f" w{i}" for i in range(2))


async def test_a_trailer_tells_what_happened_to_the_client_that_asked() -> None:
    coordinator = two(Script(at=3))
    async with proxied(coordinator) as client:
        got = await client.post("/v1/completions", {"prompt": "x", "stream": True}, X_Midstream_Report="1")
        plain = await client.complete()
    assert got.raw.split(b"\n\n")[-2].startswith(b": midstream outcome=exact takeovers=1 gap_ms=")
    assert b"midstream" not in plain.raw
    assert "X-Midstream-Report" not in coordinator.engines[0].seen[0].headers


@pytest.mark.parametrize(
    ("fields", "assigned"),
    [({}, True), ({"temperature": 0}, False), ({"temperature": 1, "seed": 7}, False), ({"temperature": 0.5}, True)],
)
async def test_unseeded_sampling_gets_a_seed_that_stays_the_same(fields: dict[str, Any], assigned: bool) -> None:
    coordinator = two(Script(at=3))
    async with proxied(coordinator) as client:
        await client.complete(**fields)
    first, second = (engine.seen[0].body.get("seed") for engine in coordinator.engines)
    assert first == second
    assert (first is not None) == (assigned or "seed" in fields)
    assert fields.get("seed", first) == first


async def test_seeds_are_left_alone_when_told_so() -> None:
    coordinator = one()
    async with proxied(coordinator, ProxySettings(assign_seed=False)) as client:
        await client.complete(temperature=1)
    assert "seed" not in coordinator.engines[0].seen[0].body


async def test_more_requests_than_the_bound_are_refused_and_the_others_go_on() -> None:
    coordinator = one(Script(gap_s=0.05))
    async with proxied(coordinator, ProxySettings(requests_max=2)) as client:
        gots = await asyncio.gather(*(client.complete() for _ in range(3)))
        assert (await client.complete()).status == 200
    assert sorted(got.status for got in gots) == [200, 200, 503]
    (refused,) = (got for got in gots if got.status == 503)
    assert refused.json["error"]["code"] == "too_many_requests"


async def test_forty_sessions_at_once_lose_their_worker_and_none_is_mixed_up() -> None:
    coordinator = two(Script(at=5, gap_s=0.005))
    async with proxied(coordinator) as client:
        gots = await asyncio.gather(*(client.chat(return_token_ids=True) for _ in range(40)))
    for got in gots:
        assert got.text == ANSWER.text()
        assert got.ids == list(ANSWER.ids)
    assert len({got.chunks[0]["id"] for got in gots}) == 40


async def test_a_request_goes_out_as_it_came_but_for_what_the_proxy_must_add() -> None:
    coordinator = one()
    body = {
        "model": "tiny",
        "prompt": "é\u2028",
        "stream": True,
        "temperature": 0,
        "logit_bias": {"1": 0.25},
        "x": None,
    }
    async with proxied(coordinator) as client:
        await client.post("/v1/completions", body, Authorization="Bearer t", X_Other="o")
    seen = coordinator.engines[0].seen[0]
    assert json.loads(seen.raw).items() >= body.items()
    assert set(seen.body) - set(body) == {"return_token_ids", "kv_transfer_params"}
    assert seen.headers["Authorization"] == "Bearer t"
    assert seen.headers["X-Other"] == "o"


async def test_answers_without_a_body_are_passed_through() -> None:
    async with proxied(one()) as client, client.session.head(client.url + "/health") as answer:
        assert answer.status == 200
        assert answer.headers["X-Engine"] == "a"


async def test_a_coordinator_that_breaks_fails_one_session_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = two(Script(at=3))
    take_over = coordinator.take_over

    async def broken(*_: object, **more: object) -> Any:
        coordinator.take_over = take_over  # type: ignore[method-assign]
        raise KeyError("a bug")

    coordinator.take_over = broken  # type: ignore[method-assign,assignment]
    async with proxied(coordinator) as client:
        with pytest.raises(aiohttp.ClientError):
            await client.complete()
        assert (await client.complete()).text == ANSWER.text()
    assert coordinator.of("ended") == [("ended", "failed"), ("ended", "finished")]


async def test_a_client_does_not_wait_for_an_engine_that_keeps_its_connection_open_after_done() -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        choice = b'{"index":0,"text":"x","finish_reason":"stop"}'
        writer.write(SSE_HEAD + chunked(b'data: {"id":"a","choices":[' + choice + b"]}\n\ndata: [DONE]\n\n"))
        await writer.drain()
        await reader.read()
        left.set()

    left = asyncio.Event()
    coordinator = ScriptedCoordinator(RawEngine(peer))
    async with proxied(coordinator) as client:
        got = await client.complete()
        # The engine is given up later, when it had the time to end by itself.
        assert coordinator.of("ended") == []
        await asyncio.wait_for(left.wait(), 10)
    assert got.events[-1] == b"[DONE]"
