"""Passes requests through that are no sessions: byte for byte, in both directions, as they come.

Invariant: one buffered piece at a time in each direction; a worker that is lost within an answer breaks the client's
connection too, so that half an answer never looks whole. JSON that could carry a marker is checked first.
"""

from collections.abc import AsyncIterator, Mapping

import aiohttp
from aiohttp import web

from ..session.errors import Refused
from . import headers, problems
from .bodies import BadBody, Bodies
from .coordinator import Coordinator
from .request import encode_body, may_hold_transfer_fields, parse_body, without_transfer_fields
from .settings import ProxySettings
from .upstream import Upstream, UpstreamLost, content_type, read_some, target

# No JSON in UTF-8 holds this byte, all JSON in UTF-16 or UTF-32 does; lenient engines read those too.
_NUL = b"\0"


class Passthrough:
    """The handler of everything that is not a session."""

    def __init__(self, coordinator: Coordinator, upstream: Upstream, settings: ProxySettings, bodies: Bodies) -> None:
        self._coordinator = coordinator
        self._upstream = upstream
        self._settings = settings
        self._bodies = bodies

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward a request whose body has not been read yet."""
        if self._is_private(request.path):
            return problems.private_path(request.path).response(request.headers, request.path)
        if not request.body_exists:
            return await self.forward(request, None)
        if not _may_be_read_as_json(content_type(request.headers)):
            return await self.forward(request, None, stream_body=True)
        try:
            body = _cleaned(await self._bodies.read(request))
        except BadBody as bad:
            return bad.problem.response(request.headers, request.path)
        return await self.forward(request, body)

    def _is_private(self, path: str) -> bool:
        """Whether a path, or a folder above it (written with its slash), is the operator's alone."""
        private = self._settings.private_paths
        return path in private or any(path.startswith(folder) for folder in private if folder.endswith("/"))

    async def forward(
        self,
        request: web.Request,
        body: bytes | None,
        *,
        stream_body: bool = False,
        more: Mapping[str, str] | None = None,
    ) -> web.StreamResponse:
        """Forward a request with `body`, or with its own while it comes in, to a worker."""
        try:
            base_url = self._coordinator.plain_upstream()
        except Refused as error:
            return problems.refused(error).response(request.headers, request.path)
        sent = headers.towards_engine(request.headers)
        sent.update(more or {})
        if body is not None:
            sent.popall("Content-Length", None)
        try:
            answer = await self._upstream.request(
                request.method, target(base_url, path_of(request)), sent, _pieces(request) if stream_body else body
            )
        except UpstreamLost as lost:
            return problems.upstream_lost(str(lost)).response(request.headers, request.path)
        return await self.pass_on(request, answer)

    async def pass_on(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """An answer, as it comes; it is closed at the end."""
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


def path_of(request: web.Request) -> str:
    """Path and query as the client wrote them, without a scheme and host before them (RFC 9112, 3.2.2)."""
    return request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs


def _may_be_read_as_json(media_type: str) -> bool:
    """Web frameworks also take `+json`, and what says nothing, for JSON."""
    return media_type in ("", "application/json") or media_type.endswith("+json")


def _cleaned(raw: bytes) -> bytes:
    """JSON without transfer fields: the very same bytes, if there are none. Raises BadBody."""
    if not may_hold_transfer_fields(raw) and _NUL not in raw:
        return raw
    try:
        body = parse_body(raw)
    except ValueError as error:
        # An engine may be more lenient (NaN, lone surrogates, UTF-16), and find a marker where none was removed.
        raise BadBody(problems.bad_request(str(error))) from error
    cleaned = without_transfer_fields(body)
    return raw if cleaned is body else encode_body(cleaned)


async def _pieces(request: web.Request) -> AsyncIterator[bytes]:
    while data := await request.content.readany():
        yield data
