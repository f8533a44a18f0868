"""HTTP as the proxy sees it, without sockets: requests and answers as messages on simulated connections.

Owns what stands in for aiohttp's objects: `SimUpstream` for the client, `SimAnswer` for what it reads, `SimRequest` for
the server's side, under aiohttp's own responses. Invariant: what breaks raises what aiohttp raises, where aiohttp
raises it. One connection carries one request.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from midstream.proxy.coordinator import Reason
from midstream.proxy.fleet import Prover
from midstream.proxy.settings import ProxySettings
from midstream.proxy.upstream import Upstream, UpstreamLost
from midstream.proxy.waiting import COMMENT

from .loop import Process
from .network import CLOSED, WINDOW, End, Network

OnDefect = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request on its way."""

    method: str
    raw_path: str
    headers: CIMultiDict[str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an answer."""

    status: int
    headers: CIMultiDict[str]


class Eof:
    """The good end of an answer."""


EOF = Eof()


class SimContent:
    """What has arrived of a body."""

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self._is_over = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, data: bytes) -> None:
        self._parts.append(data)
        self._wake()

    def end(self) -> None:
        self._is_over = True
        self._wake()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._wake()

    async def readany(self) -> bytes:
        while True:
            if self._error is not None:
                raise self._error
            if self._parts:
                data = b"".join(self._parts)
                self._parts.clear()
                if data:
                    return data
                continue
            if self._is_over:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class SimAnswer(aiohttp.ClientResponse):
    """An answer whose head is there."""

    def __init__(self, url: URL, head: Head, end: End) -> None:
        self.status = head.status
        self._url = url
        self._headers = CIMultiDictProxy(head.headers)
        self._cache: dict[str, Any] = {}
        self.content = SimContent()  # type: ignore[assignment]
        self._end = end
        self._is_whole = False
        end.heard = self._heard

    def __del__(self, _warnings: object = None) -> None:
        pass

    @property
    def is_open(self) -> bool:
        """Whether more of it may be read."""
        return not self._end.is_closed and not self._is_whole

    def close(self) -> None:
        """Give it up."""
        if self.is_open:
            self.content.set_exception(aiohttp.ClientConnectionError("Connection closed"))
        self._end.close()

    def _heard(self, message: Any) -> None:
        if message is EOF:
            self._is_whole = True
            self._end.close()
            self.content.end()
        elif message is CLOSED:
            self.content.set_exception(aiohttp.ClientPayloadError("Response payload is not completed"))
        else:
            self.content.feed(message)


async def request(network: Network, process: Process, host: str, url: URL, ask: Ask) -> SimAnswer:
    """Ask, and return when the head of the answer is there. ConnectionError or TimeoutError."""
    end = await network.connect(process, host, f"{url.host}:{url.port}")
    head: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
    early: list[Any] = []

    def heard(message: Any) -> None:
        if not head.done() and isinstance(message, Head):
            head.set_result(message)
        elif not head.done():
            head.set_exception(ConnectionResetError("closed before it answered"))
        else:
            early.append(message)

    end.heard = heard
    end.send(ask)
    try:
        found = await head
    except BaseException:
        end.close()
        if head.done() and not head.cancelled():
            head.exception()
        raise
    answer = SimAnswer(url, found, end)
    for message in early:
        answer._heard(message)
    return answer


class SimUpstream(Upstream):
    """The proxy's client."""

    def __init__(
        self, settings: ProxySettings, network: Network, process: Process, host: str, prover: Prover | None = None
    ) -> None:
        super().__init__(settings, prover)
        self._network = network
        self._process = process
        self._host = host
        # Told of each answer that is read from now on.
        self.on_answer: Callable[[SimAnswer, CIMultiDict[str]], None] = lambda answer, headers: None

    async def request(
        self,
        method: str,
        url: URL,
        headers: CIMultiDict[str],
        body: bytes | AsyncIterable[bytes] | None,
        *,
        proven: bool = False,
    ) -> aiohttp.ClientResponse:
        """See Upstream."""
        assert isinstance(body, bytes | None)
        sent = self._proven(method, url, headers, body) if proven else headers
        try:
            answer = await request(
                self._network, self._process, self._host, url, Ask(method, url.raw_path_qs, sent, body or b"")
            )
        except (ConnectionRefusedError, TimeoutError) as error:
            raise UpstreamLost(Reason.UNREACHABLE, f"worker {url.host} cannot be reached: {error}") from error
        except ConnectionError as error:
            raise UpstreamLost(Reason.EOF, f"worker {url.host} closed the connection: {error}") from error
        self.on_answer(answer, headers)
        return answer


class Sink(Protocol):
    """Where an answer goes."""

    is_over: bool
    # Whether its writer may write tokens now.
    may_write: Callable[[], bool]

    def head(self, head: Head) -> None: ...

    async def write(self, data: bytes) -> None: ...

    def eof(self) -> None: ...

    def abort(self) -> None: ...


class Unfenced(AssertionError):
    """A token was written by a process whose fence is closed."""


class WireSink:
    """An answer on a connection. `on_defect` is told of what may not be written."""

    def __init__(self, end: End, on_defect: OnDefect) -> None:
        self._end = end
        self._on_defect = on_defect
        self._is_answer = False
        self.may_write: Callable[[], bool] = lambda: True
        self.is_over = False
        self._room: asyncio.Event | None = None
        end.on_room = self.on_room

    def head(self, head: Head) -> None:
        self._is_answer = head.status == 200
        self._send(head)

    async def write(self, data: bytes) -> None:
        if not self.may_write() and self._is_answer and data != COMMENT and self._end.process.is_alive:
            self._on_defect(Unfenced(f"{self._end.process.name} wrote {data[:60]!r}, and its fence is closed"))
        self._send(data)
        while self._end.under_way >= WINDOW and not self._end.is_closed:
            self._room = asyncio.Event()
            await self._room.wait()

    def eof(self) -> None:
        self.is_over = True
        self._end.send(EOF)

    def abort(self) -> None:
        self._end.close()

    def on_room(self) -> None:
        """Whoever waits to write looks again."""
        if self._room is not None:
            self._room.set()
            self._room = None

    def _send(self, message: Any) -> None:
        if not self._end.send(message):
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")


class _Transport:
    """As much of a transport as handlers use."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def abort(self) -> None:
        self._sink.abort()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


class _Writer:
    """As much of a payload writer as aiohttp's responses use."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.length: int | None = None
        self.output_size = 0

    def enable_chunking(self) -> None:
        pass

    def send_headers(self) -> None:
        pass

    async def write_headers(self, status_line: str, headers: "CIMultiDict[str]") -> None:
        self._sink.head(Head(int(status_line.split()[1]), headers))

    async def write(self, data: bytes) -> None:
        await self._sink.write(data)

    async def write_eof(self, data: bytes = b"") -> None:
        if data:
            await self._sink.write(data)
        self._sink.eof()


class SimRequest:
    """A request as handlers and aiohttp's responses have it."""

    version = HttpVersion11
    keep_alive = True

    def __init__(self, ask: Ask, sink: Sink) -> None:
        self.method = ask.method
        self.raw_path = ask.raw_path
        self.path = ask.raw_path.partition("?")[0]
        self.headers = ask.headers
        self.body = ask.body
        self.remote = "peer"
        self.content = SimContent()
        self.content.feed(ask.body)
        self.content.end()
        self.match_info: dict[str, str] = {}
        self.sink = sink
        self.transport = _Transport(sink)
        self._payload_writer = _Writer(sink)

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        pass


Handler = Callable[[SimRequest], Awaitable[web.StreamResponse]]


class Server:
    """Listens for one process, and runs a handler for each request; its client's leaving cancels it."""

    def __init__(
        self, network: Network, process: Process, host: str, address: str, handle: Handler, on_defect: OnDefect
    ) -> None:
        self._network = network
        self._process = process
        self._handle = handle
        self._on_defect = on_defect
        network.listen(address, process, host, self._accept)

    def _accept(self, end: End) -> None:
        running: list[asyncio.Task[Any]] = []
        sink = WireSink(end, self._on_defect)

        def heard(message: Any) -> None:
            if message is not CLOSED:
                running.append(self._process.start(self._run(SimRequest(message, sink), end)))
                return
            sink.on_room()
            for task in running:
                if not task.done():
                    # The process itself hears of it: later, where it is stopped.
                    self._network.loop.call_soon(task.cancel, context=self._process.context)

        end.heard = heard

    async def _run(self, request: SimRequest, end: End) -> None:
        try:
            await answered(self._handle, request)
        except ConnectionError:
            end.close()
        except BaseException as error:
            end.close()
            if isinstance(error, Exception) and self._process.is_alive:
                self._on_defect(error)
            raise
        if not request.sink.is_over:
            end.close()


async def answered(handle: Handler, request: SimRequest) -> None:
    """Run a handler and send what it has not sent itself, as the real server does."""
    answer = await handle(request)
    await answer.prepare(request)  # type: ignore[arg-type]
    await answer.write_eof()
