"""Passes a question about a stream on to whoever has it, and that one's answer back.

Owns the header by which such a question is known, and its proof. Invariants: a question is passed on once, and never by
a chain: one that came from another is answered here or not at all, and one that only says so is refused. Where the
stream is, `elsewhere` says; the wait for a first word is bounded.
"""

import asyncio
import logging
import time
from contextlib import suppress

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from . import headers, problems
from .elsewhere import Elsewhere
from .fleet import Strangers, shows_certificate
from .orphans import Origin
from .passthrough import Passthrough, path_of
from .problems import Problem
from .upstream import Upstream, UpstreamLost, target

_LOG = logging.getLogger("midstream.proxy")

STREAMS_PATH = "/midstream/v1/streams/"
SENT_ON = "X-Midstream-Sent-On"
# Of a part of a stream: whose it is.
OWNER = "owner"
# What is told beyond that is not: it ends by itself.
_TELLING_MAX = 1000
# Whoever has the stream answers at once; one that hangs holds its client for no longer than that.
_ANSWER_S = 10.0


class AskElsewhere:
    """The questions of one process about streams of others."""

    def __init__(self, elsewhere: Elsewhere, upstream: Upstream, passthrough: Passthrough) -> None:
        self._elsewhere = elsewhere
        self._upstream = upstream
        self._passthrough = passthrough
        self._strangers = Strangers()
        self._telling: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def own_prefix(self) -> str:
        """Of the tokens that are drawn here."""
        return self._elsewhere.own_prefix

    def refusal(self, request: web.Request, body: bytes | None) -> Problem | None:
        """Why a request that says it was passed on is not believed; None if it is, or says nothing like that."""
        proof = request.headers.get(SENT_ON)
        if proof is None:
            return None
        shown = shows_certificate(request.transport)
        why = self._elsewhere.believes(request.method, request.raw_path, body or b"", proof, shown=shown)
        if not why:
            return None
        self._strangers.tell(request.remote, why, time.monotonic())
        return problems.not_of_the_fleet()

    @property
    def own_name(self) -> str:
        """Whose the streams are that are begun here."""
        return self._elsewhere.own_name

    async def ask(self, request: web.Request, prefix: str, body: bytes | None) -> web.StreamResponse | None:
        """The answer of the one of that prefix; None where there is none, or the question came from another already."""
        if SENT_ON in request.headers or prefix == self.own_prefix:
            return None
        base_url = await self._elsewhere.base_url_of(prefix)
        return None if base_url is None else await self.ask_at(request, base_url, body)

    def forget(self, base_url: str, origin: Origin) -> None:
        """A node need not keep a part of a stream any more. Told once, in the background; else it ends by its time."""
        if len(self._telling) < _TELLING_MAX and not self._is_closed:
            task = asyncio.create_task(self._forget(base_url, origin), name="forget")
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _forget(self, base_url: str, origin: Origin) -> None:
        # Whoever had it before has nothing to say of it any more, and may not know that yet.
        url = target(base_url, f"{STREAMS_PATH}{origin.token}?{OWNER}={origin.owner}")
        sent = CIMultiDict({SENT_ON: self._elsewhere.vouch("DELETE", url.raw_path_qs, b"")})
        with suppress(UpstreamLost, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                (await self._upstream.request("DELETE", url, sent, None, tls=self._elsewhere.tls)).close()

    async def close(self) -> None:
        """Tell nobody anything any more."""
        self._is_closed = True
        for task in tuple(self._telling):
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)

    async def ask_at(self, request: web.Request, base_url: str, body: bytes | None) -> web.StreamResponse:
        """The answer of the one at that URL."""
        url = target(base_url, path_of(request))
        sent = headers.towards_engine(request.headers)
        sent[SENT_ON] = self._elsewhere.vouch(request.method, url.raw_path_qs, body or b"")
        if body is not None:
            sent.popall("Content-Length", None)
        answer: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._upstream.request(request.method, url, sent, body, tls=self._elsewhere.tls)
        except (UpstreamLost, TimeoutError) as error:
            _LOG.warning("event=stream_out_of_reach at=%s why=%s", base_url, error or "it does not answer")
            return problems.out_of_reach().response(request.headers, request.path)
        if answer.status == 401:
            answer.close()
            _LOG.warning("event=stream_out_of_reach at=%s why=it does not believe this process", base_url)
            return problems.out_of_reach().response(request.headers, request.path)
        return await self._passthrough.pass_on(request, answer)
