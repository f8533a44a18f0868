"""Requests of workers that live on after a planned move, kept open until the next owner has their KV.

An engine frees a session's blocks when its request's connection closes. Invariant: what is held here is closed exactly
once: when the next owner has fetched what it needs, or when the session is over.
"""

import asyncio
from typing import Any

import aiohttp


class Kept:
    """What one session still holds of the worker that it has left."""

    def __init__(self) -> None:
        self._held: list[aiohttp.ClientResponse | asyncio.Future[Any]] = []

    def hold(self, request: "aiohttp.ClientResponse | asyncio.Future[Any]") -> None:
        """Keep an answer, or the sending of a request that has none yet."""
        self._held.append(request)

    def until(self, fetched: "asyncio.Future[None] | None") -> None:
        """Let go of what is held as soon as `fetched` is done; at once without one."""
        if fetched is None:
            self.let_go()
        elif self._held:
            fetched.add_done_callback(lambda _: self.let_go())

    def let_go(self) -> None:
        """Nothing of it is needed any more."""
        held, self._held = self._held, []
        for request in held:
            _close(request)


def _close(request: "aiohttp.ClientResponse | asyncio.Future[Any]") -> None:
    if isinstance(request, aiohttp.ClientResponse):
        request.close()
    elif not request.done():
        request.cancel()
    elif not request.cancelled() and request.exception() is None:
        answer = request.result()
        if isinstance(answer, aiohttp.ClientResponse):
            answer.close()
