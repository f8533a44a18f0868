"""One stream that outlives its client's connection: what its session says, and who reads it now.

Owns the stream's log and its one reader. Invariant: each event is in the log before anybody gets it, under its id, and
goes to each reader once and in order. What a reader has had may be dropped, what none has had never is: a session that
says more than may be kept waits, and so does its engine. A session is the only writer of its stream. Where its client
has more than was said here (`behind`), it is said once more, unread, by who said it before: nothing else is told before
all of that was heard. It knows no time: `reattach` says when a stream has been without a reader for too long.
"""

import asyncio
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any, Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from ..session.errors import Refused
from .event_ids import Counting, Numbering
from .orphans import KeptPart
from .permission import Always, NotPermitted, Permission
from .sse import split_events
from .stream_log import StreamLog
from .stream_room import Room
from .waiting import COMMENT


class Phase(StrEnum):
    """How far a stream is."""

    # Its client waits for the head of the answer, and has no name for the stream yet.
    AWAITED = "awaited"
    OPEN = "open"
    # All that the session will ever say is in the log.
    WHOLE = "whole"
    # It was given up, or its session broke: nothing is kept.
    GONE = "gone"


class Reads(Protocol):
    """The reader of a stream."""

    position: int

    def takes_now(self, size_bytes: int) -> bool:
        """Whether it has had everything, and so many bytes more would not have to wait."""
        ...

    async def write(self, data: bytes) -> None:
        """Send something, after `takes_now`."""
        ...

    def wake(self) -> None:
        """There is something in the log, or the stream is over."""
        ...

    def replace(self) -> None:
        """Another reader has come: this one is over."""
        ...


class KeptStream:
    """One stream. `digest` is of the request that it answers; `key` is for its place among others."""

    def __init__(
        self,
        token: str,
        key: bytes,
        digest: bytes,
        room: Room,
        permission: Permission | None = None,
        *,
        part: KeptPart | None = None,
        behind: int = 0,
    ) -> None:
        self.token = token
        # What a node keeps for a gateway's stream: its events have no ids here, and no client comes back to it.
        self.part = part
        # Up to here its client has all, and it is said once more.
        self.behind = behind
        self.permission = permission or Always()
        self.key = key
        self.digest = digest
        self.log = StreamLog()
        self.phase = Phase.AWAITED
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.reader: Reads | None = None
        self.task: asyncio.Task[Any] | None = None
        self.timer: asyncio.TimerHandle | None = None
        # Whether some reader has had all of the whole answer.
        self.delivered = False
        self._numbering: Numbering | Counting = Numbering(token) if part is None else Counting()
        self._room = room
        self._changed = asyncio.Event()

    def respond(self, kept: "CIMultiDict[str]") -> web.StreamResponse:
        """What the session takes for the response to its client."""
        return _Voice(self, kept)

    # ---- said by the session

    def open(self, headers: "CIMultiDict[str]") -> None:
        """The head of the answer is there."""
        if self.phase is Phase.AWAITED:
            self.phase = Phase.OPEN
            self.headers = headers
            if not self.opened.done():
                self.opened.set_result(None)

    async def write(self, data: bytes) -> None:
        """Whole events, which are kept and sent on; returns when there was room for them."""
        if data == COMMENT:
            if self.reader is not None and self.reader.takes_now(len(data)):
                await self.reader.write(data)
            return
        if self.phase is Phase.GONE:
            # Its session is being cancelled.
            return
        if COMMENT in data:
            # Said at some time or other, and by no rule that another gateway knew.
            data = b"".join(event for event in split_events(data) if event != COMMENT)
            if not data:
                return
        events = self._numbering.take(data)
        size_bytes = sum(map(len, events))
        if self.is_behind:
            self._say_again(events, size_bytes)
            return
        if not self._fits(size_bytes):
            await self._wait_for_room(size_bytes)
        self.log.append(events)
        self._room.take(size_bytes)
        reader = self.reader
        if reader is None:
            return
        if not reader.takes_now(size_bytes):
            reader.wake()
            return
        reader.position = self.log.last
        self._drop_what_was_read(reader)
        await reader.write(events[0] if len(events) == 1 else b"".join(events))

    def end(self) -> None:
        """The answer is whole. One that ends before what its client has is not that answer: it stays half."""
        if self.phase is Phase.OPEN and not self.is_behind:
            self.phase = Phase.WHOLE
            if self.reader is not None:
                self.reader.wake()

    @property
    def is_behind(self) -> bool:
        """Whether its client has more than was said here."""
        return self.log.last < self.behind

    def require_all_heard(self) -> None:
        """Whether anybody but the one that says it once more may go on with it.

        Raises Refused where its client waits for a first word, and NotPermitted where it already reads.
        """
        if not self.is_behind:
            return
        if self.phase is Phase.AWAITED:
            text = "the node that keeps the stream was lost before all was read that the client has; ask again"
            raise Refused("stream_out_of_reach", text, retry_after_s=2)
        raise NotPermitted(f"the client has {self.behind} events, and {self.log.last} were heard again")

    # ---- asked by those who read, and by whoever keeps it

    def attach(self, reader: Reads) -> None:
        """A reader comes, at a position that the log has; the one before is over."""
        before, self.reader = self.reader, reader
        if before is not None:
            before.replace()
        self.look_again()

    def detach(self, reader: Reads) -> bool:
        """A reader has left; False if another one had come before that."""
        if self.reader is not reader:
            return False
        self.reader = None
        self.look_again()
        return True

    def look_again(self) -> None:
        """A reader has come, left, or taken something: there may be room."""
        if self.reader is not None and self.phase is Phase.OPEN:
            self._drop_what_was_read(self.reader)
        self._changed.set()

    def give_up(self) -> None:
        """Nothing of it is needed any more."""
        self.phase = Phase.GONE
        self.permission.ended()
        self._room.give(self.log.trim(self.log.last, -1))
        if self.timer is not None:
            self.timer.cancel()
        if self.reader is not None:
            self.reader.wake()
        if self.task is not None:
            self.task.cancel()

    def _say_again(self, events: list[bytes], size_bytes: int) -> None:
        """Its client has these: they count, and need no room."""
        self.log.append(events)
        self._room.take(size_bytes)
        self._room.give(self.log.trim(min(self.log.last, self.behind), self._room.share_bytes))
        if self.log.last > self.behind and self.reader is not None:
            self.reader.wake()

    def _drop_what_was_read(self, reader: Reads) -> None:
        self._room.give(self.log.trim(reader.position, self._room.share_bytes))

    def _fits(self, size_bytes: int) -> bool:
        if self.reader is not None and self.reader.position == self.log.last:
            # It goes straight on: what is kept of it afterwards is another question.
            return True
        return self.log.size_bytes + size_bytes <= self._room.stream_bytes_max and self._room.has(size_bytes)

    async def _wait_for_room(self, size_bytes: int) -> None:
        try:
            while not self._fits(size_bytes):
                self._changed.clear()
                self._room.tell(self._changed)
                await self._changed.wait()
        finally:
            self._room.forget(self._changed)


class _Voice(web.StreamResponse):
    """What a session's handler writes to: nothing of it needs a connection."""

    def __init__(self, stream: KeptStream, kept: "CIMultiDict[str]") -> None:
        super().__init__(headers=kept)
        self._stream = stream

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """The answer begins."""
        self._stream.open(self.headers)
        return None

    def write(self, data: bytes | bytearray | memoryview) -> Coroutine[Any, Any, None]:
        """Say some events. No coroutine of its own: each token comes by here."""
        return self._stream.write(bytes(data))

    async def write_eof(self, data: bytes = b"") -> None:
        """The answer is over."""
        self._stream.end()
