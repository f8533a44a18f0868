"""What a node keeps of gateways' streams, for whoever goes on with them when their gateway is no more.

Invariants: a part has no ids, and no client comes back to it: it is handed to a gateway alone that has proved itself,
from its first event on or not at all; only its present owner has it given up, and the owner is whoever it was handed to
last.
"""

from collections.abc import Callable
from contextlib import ExitStack

from aiohttp import web

from . import problems
from .keeping import Keeping, Session
from .orphans import KeptPart
from .stream_kept import KeptStream, Phase
from .streams import Streams, told


class Parts:
    """Those of one node. `is_known`: others of its fleet could ask for them."""

    def __init__(self, streams: Streams, is_known: Callable[[], bool]) -> None:
        self._streams = streams
        self._is_known = is_known

    async def keep(self, request: web.Request, part: KeptPart, session: Session, held: ExitStack) -> web.StreamResponse:
        """Answer a gateway, and keep that for another one."""
        if not self._is_known():
            return await session(None)
        self.forget(part.origin.token, None)
        stream = self._streams.new(part.origin.token, bytes.fromhex(part.origin.digest), part=part)
        if stream is None:
            return await session(None)
        self._streams.run(stream, session(Keeping(stream.respond, stream.permission)), held)
        return await self._streams.answer(request, stream, 0, first=True)

    async def hand_over(self, request: web.Request, part: KeptPart) -> web.StreamResponse:
        """All that is kept of a gateway's stream, and what follows, for another gateway."""
        stream = self._get(part.origin.token)
        if stream is None or stream.part is None or stream.part.session != part.session:
            return told(problems.not_kept(self._streams.keep_s), request)
        stream.part = part
        return await self._streams.go_on(request, stream, 0)

    def look(self, request: web.Request, token: str) -> web.Response:
        """What is kept of a gateway's stream, if all of it is."""
        stream = self._get(token)
        if stream is None or stream.part is None or not stream.log.has_after(0):
            return told(problems.not_kept(self._streams.keep_s), request)
        return web.json_response(stream.part.to_json())

    def forget(self, token: str, owner: str | None) -> None:
        """What is kept of a gateway's stream goes, if it is that one's (None: whose ever it is)."""
        stream = self._streams.get(token)
        if stream is not None and stream.part is not None and owner in (None, stream.part.origin.owner):
            self._streams.drop(stream)

    def _get(self, token: str) -> KeptStream | None:
        stream = self._streams.get(token)
        return stream if stream is not None and stream.part is not None and stream.phase is not Phase.AWAITED else None
