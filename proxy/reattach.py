"""Keeps streams for clients that lose their connection, and lets them come back.

Owns all kept streams, by what their tokens hash to, and the time for which each is kept. Invariant: a stream without a
reader is given up after `reattach_s`, its session with it, as at a disconnect where nothing is kept; a whole answer is
kept for as long after its last reader. A token opens its own stream and tells nothing of others: whether it was wrong,
has ended or is another node's, the answer is the same, and so is the work for it. Tokens are in no log and no listing.
What is kept and sent is `stream_kept`'s and `stream_reader`'s; where a session goes on is nothing to this.
"""

import asyncio
import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from ..session.errors import Refused
from . import headers, problems
from .event_ids import TOKEN_BYTES, is_token, new_token, parse_id, parse_position, prefix_of
from .keeping import Keeping
from .orphans import LOOK, Adopts, KeptPart, Origin, Orphan, code_of_this
from .permission import Permits
from .problems import Problem
from .reattach_elsewhere import OWNER, SENT_ON, STREAMS_PATH, AskElsewhere
from .settings import ProxySettings
from .stream_kept import KeptStream, Phase
from .stream_reader import Over, StreamReader
from .stream_room import Room

_LOG = logging.getLogger("midstream.proxy")

# What is kept of a gateway's stream is not kept for longer than the fleet remembers who had its session last.
_PART_S = 600.0

# What answers a request; None: to its client, as ever.
Session = Callable[[Keeping | None], Coroutine[Any, Any, web.StreamResponse]]
# What goes on with the stream of a gateway that is no more.
Heir = Callable[[Keeping, Orphan], Coroutine[Any, Any, web.StreamResponse]]


class Reattach:
    """All streams that are kept."""

    def __init__(
        self, settings: ProxySettings, elsewhere: AskElsewhere, permits: Permits, adopts: Adopts | None = None
    ) -> None:
        self._adopts = adopts
        self._keep_s = settings.reattach_s
        self._streams_max = settings.reattach_streams_max
        self._elsewhere = elsewhere
        self._permits = permits
        self._secret = secrets.token_bytes(16)
        self._streams: dict[bytes, KeptStream] = {}
        # Whole, had by a reader, and read by nobody now: the first to go, the oldest first.
        self._spare: OrderedDict[bytes, KeptStream] = OrderedDict()
        self._room = Room(settings.reattach_bytes_max, settings.reattach_stream_bytes_max, self._drop_spare)
        self._tasks: set[asyncio.Task[web.StreamResponse]] = set()

    # ---- sessions

    async def begin(self, request: web.Request, body: bytes, session: Session, held: ExitStack) -> web.StreamResponse:
        """Answer a request for a stream. What `held` holds is the session's: it is let go of when that is over."""
        stream = self._new(_digest(request, body))
        if stream is None:
            # Everything is in use: without ids the client knows that it cannot come back to this one.
            return await session(None)
        self._run(stream, session(self._keeping(stream)), held)
        return await self._answer(request, stream, 0, first=True)

    def _keeping(self, stream: KeptStream) -> Keeping:
        owner = self._elsewhere.own_name
        if not owner:
            return Keeping(stream.respond, stream.permission)
        origin = Origin(stream.token, stream.digest.hex(), owner, code_of_this())
        return Keeping(
            stream.respond,
            stream.permission,
            origin,
            is_new=lambda: stream.log.last == 0,
            forget=lambda base_url: self._elsewhere.forget(base_url, origin),
        )

    def _run(self, stream: KeptStream, session: Coroutine[Any, Any, web.StreamResponse], held: ExitStack) -> None:
        stream.task = task = asyncio.create_task(session)
        self._tasks.add(task)
        # A task that is cancelled before its first step lets go of nothing by itself.
        lent = held.pop_all()
        task.add_done_callback(lambda _: lent.close())
        task.add_done_callback(lambda done: self._session_over(stream, done))

    async def _answer(
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
                self._drop(stream)
            else:
                stream.timer = asyncio.get_running_loop().call_later(self._keep_s, self._drop, stream)
            raise
        if stream.phase is Phase.AWAITED:
            return await task
        return await self._read(request, stream, StreamReader(stream, position, request, self._keep_s), first=first)

    def _new(
        self, digest: bytes, token: str = "", *, part: KeptPart | None = None, behind: int = 0
    ) -> KeptStream | None:
        if len(self._streams) >= self._streams_max and not self._drop_spare():
            return None
        token = token or new_token(secrets.token_bytes(TOKEN_BYTES), self._elsewhere.own_prefix)
        stream = KeptStream(token, self._key(token), digest, self._room, self._permits.now(), part=part, behind=behind)
        self._streams[stream.key] = stream
        self._room.share_among(len(self._streams))
        return stream

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

    # ---- of a gateway, at its node

    async def keep_part(
        self, request: web.Request, part: KeptPart, session: Session, held: ExitStack
    ) -> web.StreamResponse:
        """Answer a gateway, and keep that for another one."""
        if not self._elsewhere.own_prefix:
            # Nobody of the fleet could ask for it.
            return await session(None)
        self._drop_part(part.origin.token, None)
        stream = self._new(bytes.fromhex(part.origin.digest), part.origin.token, part=part)
        if stream is None:
            return await session(None)
        self._run(stream, session(Keeping(stream.respond, stream.permission)), held)
        return await self._answer(request, stream, 0, first=True)

    async def hand_over(self, request: web.Request, part: KeptPart) -> web.StreamResponse:
        """All that is kept of a gateway's stream, and what follows, for another gateway."""
        stream = self._part(part.origin.token)
        if stream is None or stream.part is None or stream.part.session != part.session:
            return _told(problems.not_kept(self._keep_s), request)
        stream.part = part
        return await self._go_on(request, stream, 0)

    def _part(self, token: str) -> KeptStream | None:
        stream = self._streams.get(self._key(token))
        return stream if stream is not None and stream.part is not None and stream.phase is not Phase.AWAITED else None

    def _drop_part(self, token: str, owner: str | None) -> None:
        """What is kept of a gateway's stream goes, if it is that one's (None: whose ever it is)."""
        stream = self._streams.get(self._key(token))
        if stream is not None and stream.part is not None and owner in (None, stream.part.origin.owner):
            self._drop(stream)

    def _look(self, request: web.Request, token: str) -> web.Response:
        """What is kept of a gateway's stream, if all of it is."""
        stream = self._part(token)
        if stream is None or stream.part is None or not stream.log.has_after(0):
            return _told(problems.not_kept(self._keep_s), request)
        return web.json_response(stream.part.to_json())

    # ---- of a gateway that is no more

    async def _adopt(
        self, request: web.Request, token: str, position: int, body: bytes, heir: Heir, held: ExitStack
    ) -> web.StreamResponse:
        """Go on with a stream whose gateway is no more, or say where it is."""
        gone = _told(problems.not_kept(self._keep_s), request)
        if self._adopts is None or SENT_ON in request.headers:
            return gone
        if self._key(token) in self._streams:
            # Its client comes back twice before the first answer.
            return _told(problems.out_of_reach(), request)
        digest = _digest(request, body)
        stream = self._new(digest, token, behind=position)
        if stream is None:
            return gone
        found: Orphan | str | None = None
        try:
            found = await self._adopts.adopt(token, digest.hex())
        except Refused as error:
            return _told(problems.refused(error), request)
        finally:
            if not isinstance(found, Orphan):
                self._drop(stream)
        if not isinstance(found, Orphan):
            return gone if found is None else await self._elsewhere.ask_at(request, found, body)
        stream.permission.cover((found.session,), claimed=found.generation)
        self._run(stream, heir(self._keeping(stream), found), held)
        return await self._answer(request, stream, position, first=False)

    # ---- those who come back

    async def resume(
        self, request: web.Request, token: str, position: int, body: bytes, heir: Heir, held: ExitStack
    ) -> web.StreamResponse:
        """The same request again, with the id of the last event that its client has.

        What `held` holds is the session's where this begins one: that of a gateway which is no more.
        """
        found = await self._find(request, token, body)
        if found is None:
            return await self._adopt(request, token, position, body, heir, held)
        if not isinstance(found, KeptStream):
            return found
        if found.digest != _digest(request, body):
            return _told(problems.another_request(), request)
        return await self._go_on(request, found, position)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """A stream by its name: GET reads on, DELETE gives it up."""
        if request.method not in ("GET", "DELETE"):
            answer = _told(problems.wrong_method(request.method), request)
            answer.headers["Allow"] = "GET, DELETE"
            return answer
        token = request.path.removeprefix(STREAMS_PATH)
        try:
            position = _position_of(request, token)
        except ValueError as error:
            return _told(problems.bad_request(str(error)), request)
        found = await self._find(request, token, None)
        if found is None and SENT_ON in request.headers:
            # It has proved to come from the fleet.
            if request.method == "DELETE":
                self._drop_part(token, request.query.get(OWNER, ""))
                return web.Response(status=204)
            if LOOK in request.headers:
                return self._look(request, token)
        if found is None:
            return _told(problems.not_kept(self._keep_s), request)
        if not isinstance(found, KeptStream):
            return found
        if request.method == "DELETE":
            self._drop(found)
            return web.Response(status=204)
        if found.phase is Phase.WHOLE and position == found.log.last:
            # Readers that come back by themselves, as browsers' do, stop at this.
            return web.Response(status=204)
        return await self._go_on(request, found, position)

    async def _find(
        self, request: web.Request, token: str, body: bytes | None
    ) -> KeptStream | web.StreamResponse | None:
        """The stream of that name, or the answer to its client; None where there is none that is known of."""
        stranger = self._elsewhere.refusal(request, body)
        if stranger is not None:
            return _told(stranger, request)
        stream = self._streams.get(self._key(token)) if is_token(token) else None
        if stream is not None and stream.permission.is_over:
            # It is another's by now, or nobody's.
            self._drop(stream)
        elif stream is not None and stream.phase is not Phase.AWAITED and stream.part is None:
            return stream
        return await self._elsewhere.ask(request, prefix_of(token), body) if is_token(token) else None

    async def _go_on(self, request: web.Request, stream: KeptStream, position: int) -> web.StreamResponse:
        if not stream.log.has_after(position):
            return _told(problems.no_such_position(position, stream.log.first, stream.log.last), request)
        return await self._read(request, stream, StreamReader(stream, position, request, self._keep_s), first=False)

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
            self._drop(stream)
            return
        keep_s = self._keep_s if stream.part is None else min(self._keep_s, _PART_S)
        stream.timer = asyncio.get_running_loop().call_later(keep_s, self._drop, stream)
        if stream.delivered:
            self._spare[stream.key] = stream

    # ---- ends

    def _drop_spare(self) -> bool:
        if not self._spare:
            return False
        self._drop(next(iter(self._spare.values())))
        return True

    def _drop(self, stream: KeptStream) -> None:
        self._spare.pop(stream.key, None)
        if self._streams.pop(stream.key, None) is not None:
            self._room.share_among(len(self._streams))
            stream.give_up()

    async def close(self) -> None:
        """Give everything up. What nodes keep of it is for whoever goes on with it."""
        await self._elsewhere.close()
        for stream in list(self._streams.values()):
            self._drop(stream)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _key(self, token: str) -> bytes:
        """Not the token itself: how long it takes to find one must say nothing of how much of a guess is right."""
        return hashlib.blake2b(token.encode(), digest_size=16, key=self._secret).digest()


def last_event_id(request: web.Request) -> tuple[str, int] | None:
    """The stream and the event that a client says it has; None where it names none of ours."""
    return parse_id(request.headers.get(headers.LAST_EVENT_ID, ""))


def _position_of(request: web.Request, token: str) -> int:
    """What the client has of the stream; ValueError says what is wrong with how it says that."""
    told = request.headers.get(headers.LAST_EVENT_ID)
    if told:
        known = parse_id(told)
        if known is None or known[0] != token:
            raise ValueError("Last-Event-ID is no id of an event of this stream: give the last one that was received")
        return known[1]
    position = parse_position(request.query.get("from", "0"))
    if position is None:
        raise ValueError("from is no number: give that of the last event that was received, or 0 for all of them")
    return position


def _digest(request: web.Request, body: bytes) -> bytes:
    """What makes a request the same one."""
    return hashlib.blake2b(request.raw_path.encode() + b"\0" + body, digest_size=16).digest()


def _head(stream: KeptStream, request: web.Request, *, first: bool) -> "CIMultiDict[str]":
    """The head of the answer as the session made it, under the name by which to come back."""
    head = CIMultiDict(stream.headers)
    head[headers.STREAM] = stream.token
    if not first:
        head.popall(headers.REQUEST_ID, None)
        head["Cache-Control"] = "no-store"
        headers.echo_request_id(head, request.headers)
    return head


def _told(problem: Problem, request: web.Request) -> web.Response:
    return problem.response(request.headers, request.path)
