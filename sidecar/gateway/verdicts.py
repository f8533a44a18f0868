"""Asks nodes what their takeovers of this gateway's sessions came to.

Owns the questions. Invariants: each ends by itself, and no answer is ever taken for more than it says. A node tells at
the end of its stream anyway; this is for sessions that must know before, and for nodes that are lost before they tell.
"""

import asyncio
import random
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from ...proxy.coordinator import Placement
from ...proxy.fleet import Prover
from ...session.ids import SessionId
from ..fleet_api import SESSION_PATH
from .answers import bounded_text
from .session import Stay

ANSWER_S = 2.0
_ANSWER_BYTES_MAX = 1 << 20
# How long a session that must know waits for the word, and how often it asks.
WORD_S = 5.0
_ASK_AGAIN_S = 0.05
# After so long, each time a little jittered, others are asked after: thousands may be taken up at once.
_LATER_S = (0.5, 2.0, 5.0)
_CONNECTIONS_EACH = 8


class Verdicts:
    """The questions of one gateway. Use as a context."""

    def __init__(self, prover: Prover) -> None:
        self._prover = prover
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Verdicts":
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=_CONNECTIONS_EACH, ssl=self._prover.tls or True)
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def at_once(self, session: SessionId, stay: Stay, placement: Placement) -> None:
        """Returns as soon as the node has said what its takeovers came to, or is lost, or after a while."""
        deadline = time.monotonic() + WORD_S
        while not placement.interrupted.done() and time.monotonic() < deadline:
            await self._ask(session, stay, placement)
            if stay.said:
                return
            await asyncio.sleep(_ASK_AGAIN_S)

    async def later(self, session: SessionId, stay: Stay, placement: Placement) -> None:
        """Finds out without hurry."""
        for wait_s in _LATER_S:
            await asyncio.sleep(wait_s * (1 + random.random()))
            if stay.said:
                return
            await self._ask(session, stay, placement)

    async def _ask(self, session: SessionId, stay: Stay, placement: Placement) -> None:
        told = await self._told(placement.base_url, SESSION_PATH + session)
        outcomes = told.get("outcomes")
        if isinstance(outcomes, list) and all(isinstance(outcome, dict) for outcome in outcomes):
            stay.heard(outcomes)

    async def _told(self, base_url: str, path: str) -> dict[str, Any]:
        assert self._http is not None, "use it as a context"
        proof = self._prover.headers("GET", urlsplit(base_url).path + path, b"")
        with suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            async with self._http.get(base_url + path, headers=proof) as answer:
                text = await bounded_text(answer, _ANSWER_BYTES_MAX)
                if answer.status == 200:
                    return msgspec.json.decode(text, type=dict[str, Any])
        return {}
