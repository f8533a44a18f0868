"""Requests of workers that live on after a planned move, kept open until the next owner has their KV.

An engine frees a session's blocks when its request's connection closes. Invariant: what is held here is closed exactly
once: when the next owner has fetched what it needs, or when the session is over. What is kept for one move is not let
go of with that of the move before it.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

Request = aiohttp.ClientResponse | asyncio.Future[Any]


def _nothing() -> None:
    """Closing it is all."""


class Kept:
    """What one session still holds of the workers that it has left."""

    def __init__(self) -> None:
        self._held: list[tuple[Request, Callable[[], None]]] = []

    def hold(self, request: Request, then: Callable[[], None] = _nothing) -> None:
        """Keep an answer, or the sending of a request that has none yet; `then`: once it is closed."""
        self._held.append((request, then))

    def until(self, fetched: "asyncio.Future[None] | None") -> None:
        """Let go of what is held now as soon as `fetched` is done; at once without one."""
        if fetched is None:
            self.let_go()
        elif self._held:
            # The worker of the next move may be held before this is called: its KV is still to be fetched then.
            held = tuple(self._held)
            fetched.add_done_callback(lambda _: self._close(held))

    def let_go(self) -> None:
        """Nothing of it is needed any more."""
        self._close(tuple(self._held))

    def _close(self, requests: Sequence[tuple[Request, Callable[[], None]]]) -> None:
        for one in requests:
            if any(one is held for held in self._held):
                self._held = [held for held in self._held if held is not one]
                request, then = one
                _close(request)
                then()


def _close(request: Request) -> None:
    if isinstance(request, aiohttp.ClientResponse):
        request.close()
    elif not request.done():
        request.cancel()
    elif not request.cancelled() and request.exception() is None:
        answer = request.result()
        if isinstance(answer, aiohttp.ClientResponse):
            answer.close()
