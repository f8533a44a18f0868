"""Sends one request and reads its answer; where a strategy says so, sends it again until the answer is whole.

The rules of a well-formed answer are the strict client's (`../client.py`). Owns retries: bounded in number and time,
and only where the client itself is the one that recovers.
"""

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp

from ..client import SESSION_HEADER, Answer, read_stream
from .live import Live

RETRIES_MAX = 200
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0


@dataclass(frozen=True, slots=True)
class Route:
    """Where requests go and how: base URLs in turn, headers, and whether the client itself starts again."""

    urls: tuple[str, ...]
    headers: dict[str, str] = field(default_factory=dict)
    client_restarts: bool = False


class Sender:
    """Sends the requests of one pass over one pool of connections."""

    def __init__(self, route: Route, *, answer_s: float, silence_s: float) -> None:
        self._route = route
        self._answer_s = answer_s
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=silence_s)
        # A connection for each request: one that was kept may be dead when it is used again, which is another test.
        self._connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._turn = 0

    async def close(self) -> None:
        """Close what is left of the connections."""
        await self._connector.close()

    async def send(self, live: Live) -> None:
        """Send a request and read its answer to the end; whatever happens is kept in `live`."""
        live.sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._answer_s):
                await self._until_whole(live)
        except TimeoutError:
            live.answer.violations.append(f"no end within {self._answer_s:g} s")
        finally:
            live.ended_s = time.perf_counter()

    async def _until_whole(self, live: Live) -> None:
        pause_s = RETRY_FIRST_S
        for attempt in range(RETRIES_MAX + 1):
            before = len(live.tokens)
            await self._attempt(live)
            if not self._is_to_be_sent_again(live.answer) or attempt == RETRIES_MAX:
                return
            if live.answer.status == 200:
                live.broken_s.append(time.perf_counter())
            pause_s = RETRY_FIRST_S if len(live.tokens) > before else min(pause_s * 2, RETRY_MOST_S)
            await asyncio.sleep(pause_s)

    def _is_to_be_sent_again(self, answer: Answer) -> bool:
        """Not when it is whole, nor when the request itself was refused."""
        return self._route.client_restarts and not answer.whole and not 400 <= answer.status < 429

    async def _attempt(self, live: Live) -> None:
        url = self._route.urls[self._turn % len(self._route.urls)]
        self._turn += 1

        def on_tokens(answer: Answer) -> None:
            # Also when this is ended from outside, what came is there to be judged.
            live.answer = answer
            live.take(answer, time.perf_counter())

        async with aiohttp.ClientSession(
            connector=self._connector,
            connector_owner=False,
            timeout=self._timeout,
            trace_configs=[_session_seen(live)],
        ) as http:
            live.answer = await read_stream(
                http, url + live.ask.path, live.ask.body, headers=self._route.headers, on_tokens=on_tokens
            )


def _session_seen(live: Live) -> aiohttp.TraceConfig:
    """Takes the session's id from the head of the answer, before the first token."""

    async def seen(_: aiohttp.ClientSession, __: object, params: aiohttp.TraceRequestEndParams) -> None:
        live.session = params.response.headers.get(SESSION_HEADER, "")

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(seen)
    return trace
