"""The clients of a proxy benchmark: many streams in one process, read as cheaply as Python can.

Invariant: every token that was asked for is counted, and a stream that ends early is an error, never a smaller figure.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from .percentiles import percentile

_STAMP = b'"text":" '
# No run of a benchmark takes this long, unless something hangs.
_RUN_S_MAX = 90


@dataclass(frozen=True, slots=True)
class Load:
    """How many streams of how many tokens, how far apart."""

    streams: int
    tokens: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the clients saw."""

    tokens: int
    seconds: float
    # Nanoseconds from the engine's write to the client's read, one a token; empty where they were not taken.
    delays_ns: list[int]

    def delay_ms(self, quantile: float) -> float:
        """A quantile of the delays, in milliseconds."""
        return percentile(self.delays_ns, quantile * 100) / 1e6

    @property
    def rate(self) -> float:
        """Tokens a second, over all streams."""
        return self.tokens / self.seconds


class _Reader(asyncio.Protocol):
    """Reads one stream to its `[DONE]`."""

    def __init__(self, request: bytes, tokens: int, *, stamps: bool) -> None:
        self._request = request
        self._tokens = tokens
        self._stamps = stamps
        self._tail = b""
        self.count = 0
        self.delays_ns: list[int] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not derived from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        data = self._tail + data
        # A stamp never holds a line end, so whole lines hold whole stamps.
        end = data.rfind(b"\n") + 1
        self._tail = data[end:]
        stamps = data[:end].split(_STAMP)[1:]
        self.count += len(stamps)
        if self._stamps:
            self.delays_ns += [now_ns - int(part[: part.index(b'"')]) for part in stamps]
        if self.count >= self._tokens and not self.done.done():
            self._finish()

    def _finish(self) -> None:
        self.done.set_result(None)
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            lost = ConnectionError(f"a stream ended after {self.count} of {self._tokens} tokens: {error}")
            self.done.set_exception(lost)


async def run(url: str, load: Load, *, stamps: bool) -> Measured:
    """Open the streams, spread over one gap, and read them to their ends."""
    parts = urlsplit(url)
    body = json.dumps(
        {
            "model": "bench",
            "prompt": "x",
            "stream": True,
            "temperature": 0,
            "max_tokens": load.tokens,
            "bench_gap_s": load.gap_s,
        }
    ).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: "
        + str(len(body)).encode()
        + b"\r\n\r\n"
        + body
    )
    loop = asyncio.get_running_loop()
    started_s = time.monotonic()
    readers = []
    for _ in range(load.streams):
        _, reader = await loop.create_connection(
            lambda: _Reader(request, load.tokens, stamps=stamps), parts.hostname or "127.0.0.1", parts.port or 80
        )
        readers.append(reader)
        # Streams that all began at once would have their tokens at the same instants for ever.
        await asyncio.sleep(load.gap_s / load.streams)
    async with asyncio.timeout(_RUN_S_MAX):
        await asyncio.gather(*(reader.done for reader in readers))
    seconds = time.monotonic() - started_s
    return Measured(
        sum(reader.count for reader in readers), seconds, [delay for reader in readers for delay in reader.delays_ns]
    )
