"""The response to a client of a stream, which asks for permission before each write.

Owns the asking where a session writes to its client itself. Invariant: between asking and writing nothing is waited
for; what may not be written waits, with comments meanwhile, or breaks the connection off: a stream never looks whole to
a client that lacks a part of it. Comments are nobody's tokens, and may always be written. What is kept of streams and
sent from there is `stream_reader`'s to ask for.
"""

from collections.abc import Coroutine
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from .permission import NotPermitted, Permission, wait_for
from .waiting import COMMENT


class FencedResponse(web.StreamResponse):
    """A response under one permission."""

    def __init__(self, permission: Permission, every_s: float, kept: "CIMultiDict[str]") -> None:
        super().__init__(headers=kept)
        self._permission = permission
        self._every_s = every_s
        self._client: web.BaseRequest | None = None
        self._ended = False

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send the head."""
        self._client = request
        return await super().prepare(request)

    def write(self, data: bytes | bytearray | memoryview) -> Coroutine[Any, Any, None]:
        """Send some events. No coroutine of its own: each token comes by here."""
        if self._permission.may_send() or data == COMMENT:
            return super().write(data)
        return self._write_later(data)

    async def write_eof(self, data: bytes = b"") -> None:
        """The stream is over; its end is a word like others."""
        if not self._ended:
            await self._permitted()
            self._ended = True
        await super().write_eof(data)

    async def _write_later(self, data: bytes | bytearray | memoryview) -> None:
        await self._permitted()
        await super().write(data)

    async def _permitted(self) -> None:
        """Returns when something may be written. NotPermitted, and the connection broken off, when nothing may."""
        if await wait_for(self._permission, self._comment, self._every_s):
            return
        if self._client is not None and self._client.transport is not None:
            self._client.transport.abort()
        raise NotPermitted("this process has lost its lease, and with it the session")

    async def _comment(self) -> None:
        await super().write(COMMENT)
