"""How many connections clients may have open at once.

Invariant: whatever clients do, descriptors are left for what already runs: workers' streams, takeovers, holder and
mover. A connection past the bound gets a 503 and is closed; it never reaches the application.
"""

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from typing import cast

import msgspec
from aiohttp import web

from . import problems

_LOG = logging.getLogger("midstream.proxy")

# For everything that is no client's: sockets to holder and mover, arenas, looks into /proc, worker health checks.
RESERVED_DESCRIPTORS = 128
# Each client's connection may need another one to a worker.
_DESCRIPTORS_EACH = 2
_CONNECTIONS_MIN = 16
# Who connects and does not say who it is has a descriptor for no longer than that.
_HANDSHAKE_S = 5.0
# Clients that connect at once and have not been accepted yet.
BACKLOG = 1024


def raise_descriptor_limit() -> int:
    """Have as many descriptors as this process may; what it then may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_within(descriptor_count: int) -> int:
    """How many client connections so many descriptors allow."""
    return max(_CONNECTIONS_MIN, (descriptor_count - RESERVED_DESCRIPTORS) // _DESCRIPTORS_EACH)


class BoundedSite(web.BaseSite):
    """An application on a listening socket, for at most `connections_max` connections."""

    __slots__ = ("_connections_max", "_full", "_sock", "_tls")

    def __init__(
        self, runner: web.AppRunner, sock: socket.socket, *, connections_max: int, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(runner, backlog=BACKLOG)
        self._tls = tls
        self._sock = sock
        self._connections_max = connections_max
        self._full = False

    @property
    def name(self) -> str:
        """Where it listens."""
        host, port = self._sock.getsockname()[:2]
        return f"{'http' if self._tls is None else 'https'}://{host}:{port}"

    async def start(self) -> None:
        """Listen."""
        await super().start()
        server = self._runner.server
        assert server is not None
        factory = self._bounded(server)
        self._server = await asyncio.get_running_loop().create_server(
            factory,
            sock=self._sock,
            backlog=self._backlog,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
        )

    def _bounded(self, server: web.Server) -> Callable[[], asyncio.Protocol]:
        def protocol() -> asyncio.Protocol:
            was_full, self._full = self._full, len(server.connections) >= self._connections_max
            if not self._full:
                return server()
            if not was_full:
                _LOG.warning("event=connections_full connections=%d", self._connections_max)
            return _Refusal(problems.too_many_connections(self._connections_max))

        return protocol


class _Refusal(asyncio.Protocol):
    """Says what is the matter, and closes."""

    def __init__(self, problem: problems.Problem) -> None:
        error = {"message": problem.message, "type": problem.kind, "param": None, "code": problem.code}
        body = msgspec.json.encode({"error": error})
        self._answer = (
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Retry-After: %d\r\nContent-Length: %d\r\n\r\n" % (problem.retry_after_s or 1, len(body))
        ) + body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods, but not its classes.
        writing = cast(asyncio.WriteTransport, transport)
        writing.write(self._answer)
        writing.close()
