"""Lets clients that lost their connection come back to their streams, wherever in the fleet these are.

Invariant: a token opens its own stream and tells nothing of others: whether it was wrong, has ended or is another
node's, the answer is the same, and so is the work for it. Where a session goes on is nothing to this. What is kept is
`streams`'.
"""

import hashlib
import secrets
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Any

from aiohttp import web

from ..session.errors import Refused
from . import headers, problems
from .event_ids import TOKEN_BYTES, is_token, new_token, parse_id, parse_position, prefix_of
from .keeping import Keeping, Session
from .orphans import LOOK, Adopts, Origin, Orphan, code_of_this
from .reattach_elsewhere import OWNER, SENT_ON, STREAMS_PATH, AskElsewhere
from .reattach_parts import Parts
from .stream_kept import KeptStream, Phase
from .streams import Streams, told

# What goes on with the stream of a gateway that is no more.
Heir = Callable[[Keeping, Orphan], Coroutine[Any, Any, web.StreamResponse]]


class Reattach:
    """The streams of one process, as clients see them. `parts`: of gateways' streams, which are no client's."""

    def __init__(self, streams: Streams, elsewhere: AskElsewhere, adopts: Adopts | None = None) -> None:
        self._streams = streams
        self._elsewhere = elsewhere
        self._adopts = adopts
        # Streams of others that are being looked for.
        self._looked_for: set[str] = set()
        self.parts = Parts(streams, lambda: bool(elsewhere.own_prefix))

    async def begin(self, request: web.Request, body: bytes, session: Session, held: ExitStack) -> web.StreamResponse:
        """Answer a request for a stream. What `held` holds is the session's: it is let go of when that is over."""
        stream = self._streams.new(self._new_token(), _digest(request, body))
        if stream is None:
            # Everything is in use: without ids the client knows that it cannot come back to this one.
            return await session(None)
        self._streams.run(stream, session(self._keeping(stream)), held)
        return await self._streams.answer(request, stream, 0, first=True)

    def _new_token(self) -> str:
        return new_token(secrets.token_bytes(TOKEN_BYTES), self._elsewhere.own_prefix)

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
            require_all_heard=stream.require_all_heard,
            forget=partial(self._forget, stream, origin),
        )

    def _forget(self, stream: KeptStream, origin: Origin, base_url: str) -> None:
        """A node need not keep its part: the stream was given up, or goes on elsewhere.

        Who may not send any more says nothing of it: that is for whoever comes next. Nor does who has not heard all of
        it that its client has: who comes back begins with it once more.
        """
        if stream.permission.may_send() and (stream.phase is Phase.GONE or not stream.is_behind):
            self._elsewhere.forget(base_url, origin)

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
            return told(problems.another_request(), request)
        return await self._streams.go_on(request, found, position)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """A stream by its name: GET reads on, DELETE gives it up."""
        if request.method not in ("GET", "DELETE"):
            answer = told(problems.wrong_method(request.method), request)
            answer.headers["Allow"] = "GET, DELETE"
            return answer
        token = request.path.removeprefix(STREAMS_PATH)
        try:
            position = _position_of(request, token)
        except ValueError as error:
            return told(problems.bad_request(str(error)), request)
        found = await self._find(request, token, None)
        if found is None and SENT_ON in request.headers:
            # It has proved to come from the fleet.
            if request.method == "DELETE":
                self.parts.forget(token, request.query.get(OWNER, ""))
                return web.Response(status=204)
            if LOOK in request.headers:
                return self.parts.look(request, token)
        if found is None:
            return told(problems.not_kept(self._streams.keep_s), request)
        if not isinstance(found, KeptStream):
            return found
        if request.method == "DELETE":
            self._streams.drop(found)
            return web.Response(status=204)
        if found.phase is Phase.WHOLE and position == found.log.last:
            # Readers that come back by themselves, as browsers' do, stop at this.
            return web.Response(status=204)
        return await self._streams.go_on(request, found, position)

    async def _find(
        self, request: web.Request, token: str, body: bytes | None
    ) -> KeptStream | web.StreamResponse | None:
        """The stream of that name, or the answer to its client; None where there is none that is known of."""
        stranger = self._elsewhere.refusal(request, body)
        if stranger is not None:
            return told(stranger, request)
        stream = self._streams.get(token) if is_token(token) else None
        if stream is not None and stream.permission.is_over:
            # It is another's by now, or nobody's.
            self._streams.drop(stream)
        elif stream is not None and stream.phase is not Phase.AWAITED and stream.part is None:
            return stream
        return await self._elsewhere.ask(request, prefix_of(token), body) if is_token(token) else None

    # ---- of a gateway that is no more

    async def _adopt(
        self, request: web.Request, token: str, position: int, body: bytes, heir: Heir, held: ExitStack
    ) -> web.StreamResponse:
        """Go on with a stream whose gateway is no more, or say where it is."""
        gone, later = problems.not_kept(self._streams.keep_s), problems.out_of_reach()
        if self._adopts is None or prefix_of(token) in ("", self._elsewhere.own_prefix):
            # What was begun here, or by nobody whom others know, is nobody else's either.
            return told(gone, request)
        if token in self._looked_for or self._streams.get(token) is not None or not self._streams.may_begin():
            # Its client comes back twice before the first answer; or there is no place at the moment.
            return told(later, request)
        digest = _digest(request, body)
        self._looked_for.add(token)
        try:
            found = await self._adopts.adopt(token, digest.hex())
        except Refused as error:
            return told(problems.refused(error), request)
        finally:
            self._looked_for.discard(token)
        if isinstance(found, str):
            # Never by a chain: whoever has sent this on is told to ask again.
            is_sent_on = SENT_ON in request.headers
            return told(later, request) if is_sent_on else await self._elsewhere.ask_at(request, found, body)
        if found is None:
            return told(gone, request)
        # Only now: a name that anybody can invent is to cost nobody else's answer its place.
        stream = self._streams.new(token, digest, behind=position, permission=found.permission)
        if stream is None:
            found.permission.ended()
            return told(later, request)
        self._streams.run(stream, heir(self._keeping(stream), found), held)
        return await self._streams.answer(request, stream, position, first=False)

    async def close(self) -> None:
        """Give everything up. What nodes keep of it is for whoever goes on with it."""
        await self._elsewhere.close()
        await self._streams.close()


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
