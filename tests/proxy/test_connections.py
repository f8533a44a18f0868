"""More connections than there may be: the rest is told so, and what runs goes on."""

import asyncio
import resource
import socket
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvloop

from midstream.proxy.connections import BoundedSite, connections_within, raise_descriptor_limit
from midstream.proxy.server import build_app, make_runner
from support.answers import Answer
from support.scripted import Script, ScriptedCoordinator, ScriptedEngine

ANSWER = Answer.words(8)


async def told(port: int) -> bytes:
    """What a client gets that only connects."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


def test_it_is_bounded_in_the_daemons_own_event_loop() -> None:
    async def refused() -> bytes:
        runner = make_runner(build_app(ScriptedCoordinator(ScriptedEngine(ANSWER, name="a"))), shutdown_timeout_s=0.5)
        await runner.setup()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.setblocking(False)
            site = BoundedSite(runner, listener, connections_max=1)
            await site.start()
            port = int(urlsplit(site.name).port or 0)
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            answer = await told(port)
            writer.close()
            await runner.cleanup()
        return answer

    assert b"1 connections are open" in uvloop.run(refused())


async def test_connections_past_the_bound_are_refused_with_a_reason_and_the_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = ScriptedEngine(ANSWER, Script(gap_s=0.05), name="a")
    runner = make_runner(build_app(ScriptedCoordinator(engine)), shutdown_timeout_s=0.5)
    async with engine.serving(), aiohttp.ClientSession() as http:
        await runner.setup()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            site = BoundedSite(runner, listener, connections_max=3)
            await site.start()
            port = int(urlsplit(site.name).port or 0)
            body = {"model": "tiny", "prompt": "x", "stream": True}
            async with http.post(f"{site.name}/v1/completions", json=body) as answer:
                idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
                for _ in range(3):
                    refused = await told(port)
                    assert refused.startswith(b"HTTP/1.1 503 ")
                    assert b"3 connections are open" in refused
                    assert b"ulimit -n" in refused
                assert b"[DONE]" in await answer.read()
            for _, writer in idle:
                writer.close()
                await writer.wait_closed()
            await asyncio.sleep(0.05)
            async with http.post(f"{site.name}/v1/completions", json=body) as answer:
                assert answer.status == 200
            await runner.cleanup()
    assert caplog.text.count("event=connections_full") == 1, "once, not for each"


def test_descriptors_are_left_for_what_runs() -> None:
    assert connections_within(1024) == 448
    assert connections_within(64) == 16
    assert raise_descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
