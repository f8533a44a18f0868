"""Reads request bodies: bounded each, in time, and all together.

Owns the count of the bytes that open requests hold. Invariant: it never exceeds the setting, and what a request held is
given back when the request is over, however it ends.
"""

import asyncio

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from . import problems
from .problems import Problem
from .settings import ProxySettings


class BadBody(Exception):
    """A body that is not taken; `problem` is what the client is told."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class Bodies:
    """All bodies that are held at one time."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._held_bytes = 0
        # By the identity of requests that are open, which are alive as long as they are in here.
        self._by_request: dict[int, int] = {}

    async def read(self, request: web.Request, *, more_bytes: int = 0) -> bytes:
        """A request's whole body. Raises BadBody as soon as it is too large, broken, too late, or more than fits.

        `more_bytes` is by how much it may be larger than a client's.
        """
        bytes_max = self._settings.body_bytes_max + more_bytes
        if (request.content_length or 0) > bytes_max:
            raise BadBody(problems.body_too_large(bytes_max))
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while data := await request.content.readany():
                    if len(body) + len(data) > bytes_max:
                        raise BadBody(problems.body_too_large(bytes_max))
                    self._hold(request, len(data))
                    body += data
        except TimeoutError as error:
            raise BadBody(problems.body_too_late(self._settings.body_timeout_s)) from error
        except (aiohttp.ClientPayloadError, HttpProcessingError) as error:
            text = f"the request body is broken off or not well formed: {error}"
            raise BadBody(problems.bad_request(text)) from error
        return bytes(body)

    def hold_more(self, request: web.Request, size_bytes: int) -> None:
        """Count what a request takes besides its body as it came. Raises BadBody when that is more than fits."""
        self._hold(request, size_bytes)

    def release(self, request: web.Request) -> None:
        """The request is over."""
        self._held_bytes -= self._by_request.pop(id(request), 0)

    def _hold(self, request: web.Request, size_bytes: int) -> None:
        if self._held_bytes + size_bytes > self._settings.bodies_bytes_max:
            raise BadBody(problems.bodies_too_large(self._settings.bodies_bytes_max))
        self._held_bytes += size_bytes
        self._by_request[id(request)] = self._by_request.get(id(request), 0) + size_bytes
