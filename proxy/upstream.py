"""The HTTP client to workers.

Owns connections to them. Invariant: connecting is bounded, silence is not (that is `stall`'s to judge); a pooled
connection that was closed while it lay idle is retried once on a fresh one and never taken for a death. It does not
decide what a lost worker means for a session.
"""

import asyncio
import io
import ssl
from collections.abc import AsyncIterable, Awaitable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from ..session.errors import EngineError
from .coordinator import Reason
from .fleet import Prover
from .kept import Kept
from .settings import ProxySettings
from .turns import Turns
from .upstream_socket import upstream_socket

T = TypeVar("T")

# Nothing that the library would add on its own: requests go on as they came.
_SKIPPED_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

_PIECEWISE_BYTES = 1 << 20


class UpstreamLost(EngineError):
    """A worker could not be reached, or its connection ended within an answer."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(slots=True)
class _Connection:
    """What tracing learns of the connection that a request got."""

    reused: bool = False


class Upstream:
    """Sessions of the client library, opened and closed with the application. `turns`: for those who come together.

    `prover`: the workers are nodes of a fleet, which want to know who asks.
    """

    def __init__(self, settings: ProxySettings, prover: Prover | None = None) -> None:
        self._settings = settings
        self._prover = prover
        self.turns = Turns()
        self._pooled: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the sessions; needs a running loop."""
        self._pooled = self._session(_connector(keepalive_timeout=self._settings.idle_connection_s))
        self._fresh = self._session(_connector(force_close=True))

    async def close(self) -> None:
        """Close all connections."""
        for session in (self._pooled, self._fresh):
            if session is not None:
                await session.close()

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_SKIPPED_AUTO_HEADERS,
            trace_configs=[trace],
            raise_for_status=False,
            trust_env=False,
        )

    async def request(
        self,
        method: str,
        url: URL,
        headers: CIMultiDict[str],
        body: bytes | AsyncIterable[bytes] | None,
        *,
        proven: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> aiohttp.ClientResponse:
        """Send a request and return when the headers of its answer are there. Raises UpstreamLost.

        `proven`: a gateway vouches for it. What only passes through is its client's own. `tls`: for one of the fleet,
        where workers are none.
        """
        context = tls or (self._prover.tls if self._prover is not None else None)
        if self._pooled is None or self._fresh is None:
            raise EngineError("the proxy's client is not open: start the application first")
        connection = _Connection()
        try:
            sent = self._proven(method, url, headers, body) if proven else headers
            return await _send(self._pooled, connection, method, url, sent, body, context)
        except UpstreamLost:
            # A body that was streamed from the client is used up; a bytes object can be sent again.
            if not connection.reused or not isinstance(body, bytes | None):
                raise
        # A proof holds once.
        sent = self._proven(method, url, headers, body) if proven else headers
        return await _send(self._fresh, _Connection(), method, url, sent, body, context)

    def _proven(
        self, method: str, url: URL, headers: CIMultiDict[str], body: bytes | AsyncIterable[bytes] | None
    ) -> CIMultiDict[str]:
        if self._prover is None or not isinstance(body, bytes):
            return headers
        proven = headers.copy()
        proven.update(self._prover.headers(method, url.raw_path_qs, body))
        return proven


def _connector(**options: Any) -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(limit=0, socket_factory=upstream_socket, **options)


async def _send(
    session: aiohttp.ClientSession,
    connection: _Connection,
    method: str,
    url: URL,
    headers: CIMultiDict[str],
    body: bytes | AsyncIterable[bytes] | None,
    tls: ssl.SSLContext | None,
) -> aiohttp.ClientResponse:
    # A large body is written in pieces, so that it does not hold up the streams of others.
    data = io.BytesIO(body) if isinstance(body, bytes) and len(body) > _PIECEWISE_BYTES else body
    try:
        return await session.request(
            method,
            url,
            headers=headers,
            data=data,
            allow_redirects=False,
            trace_request_ctx=connection,
            ssl=tls or True,
        )
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise UpstreamLost(Reason.UNREACHABLE, f"worker {_origin(url)} cannot be reached: {error}") from error
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        text = f"worker {_origin(url)} closed the connection before it answered ({type(error).__name__})"
        raise UpstreamLost(Reason.EOF, text) from error


async def _note_reuse(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    seen = context.trace_request_ctx
    if isinstance(seen, _Connection):
        seen.reused = True


def _origin(url: URL) -> str:
    return f"{url.host}:{url.port}"


def target(base_url: str, path_qs: str) -> URL:
    """A worker's URL for a raw path and query, which stay as the client wrote them."""
    return URL(base_url.rstrip("/") + path_qs, encoded=True)


async def read_some(answer: aiohttp.ClientResponse) -> bytes:
    """What has arrived of an answer's body, or b"" at its end. Raises UpstreamLost."""
    try:
        return await answer.content.readany()
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        text = f"the connection to worker {_origin(answer.url)} ended within an answer ({type(error).__name__})"
        raise UpstreamLost(Reason.EOF, text) from error


async def read_all(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """An answer's whole body. Raises UpstreamLost, and EngineError past the bound."""
    parts: list[bytes] = []
    size_bytes = 0
    while data := await read_some(answer):
        size_bytes += len(data)
        if size_bytes > bytes_max:
            raise EngineError(
                f"the engine's answer is larger than {bytes_max} bytes, the most that is kept: ask for less, or "
                "have it streamed"
            )
        parts.append(data)
    return b"".join(parts)


async def unless_interrupted(work: Awaitable[T], interrupted: "asyncio.Future[Reason]", kept: Kept) -> T:
    """Await `work`, but give it up as soon as the coordinator knows that the worker is gone (UpstreamLost).

    After a planned move it is only put aside, in `kept`: the worker is still needed.
    """
    task: asyncio.Future[Any] = asyncio.ensure_future(work)
    either: set[asyncio.Future[Any]] = {task, interrupted}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _abandon(task)
        raise
    if interrupted.done():
        reason = interrupted.result()
        if reason is Reason.MOVE:
            kept.hold(task)
            raise UpstreamLost(reason, "the session is moved")
        await _abandon(task)
        raise UpstreamLost(reason, f"the worker is gone: {reason}")
    result: T = task.result()
    return result


async def _abandon(task: "asyncio.Future[Any]") -> None:
    """Cancel work; an answer that came in spite of it is closed."""
    task.cancel()
    outcomes: list[object] = await asyncio.gather(task, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, aiohttp.ClientResponse):
            outcome.close()


def content_type(headers: Mapping[str, str]) -> str:
    """The media type of a message, without its parameters."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()
