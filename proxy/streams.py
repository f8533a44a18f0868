"""All streams that are kept: their places, their sessions' tasks, and who reads each.

Owns them by what their tokens hash to, and the time for which each is kept. Invariant: a stream without a reader is
given up after `reattach_s`, its session with it, as at a disconnect where nothing is kept; a whole answer is kept for
as long after its last reader. Tokens are in no log and no listing. Who may have which stream is `reattach`'s and
`reattach_parts`'; what is kept and sent is `stream_kept`'s and `stream_reader`'s.
"""

import asyncio
import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from . import headers, problems
from .orphans import KeptPart
from .permission import Permission, Permits
from .problems import Problem
from .settings import ProxySettings
from .stream_kept import KeptStream, Phase
from .stream_reader import Over, StreamReader
from .stream_room import Room

_LOG = logging.getLogger("midstream.proxy")

# What is kept of a gateway's stream is not kept for longer than the fleet remembers who had its session last.
_PART_S = 600.0


class Streams:
    """All of one process."""

    def __init__(self, settings: ProxySettings, permits: Permits) -> None:
        self.keep_s = settings.reattach_s
        self._streams_max = settings.reattach_streams_max
        self._permits = permits
        self._secret = secrets.token_bytes(16)
        self._streams: dict[bytes, KeptStream] = {}
        # Whole, had by a reader, and read by nobody now: the first to go, the oldest first.
        self._spare: OrderedDict[bytes, KeptStream] = OrderedDict()
        self._room = Room(settings.reattach_bytes_max, settings.reattach_stream_bytes_max, self._drop_spare)
        self._tasks: set[asyncio.Task[web.StreamResponse]] = set()

    def get(self, token: str) -> KeptStream | None:
        """The stream of that name, whether or not its client has the name yet."""
        return self._streams.get(self._key(token))

    def may_begin(self) -> bool:
        """Whether there is a place for one more, or one could be made."""
        return len(self._streams) < self._streams_max or bool(self._spare)

    def new(
        self,
        token: str,
        digest: bytes,
        *,
        part: KeptPart | None = None,
        behind: int = 0,
        permission: Permission | None = None,
    ) -> KeptStream | None:
        """A place for one more; None where everything is in use. It goes by that permission, or the moment's."""
        if len(self._streams) >= self._streams_max and not self._drop_spare():
            return None
        permission = permission or self._permits.now()
        stream = KeptStream(token, self._key(token), digest, self._room, permission, part=part, behind=behind)
        self._streams[stream.key] = stream
        self._room.share_among(len(self._streams))
        return stream

    def run(self, stream: KeptStream, session: Coroutine[Any, Any, web.StreamResponse], held: ExitStack) -> None:
        """Run a stream's session. What `held` holds is the session's: it is let go of when that is over."""
        stream.task = task = asyncio.create_task(session)
        self._tasks.add(task)
        # A task that is cancelled before its first step lets go of nothing by itself.
        lent = held.pop_all()
        task.add_done_callback(lambda _: lent.close())
        task.add_done_callback(lambda done: self._session_over(stream, done))

    def _session_over(self, stream: KeptStream, task: "asyncio.Task[web.StreamResponse]") -> None:
        self._tasks.discard(task)
        stream.task = None
        awaited = stream.phase is Phase.AWAITED
        if not task.cancelled() and (error := task.exception()) is not None and not awaited:
            _LOG.error("event=session_broke", exc_info=error)
        if awaited or stream.phase is Phase.OPEN:
            # An answer that is no stream, or half of one that must not look whole.
            self._streams.pop(stream.key, None)
            self._room.share_among(len(self._streams))
            if awaited:
                stream.permission.ended()
            else:
                stream.give_up()

    # ---- readers

    async def answer(
        self, request: web.Request, stream: KeptStream, position: int, *, first: bool
    ) -> web.StreamResponse:
        """What follows a position, as soon as the session has a stream; or what it answers instead."""
        task: asyncio.Task[web.StreamResponse] | None = stream.task
        assert task is not None
        try:
            either: set[asyncio.Future[Any]] = {task, stream.opened}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if first:
                # Nobody knows the stream's name.
                self.drop(stream)
            else:
                stream.timer = asyncio.get_running_loop().call_later(self.keep_s, self.drop, stream)
            raise
        if stream.phase is Phase.AWAITED:
            return await task
        return await self._read(request, stream, StreamReader(stream, position, request, self.keep_s), first=first)

    async def go_on(self, request: web.Request, stream: KeptStream, position: int) -> web.StreamResponse:
        """What follows a position that is kept, or why there is nothing."""
        if stream.is_behind and position != stream.behind:
            # What follows is on its way here once more, and nobody knows yet what of it there will be room for.
            return told(problems.out_of_reach(), request)
        if not stream.is_behind and not stream.log.has_after(position):
            return told(problems.no_such_position(position, stream.log.first, stream.log.last), request)
        return await self._read(request, stream, StreamReader(stream, position, request, self.keep_s), first=False)

    async def _read(
        self, request: web.Request, stream: KeptStream, reader: StreamReader, *, first: bool
    ) -> web.StreamResponse:
        # Before anything is awaited: what it asks for must not be dropped meanwhile.
        stream.attach(reader)
        if stream.timer is not None:
            stream.timer.cancel()
        self._spare.pop(stream.key, None)
        response = web.StreamResponse(headers=_head(stream, request, first=first))
        over: Over | None = None
        try:
            await response.prepare(request)
            first = False
            over = await reader.run(response)
        except ConnectionError:
            # Only writing to the client raises this here: it has left.
            pass
        finally:
            self._reader_over(stream, reader, over, nameless=first)
        return response

    def _reader_over(self, stream: KeptStream, reader: StreamReader, over: Over | None, *, nameless: bool) -> None:
        stream.delivered = stream.delivered or over is Over.WHOLE
        if not stream.detach(reader) or stream.phase is Phase.GONE:
            return
        if nameless or over in (Over.STALLED, Over.FORBIDDEN):
            # Nobody has its name; or it has been without anybody who took something for all of the time; or it is not
            # this process' any more.
            self.drop(stream)
            return
        keep_s = self.keep_s if stream.part is None else min(self.keep_s, _PART_S)
        stream.timer = asyncio.get_running_loop().call_later(keep_s, self.drop, stream)
        if stream.delivered:
            self._spare[stream.key] = stream

    # ---- ends

    def _drop_spare(self) -> bool:
        if not self._spare:
            return False
        self.drop(next(iter(self._spare.values())))
        return True

    def drop(self, stream: KeptStream) -> None:
        """Give one up."""
        self._spare.pop(stream.key, None)
        if self._streams.pop(stream.key, None) is not None:
            self._room.share_among(len(self._streams))
            stream.give_up()

    async def close(self) -> None:
        """Give everything up."""
        for stream in list(self._streams.values()):
            self.drop(stream)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _key(self, token: str) -> bytes:
        """Not the token itself: how long it takes to find one must say nothing of how much of a guess is right."""
        return hashlib.blake2b(token.encode(), digest_size=16, key=self._secret).digest()


def _head(stream: KeptStream, request: web.Request, *, first: bool) -> "CIMultiDict[str]":
    """The head of the answer as the session made it, under the name by which to come back."""
    head = CIMultiDict(stream.headers)
    head[headers.STREAM] = stream.token
    if not first:
        head.popall(headers.REQUEST_ID, None)
        head["Cache-Control"] = "no-store"
        headers.echo_request_id(head, request.headers)
    return head


def told(problem: Problem, request: web.Request) -> web.Response:
    """A problem as an answer."""
    return problem.response(request.headers, request.path)
