"""A streamed session's handler, where its worker answers with something else than a stream."""

import asyncio

from midstream.proxy.coordinator import Reason
from support.answers import Answer
from support.proxying import proxied
from support.raw_engine import RawEngine, read_request
from support.scripted import ScriptedCoordinator, ScriptedEngine

HALF_AN_ERROR = b'HTTP/1.1 500 Internal Server Error\r\nContent-Length: 99\r\n\r\n{"er'


async def test_a_worker_that_hangs_within_its_error_does_not_keep_the_session() -> None:
    begun = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HALF_AN_ERROR)
        await writer.drain()
        begun.set()
        await reader.read()

    coordinator = ScriptedCoordinator(RawEngine(peer), ScriptedEngine(Answer.words(8), name="b"))
    async with proxied(coordinator) as client, asyncio.timeout(10):
        asking = asyncio.create_task(client.complete())
        await begun.wait()
        await asyncio.sleep(0.1)
        coordinator.interrupt(Reason.HEALTH)
        got = await asking
    assert (got.status, got.finishes) == (200, ["length"])
    assert [call[1] for call in coordinator.of("take_over")] == [Reason.HEALTH]
