"""What is passed through, and what is not: private paths, odd targets, bodies that engines might read otherwise."""

import asyncio
import json
import logging
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from midstream.proxy.settings import ProxySettings
from midstream.sidecar import logs
from midstream.sidecar.config import Log
from support.answers import Answer
from support.proxying import Client, proxied
from support.scripted import ScriptedCoordinator, ScriptedEngine

ANSWER = Answer.words(3)
SMUGGLED = {"midstream": {"v": 1, "session": "ab" * 16, "generation": 9}}
PRIVATE = ProxySettings(private_paths=frozenset({"/sleep", "/midstream/reservations/"}))


def one() -> ScriptedCoordinator:
    """A coordinator with one worker."""
    return ScriptedCoordinator(ScriptedEngine(ANSWER, name="a"))


async def told(client: Client, request: bytes) -> bytes:
    """What the proxy says to some bytes, to the end of the connection."""
    parts = urlsplit(client.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(request)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


def get(target: str, *, method: str = "GET", head: str = "", body: bytes = b"") -> bytes:
    """A request as bytes."""
    return f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{head}\r\n".encode() + body


@pytest.mark.parametrize(
    "target", ["/sleep", "/%73leep", "/sleep?level=1", "http://x/sleep", "/midstream/reservations/" + "ab" * 16]
)
async def test_private_paths_are_not_served_however_they_are_written(target: str) -> None:
    coordinator = one()
    async with proxied(coordinator, PRIVATE) as client:
        assert b'"code":"private_path"' in await told(client, get(target, method="DELETE"))
        assert b"private_path" not in await told(client, get("/midstream/reservations"))
    assert len(coordinator.engines[0].seen) <= 1


@pytest.mark.parametrize("target", ["http://elsewhere.example:9/v1/other?a=%2F", "http://@127.0.0.1:9/v1/other?a=%2F"])
async def test_a_target_with_a_host_goes_to_the_engine_and_nowhere_else(target: str) -> None:
    coordinator = one()
    async with proxied(coordinator) as client:
        answer = await told(client, get(target, method="POST", head="Content-Length: 2\r\n", body=b"{}"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"X-Path: /v1/other?a=%2F" in answer


@pytest.mark.parametrize(
    "raw",
    [
        f'{{"a": NaN, "kv_transfer_params": {json.dumps(SMUGGLED)}}}'.encode(),
        f'{{"a": "\\ud800", "kv_transfer_params": {json.dumps(SMUGGLED)}}}'.encode(),
        json.dumps({"kv_transfer_params": SMUGGLED}).encode("utf-16"),
        json.dumps({"kv_transfer_params": SMUGGLED}).encode("utf-32-le"),
        b"\xef\xbb\xbf" + json.dumps({"kv_transfer_params": SMUGGLED}).encode(),
        b'{"a": ' + b"[" * 3000 + b"]" * 3000 + f', "kv_transfer_params": {json.dumps(SMUGGLED)}}}'.encode(),
    ],
    ids=["NaN", "surrogate", "utf-16", "utf-32", "bom", "deep"],
)
async def test_a_marker_is_not_smuggled_in_json_that_only_lenient_parsers_read(raw: bytes) -> None:
    coordinator = one()
    async with proxied(coordinator) as client:
        got = await client.post("/inference/v1/generate", raw)
    assert got.status == 400
    assert "not JSON" in got.json["error"]["message"]
    assert coordinator.engines[0].seen == []


@pytest.mark.parametrize("content_type", ["application/vnd.x+json", "Application/JSON ; charset=x"])
async def test_whatever_frameworks_take_for_json_is_checked(content_type: str) -> None:
    coordinator = one()
    raw = json.dumps({"a": 1, "kv_transfer_params": SMUGGLED}).encode()
    async with proxied(coordinator) as client:
        await client.post("/inference/v1/generate", raw, Content_Type=content_type)
        head = f"Content-Length: {len(raw)}\r\n"
        await told(client, get("/inference/v1/generate", method="POST", head=head, body=raw))
    assert [seen.raw for seen in coordinator.engines[0].seen] == [b'{"a":1}', b'{"a":1}']


async def test_json_that_is_too_deep_is_a_400() -> None:
    coordinator = one()
    async with proxied(coordinator) as client:
        for raw in (b"[" * 100_000, b'{"a":' * 100_000):
            got = await client.post("/v1/completions", raw)
            assert got.status == 400
            assert "recursion" in got.json["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/other"])
async def test_half_a_body_is_waited_for_only_so_long(path: str) -> None:
    async with proxied(one(), ProxySettings(body_timeout_s=0.2)) as client:
        head = "Content-Type: application/json\r\nContent-Length: 100\r\n"
        answer = await told(client, get(path, method="POST", head=head, body=b'{"a":'))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.2 s" in answer


@pytest.fixture
def configured() -> Iterator[None]:
    """The sidecar's logging, taken back afterwards."""
    root, server = logging.getLogger(), logging.getLogger("aiohttp.server")
    before = root.handlers[:], root.level, server.filters[:]
    logs.configure(Log())
    yield
    root.handlers[:], server.filters[:] = before[0], before[2]
    root.setLevel(before[1])


@pytest.mark.usefixtures("configured")
async def test_what_is_no_http_does_not_fill_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    async with proxied(one()) as client:
        for request in (b"\x16\x03\x01\r\n\r\n", get("/\x01"), get("/", head="X Foo: 1\r\n")):
            assert b" 400 " in await told(client, request)
        chunks = "Transfer-Encoding: chunked\r\nContent-Type: application/json\r\n"
        await told(client, get("/v1/completions", method="POST", head=chunks, body=b"1\r\n{\r\nzz\r\n"))
        assert (await client.complete()).status == 200
    assert "Traceback" not in capsys.readouterr().err
