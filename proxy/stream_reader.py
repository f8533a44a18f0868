"""Sends a kept stream to one client.

Owns the client's response from its first event on. Invariant: what a client gets that takes everything at once is
written by the session itself, with no task in between; a client that is behind, or slow, is served from the log, a
piece at a time, and never holds the session up before the log is full. A client that takes nothing at all for as long
as a stream may be without a reader is none: a peer that died without a word looks like that, as soon as the buffers on
the way to it are full. Nothing is sent without permission: a client waits for that, with comments meanwhile.
"""

import asyncio
import math
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any

from aiohttp import web

from .permission import wait_for
from .stream_kept import KeptStream, Phase
from .waiting import COMMENT

# One write from the log.
_PIECE_BYTES = 64 << 10
# The session writes by itself only what cannot have to wait, for it has no clock of its own, and what cannot have to
# wait needs none: a transport asks for a pause at 64 KiB, and takes that back at 16 KiB.
_BUFFERED_BYTES_MAX = 16 << 10
_WRITE_BYTES_MAX = 16 << 10
# How often in that time a client that takes nothing is looked at.
_LOOKS = 4
# How often a client that has to wait for permission is told so.
_COMMENT_EVERY_S = 5.0


class Over(StrEnum):
    """Why a reader has ended."""

    WHOLE = "whole"
    REPLACED = "replaced"
    GONE = "gone"
    STALLED = "stalled"
    # The stream is another's by now.
    FORBIDDEN = "forbidden"


class StreamReader:
    """One client that reads from a position on; it counts as none when it takes nothing for `stall_s`."""

    def __init__(self, stream: KeptStream, position: int, request: web.Request, stall_s: float) -> None:
        self.position = position
        self._stream = stream
        self._request = request
        self._stall_s = stall_s
        self._permission = stream.permission
        self._response: web.StreamResponse | None = None
        self._idle = False
        self._replaced = False
        self._awake = asyncio.Event()

    async def run(self, response: web.StreamResponse) -> Over:
        """Send everything, to the end of the stream. Raises ConnectionError when the client leaves."""
        self._response = response
        stream = self._stream
        while True:
            if self._replaced:
                return Over.REPLACED
            if stream.phase is Phase.GONE:
                return self._broken_off(Over.GONE)
            if not self._permission.may_send():
                if not await wait_for(self._permission, self._comment, _COMMENT_EVERY_S):
                    return self._broken_off(Over.FORBIDDEN)
                continue
            piece, position = stream.log.after(self.position, _PIECE_BYTES)
            if piece:
                self.position = position
                stream.look_again()
                if self._has_room_for(len(piece)):
                    await response.write(piece)
                elif not await self._is_taken(response.write(piece)):
                    return self._broken_off(Over.STALLED)
            elif stream.phase is Phase.WHOLE:
                taken = await self._is_taken(response.write_eof())
                return Over.WHOLE if taken else self._broken_off(Over.STALLED)
            else:
                self._idle = True
                await self._awake.wait()
                self._awake.clear()
                self._idle = False

    def takes_now(self, size_bytes: int) -> bool:
        """Whether it has had everything, and a write of so many bytes would not wait."""
        return self._idle and self._permission.may_send() and self._has_room_for(size_bytes)

    async def write(self, data: bytes) -> None:
        """Send what the session says, after `takes_now`."""
        assert self._response is not None
        try:
            await self._response.write(data)
        except ConnectionError:
            # The client has left, and whoever runs this reader is about to hear it.
            self._idle = False

    def wake(self) -> None:
        """Look at the stream again."""
        self._idle = False
        self._awake.set()

    def replace(self) -> None:
        """Another reader has come: this connection ends, in a way that does not look like the answer's end."""
        self._replaced = True
        self.wake()
        self._broken_off(Over.REPLACED)

    def _has_room_for(self, size_bytes: int) -> bool:
        """Whether a write of so many bytes would not wait."""
        transport = self._request.transport
        return (
            size_bytes <= _WRITE_BYTES_MAX
            and transport is not None
            and transport.get_write_buffer_size() <= _BUFFERED_BYTES_MAX
        )

    async def _comment(self) -> None:
        assert self._response is not None
        if not self._replaced:
            await self._response.write(COMMENT)

    def _broken_off(self, over: Over) -> Over:
        if self._request.transport is not None:
            self._request.transport.abort()
        return over

    async def _is_taken(self, writing: Coroutine[Any, Any, None]) -> bool:
        """Whether a write came to its end; False when the client takes nothing for too long."""
        work = asyncio.ensure_future(writing)
        loop = asyncio.get_running_loop()
        left_bytes, since_s = math.inf, loop.time()
        try:
            while True:
                await asyncio.wait({work}, timeout=self._stall_s / _LOOKS)
                if work.done():
                    work.result()
                    return True
                buffered_bytes = self._buffered_bytes()
                if buffered_bytes < left_bytes:
                    left_bytes, since_s = buffered_bytes, loop.time()
                elif loop.time() - since_s >= self._stall_s:
                    return False
        finally:
            work.cancel()
            # Also where it has failed by itself while this was being cancelled.
            await asyncio.gather(work, return_exceptions=True)

    def _buffered_bytes(self) -> int:
        transport = self._request.transport
        return 0 if transport is None else transport.get_write_buffer_size()
