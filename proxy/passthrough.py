"""Passes requests through that are no sessions: byte for byte, in both directions, as they come.

Invariant: one buffered piece at a time in each direction; a worker that is lost within an answer breaks the client's
connection too, so that half an answer never looks whole. JSON that could carry a marker is checked first.
"""

from collections.abc import AsyncIterator

from aiohttp import web

from ..session.errors import Refused
from . import headers, problems
from .coordinator import Coordinator
from .request import encode_body, may_hold_transfer_fields, parse_body, without_transfer_fields
from .settings import ProxySettings
from .upstream import Upstream, UpstreamLost, content_type, read_some, target


class Passthrough:
    """The handler of everything that is not a session."""

    def __init__(self, coordinator: Coordinator, upstream: Upstream, settings: ProxySettings) -> None:
        self._coordinator = coordinator
        self._upstream = upstream
        self._settings = settings

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward a request whose body has not been read yet."""
        if request.path in self._settings.private_paths:
            return problems.private_path(request.path).response(request.headers)
        if not request.body_exists:
            return await self.forward(request, None)
        if content_type(request.headers) != "application/json":
            return await self.forward(request, None, stream_body=True)
        raw = await read_body(request, self._settings.body_bytes_max)
        if raw is None:
            return problems.body_too_large(self._settings.body_bytes_max).response(request.headers)
        return await self.forward(request, _cleaned(raw))

    async def forward(
        self, request: web.Request, body: bytes | None, *, stream_body: bool = False
    ) -> web.StreamResponse:
        """Forward a request with `body`, or with its own while it comes in."""
        try:
            base_url = self._coordinator.plain_upstream()
        except Refused as error:
            return problems.refused(error).response(request.headers)
        sent = headers.towards_engine(request.headers)
        if body is not None:
            sent.popall("Content-Length", None)
        try:
            answer = await self._upstream.request(
                request.method, target(base_url, request.raw_path), sent, _pieces(request) if stream_body else body
            )
        except UpstreamLost as lost:
            return problems.upstream_lost(str(lost)).response(request.headers)
        try:
            response = web.StreamResponse(
                status=answer.status,
                reason=answer.reason,
                headers=headers.towards_client(answer.headers, request.headers),
            )
            await response.prepare(request)
            while data := await read_some(answer):
                await response.write(data)
            await response.write_eof()
            return response
        except UpstreamLost:
            # The head is out: the only honest way to say that the rest will not come.
            if request.transport is not None:
                request.transport.abort()
            return response
        finally:
            answer.close()


def _cleaned(raw: bytes) -> bytes:
    """JSON without transfer fields: the very same bytes, if there are none."""
    if not may_hold_transfer_fields(raw):
        return raw
    try:
        body = parse_body(raw)
    except ValueError:
        return raw  # not an object of JSON: no engine reads a marker from it
    cleaned = without_transfer_fields(body)
    return raw if cleaned is body else encode_body(cleaned)


async def _pieces(request: web.Request) -> AsyncIterator[bytes]:
    while data := await request.content.readany():
        yield data


async def read_body(request: web.Request, bytes_max: int) -> bytes | None:
    """A request's whole body, or None as soon as it is known to be larger than `bytes_max`."""
    if (request.content_length or 0) > bytes_max:
        return None
    body = bytearray()
    while data := await request.content.readany():
        body += data
        if len(body) > bytes_max:
            return None
    return bytes(body)
