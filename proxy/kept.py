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
        held, self._held = self._held, []
        if not held:
            return
        if fetched is None:
            _let_go(held)
        else:
            fetched.add_done_callback(lambda _: _let_go(held))

    def let_go(self) -> None:
        """The session is over, or was not moved after all."""
        self.until(None)


def _let_go(held: "list[aiohttp.ClientResponse | asyncio.Future[Any]]") -> None:
    for request in held:
        if isinstance(request, aiohttp.ClientResponse):
            request.close()
        elif not request.done():
            request.cancel()
        elif not request.cancelled() and request.exception() is None:
            answer = request.result()
            if isinstance(answer, aiohttp.ClientResponse):
                answer.close()
    held.clear()
