"""Cases from the field: on the wire (w1 to w7) and fields that a client must not set (s6), on scripted engines."""

import asyncio
import json
import socket
import time

import pytest

from midstream.proxy.settings import ProxySettings
from midstream.proxy.stall import StallPolicy
from midstream.session.errors import Refused
from support.answers import Answer, Voice, undisturbed
from support.proxying import proxied
from support.raw_engine import SSE_HEAD, RawEngine, chunked, read_request
from support.scripted import Script, ScriptedCoordinator, ScriptedEngine

ANSWER = Answer.words(6)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_w1_a_stream_written_in_pieces_of_any_size_comes_out_the_same(size: int) -> None:
    answer = Answer(("é👩‍🚀".encode(), b" x", "\u2028".encode()))
    whole = undisturbed(Voice(answer, chat=True, wants_ids=True))
    hidden = undisturbed(Voice(answer, chat=True, wants_ids=False))

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await read_request(reader)
        writer.write(SSE_HEAD)
        for start in range(0, len(whole), size):
            writer.write(chunked(whole[start : start + size]))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with proxied(ScriptedCoordinator(RawEngine(peer))) as client:
        got = await client.chat()
    assert got.raw == hidden


async def test_w2_odd_but_legal_streams_are_forwarded_in_order_as_they_came() -> None:
    big = "x" * (2 << 20)

    def event(text: str, *, end: str = "\n\n", prefix: str = "") -> str:
        choice = {"index": 0, "text": text, "finish_reason": None}
        return f"{prefix}data: {json.dumps({'id': 'a', 'choices': [choice]})}{end}"

    finish = 'data: {"id":"a","choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n'
    parts = [
        ": a comment\n\n" + event("1") + event("2") + event("3") + event("4") + event("5"),
        "event: chunk\n",
        event("6", end="\r\n\r\n"),
        event("7", end="\r\r", prefix="id: 9\r"),
        event(big),
        finish + "data: [DONE]",
    ]

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(SSE_HEAD)
        for part in parts:
            writer.write(chunked(part.encode()))
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with proxied(ScriptedCoordinator(RawEngine(peer))) as client:
        got = await client.complete()
    assert got.raw == "".join(parts).encode()


async def test_w2_an_event_past_the_bound_ends_in_a_clear_error() -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(SSE_HEAD + chunked(b"data: " + b"x" * 200_000))
        await writer.drain()
        await reader.read()

    coordinator = ScriptedCoordinator(RawEngine(peer))
    coordinator.takeover_refusal = Refused("no_worker", "no worker is left: start one", retry_after_s=3)
    async with proxied(coordinator, ProxySettings(event_bytes_max=100_000)) as client:
        got = await client.complete()
    (chunk,) = got.chunks
    assert chunk["error"]["code"] == "no_worker"
    assert coordinator.of("take_over")[0][1] == "engine_error"


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("at", [None, 3])
async def test_w3_there_is_exactly_one_usage_chunk_and_only_when_asked_for(at: int | None, usage: bool) -> None:
    coordinator = ScriptedCoordinator(ScriptedEngine(ANSWER, Script(at=at), name="a"), ScriptedEngine(ANSWER, name="b"))
    async with proxied(coordinator) as client:
        got = await client.complete(stream_options={"include_usage": usage})
    assert got.text == ANSWER.text()
    expected = [{"prompt_tokens": 3, "total_tokens": 9, "completion_tokens": 6}] if usage else []
    assert got.usages == expected


async def test_w4_a_pooled_connection_that_the_engine_closed_is_retried_quietly() -> None:
    """The engine closes an idle connection at the very moment at which the next request comes: the worst case."""
    body = Voice(ANSWER, chat=False, wants_ids=True).whole(6, "length")
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    read_count = 0

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal read_count
        await read_request(reader)
        read_count += 1
        writer.write(answer)
        await writer.drain()
        # The next request on this connection gets no byte of an answer.
        await reader.readuntil(b"\r\n\r\n")

    engine = RawEngine(peer)
    coordinator = ScriptedCoordinator(engine)
    async with proxied(coordinator) as client:
        for _ in range(200):
            got = await client.complete(stream=False)
            assert got.status == 200
    assert read_count == 200
    assert engine.connection_count == 200
    assert coordinator.of("take_over") == []


async def test_w4_a_fresh_connection_that_ends_without_an_answer_is_a_death() -> None:
    coordinator = ScriptedCoordinator(
        ScriptedEngine(ANSWER, Script(drops_request=True), name="a"), ScriptedEngine(ANSWER, name="b")
    )
    async with proxied(coordinator) as client:
        got = await client.complete()
    assert got.text == ANSWER.text()
    assert len(coordinator.engines[0].seen) == 1
    assert [call[1] for call in coordinator.of("take_over")] == ["eof"]


async def test_w5_equal_request_ids_of_clients_become_different_inner_ids() -> None:
    coordinator = ScriptedCoordinator(ScriptedEngine(ANSWER, Script(gap_s=0.01), name="a"))
    async with proxied(coordinator) as client:
        await asyncio.gather(*(client.complete(), client.complete()))
        path, body = "/v1/completions", {"prompt": "x", "stream": True}
        gots = await asyncio.gather(*(client.post(path, body, X_Request_Id="same") for _ in range(2)))
    for got in gots:
        assert got.text == ANSWER.text()
        assert got.headers["X-Request-Id"] == "same"
    inner = [seen.headers["X-Request-Id"] for seen in coordinator.engines[0].seen]
    assert len(set(inner)) == 4
    sessions = [s.body["kv_transfer_params"]["midstream"]["session"] for s in coordinator.engines[0].seen]
    assert inner == sessions


@pytest.mark.parametrize("reason", ["loading", "draining"])
async def test_w6_while_no_worker_is_ready_the_cause_is_named(reason: str) -> None:
    coordinator = ScriptedCoordinator(ScriptedEngine(ANSWER, name="a"))
    coordinator.refusal = Refused(reason, f"the engine is {reason}: try again", retry_after_s=7)
    async with proxied(coordinator) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
            got = await client.post(path, {"prompt": "x", "stream": True})
            assert got.status == 503
            assert got.headers["Retry-After"] == "7"
            assert got.json["error"]["code"] == reason
            assert reason in got.json["error"]["message"]


async def test_w7_silence_before_an_unstreamed_answer_is_no_death() -> None:
    coordinator = ScriptedCoordinator(ScriptedEngine(ANSWER, Script(gap_s=0.6), name="a"))
    settings = ProxySettings(
        stall=StallPolicy(floor_s=0.01, factor=1, ceiling_s=0.01), connect_timeout_s=0.2, idle_connection_s=0.1
    )
    async with proxied(coordinator, settings) as client:
        started_s = time.monotonic()
        got = await client.complete(stream=False)
    assert time.monotonic() - started_s >= 0.6
    assert got.json["choices"][0]["text"] == ANSWER.text()
    assert coordinator.of("take_over") == []


SMUGGLED = {"midstream": {"v": 1, "session": "0" * 32, "generation": 9, "resume": {"outputs": [1], "kv": "held"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": SMUGGLED},
        {"vllm_xargs": {"kv_transfer_params": SMUGGLED, "kept": 1}},
        {"kv_transfer_params": SMUGGLED, "n": 2},
        {"vllm_xargs": {"kv_transfer_params": SMUGGLED}, "n": 2},
        {"kv_transfer_params": SMUGGLED, "use_beam_search": True},
    ],
)
async def test_s6_a_client_cannot_set_transfer_fields(fields: dict[str, object]) -> None:
    coordinator = ScriptedCoordinator(ScriptedEngine(ANSWER, name="a"))
    async with proxied(coordinator) as client:
        got = await client.complete(**fields)
    for index in range(int(str(fields.get("n", 1)))):
        assert "".join(c["text"] for c in got.choices if c["index"] == index) == ANSWER.text()
    # Each choice is a request of its own; what cannot go on exactly has no marker.
    assert len(coordinator.engines[0].seen) == fields.get("n", 1)
    for seen in coordinator.engines[0].seen:
        assert b'"generation":9' not in seen.raw.replace(b" ", b"")
        assert ("kv_transfer_params" in seen.body) == ("use_beam_search" not in fields)
        assert "kv_transfer_params" not in seen.body.get("vllm_xargs", {})


@pytest.mark.parametrize("name", ["kv_transfer_params", "kv_transfer\\u005fparams"])
async def test_s6_a_marker_cannot_be_smuggled_through_other_paths(name: str) -> None:
    raw = f'{{"a": 1.0, "{name}": {json.dumps(SMUGGLED)}}}'.encode()
    coordinator = ScriptedCoordinator(ScriptedEngine(ANSWER, name="a"))
    async with proxied(coordinator) as client:
        await client.post("/inference/v1/generate", raw)
    assert coordinator.engines[0].seen[0].raw == b'{"a":1.0}'
