"""A scripted worker whose bytes a test writes itself: for streams that no engine should send, and for connections."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from .answers import Answer
from .scripted import ScriptedEngine

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawEngine(ScriptedEngine):
    """A worker whose socket a test writes to itself."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(Answer.words(1), name="raw")
        self._peer = peer
        self.connection_count = 0

    @asynccontextmanager
    async def serving(self, **_: object) -> AsyncIterator["RawEngine"]:
        """Serve on a free port; each connection is handed to the peer."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connection_count += 1
            try:
                await self._peer(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """One request with its body; b"" when the peer closed instead."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
    return head + await reader.readexactly(length)


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """The head of a request that has no body; b"" when the peer closed instead."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    """One HTTP chunk."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
