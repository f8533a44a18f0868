"""Where the peer's server listens: a bound on connections, and on how long one may say nothing.

Invariant: whoever has no credential costs a descriptor for SILENT_S at most, and a bounded number of them.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

CONNECTIONS_MAX = 256
SILENT_S = 10.0
HANDSHAKE_S = 5.0
KEEPALIVE_S = 60.0
READ_BUFFER_BYTES = 1 << 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_LOG = logging.getLogger("midstream.replicas")


@asynccontextmanager
async def serving(
    app: web.Application,
    listener: socket.socket,
    *,
    context: ssl.SSLContext | None = None,
    connections_max: int = CONNECTIONS_MAX,
    silent_s: float = SILENT_S,
) -> AsyncIterator[None]:
    """Serve an application on a listening socket while this is open."""
    silent: set[RequestHandler] = set()

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        silent.discard(request.protocol)
        return await handler(request)

    app.middlewares.insert(0, note)
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        lingering_time=0.0,
        auto_decompress=False,
        keepalive_timeout=KEEPALIVE_S,
        read_bufsize=READ_BUFFER_BYTES,
        shutdown_timeout=2.0,
    )
    await runner.setup()
    server = runner.server
    assert server is not None
    loop = asyncio.get_running_loop()

    def accepted() -> asyncio.Protocol:
        if len(server.connections) >= connections_max:
            return _Closing()
        connection = server()
        silent.add(connection)
        loop.call_later(silent_s, close_if_silent, connection)
        return connection

    def close_if_silent(connection: RequestHandler) -> None:
        if connection in silent:
            silent.discard(connection)
            if connection.transport is not None:
                connection.transport.abort()

    handshake_s = HANDSHAKE_S if context is not None else None
    if listener.family == socket.AF_UNIX:
        listening: asyncio.Server = await loop.create_unix_server(accepted, sock=listener)
    else:
        listening = await loop.create_server(accepted, sock=listener, ssl=context, ssl_handshake_timeout=handshake_s)
    try:
        yield
    finally:
        listening.close()
        await runner.cleanup()


class _Closing(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        _LOG.warning("event=peer_full remote=%s", transport.get_extra_info("peername"))
        transport.close()
