"""Serves a store in this node's memory to the nodes of its fleet, over HTTP/1.1.

Owns the routes, what is read of a request and when, and the drafts of clients. Invariant: nothing is read of a body,
and nothing is told, before the request has proven where it comes from; no size that a client names is believed beyond
its bound, and all bodies together have one; a chunk is stored only if it is the block of its name. A client that is
slow or gone holds nothing for long. The store does the rest.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from aiohttp import web

from ...proxy.fleet import Strangers
from ...session import chunk, manifest
from ...session.errors import CorruptError, StoreError
from ...session.ids import SessionId
from .contract import CHUNK_NAME, SESSION_NAME, Refusal, ReplicaError
from .object_draft import ObjectDraft
from .object_store import ObjectStore
from .peer_wire import (
    BASE,
    BYTES_PER_S_MIN,
    CHUNK_BODY_BYTES_MAX,
    DRAFT_IDLE_S,
    JSON_BODY_BYTES_MAX,
    MANIFEST_BODY_BYTES_MAX,
    NAMES_MAX,
    STATUS,
    reason_of,
)
from .signatures import NotSigned, Verifier, body_sha256

BODIES_BYTES_MAX = 256 << 20
BODY_S_MIN = 10.0
PIECE_BYTES = 256 << 10
THREADS = 8
ANSWERS_MAX = 64
_DRAFT = re.compile(r"[0-9a-f]{32}")

# Of the request that this task serves, where it is signed.
_body_must_be: ContextVar[str | None] = ContextVar("body_must_be", default=None)

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class _Draft:
    draft: ObjectDraft
    used_s: float
    users: int = 0


class PeerServer:
    """The application. With a `verifier` each request is signed; without, the transport has checked who it is."""

    def __init__(
        self, store: ObjectStore, verifier: Verifier | None, *, bodies_bytes_max: int = BODIES_BYTES_MAX
    ) -> None:
        self._store = store
        self._verifier = verifier
        self._strangers = Strangers()
        self._bodies_bytes_max = bodies_bytes_max
        self._bodies_bytes = 0
        self._drafts: dict[str, _Draft] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="peer")
        self.refused: dict[Refusal, int] = dict.fromkeys(Refusal, 0)
        self.bytes_received = self.bytes_sent = 0

    def app(self) -> web.Application:
        """For a runner."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(f"{BASE}/latest/{{session}}", self._latest)
        app.router.add_get(f"{BASE}/named/{{session}}/{{snapshot}}", self._named)
        app.router.add_get(f"{BASE}/chunks/{{name}}", self._get_chunk)
        app.router.add_post(f"{BASE}/drafts/{{draft}}", self._begin)
        app.router.add_post(f"{BASE}/drafts/{{draft}}/keep", self._keep)
        app.router.add_put(f"{BASE}/drafts/{{draft}}/chunks/{{name}}", self._put_chunk)
        app.router.add_post(f"{BASE}/drafts/{{draft}}/publish", self._publish)
        app.router.add_delete(f"{BASE}/drafts/{{draft}}", self._leave)
        app.router.add_get(f"{BASE}/list", self._list)
        app.router.add_get(f"{BASE}/figures", self._figures)
        app.router.add_post(f"{BASE}/finish/{{session}}", self._finish)
        app.cleanup_ctx.append(self._looking_after_drafts)
        return app

    # Who asks, and how much

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _body_must_be.set(None)
            if self._verifier is not None:
                self._check_signed(request, self._verifier)
            return await handler(request)
        except StoreError as error:
            return self._refusal(request, reason_of(error), str(error))
        except web.HTTPException:
            return self._refusal(request, Refusal.REQUEST, "no such path")

    def _check_signed(self, request: web.Request, verifier: Verifier) -> None:
        try:
            header = request.headers.get("Authorization")
            claim = verifier.check(request.method, request.raw_path, header, now_s=time.time())
        except NotSigned as error:
            self._strangers.tell(request.remote, str(error), time.monotonic())
            raise ReplicaError(Refusal.UNAUTHORIZED, "this node of the fleet answers its other nodes alone") from None
        if (request.content_length or 0) != claim.body_bytes or request.headers.get("Transfer-Encoding"):
            raise ReplicaError(Refusal.REQUEST, "the body has another length than was signed")
        _body_must_be.set(claim.body_sha256)

    def _refusal(self, request: web.Request, reason: Refusal, text: str) -> web.Response:
        self.refused[reason] += 1
        answer = web.json_response({"reason": reason.value, "error": text[:500]}, status=STATUS[reason])
        if request.body_exists and not request.content.is_eof():
            # The rest of the body is nothing that this side wants to read.
            answer.force_close()
        return answer

    @asynccontextmanager
    async def _body(self, request: web.Request, bytes_max: int) -> AsyncIterator[bytes]:
        """A request's body, for as long as it is needed: it counts until then."""
        size = request.content_length
        if size is None:
            raise ReplicaError(Refusal.REQUEST, "a body needs its length")
        if size > bytes_max:
            raise ReplicaError(Refusal.TOO_LARGE, f"{size} bytes are too many; at most {bytes_max} are taken")
        if self._bodies_bytes + size > self._bodies_bytes_max:
            raise ReplicaError(Refusal.BUSY, "too much is being sent here at once; try again later")
        self._bodies_bytes += size
        try:
            try:
                async with asyncio.timeout(BODY_S_MIN + size / BYTES_PER_S_MIN):
                    content = await request.content.readexactly(size) if size else b""
            except TimeoutError:
                raise ReplicaError(Refusal.SLOW, f"the body came slower than {BYTES_PER_S_MIN} bytes/s") from None
            except asyncio.IncompleteReadError:
                raise ReplicaError(Refusal.REQUEST, "the body ended early") from None
            expected = _body_must_be.get()
            if expected is not None and await self._in_thread(body_sha256, content) != expected:
                raise CorruptError("the body differs from what was signed")
            self.bytes_received += size
            yield content
        finally:
            self._bodies_bytes -= size

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    # Reading

    async def _latest(self, request: web.Request) -> web.StreamResponse:
        found = await self._in_thread(self._store.latest, _session(request))
        return await self._manifest(request, found)

    async def _named(self, request: web.Request) -> web.StreamResponse:
        found = await self._in_thread(self._store.named, _session(request), request.match_info["snapshot"])
        return await self._manifest(request, found)

    async def _manifest(self, request: web.Request, found: manifest.Manifest | None) -> web.StreamResponse:
        if found is None:
            raise ReplicaError(Refusal.MISSING, "no snapshot of that session is stored")
        return await self._bytes(request, manifest.encode(found))

    async def _get_chunk(self, request: web.Request) -> web.StreamResponse:
        return await self._bytes(request, await self._in_thread(self._store.get_stored, _name(request)))

    async def _bytes(self, request: web.Request, content: bytes) -> web.StreamResponse:
        """Bit by bit: who does not read holds little memory, and not for long."""
        answer = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        answer.content_length = len(content)
        try:
            async with asyncio.timeout(BODY_S_MIN + len(content) / BYTES_PER_S_MIN):
                await answer.prepare(request)
                for at in range(0, len(content), PIECE_BYTES):
                    await answer.write(content[at : at + PIECE_BYTES])
                await answer.write_eof()
        except TimeoutError:
            self.refused[Refusal.SLOW] += 1
            if request.transport is not None:
                request.transport.abort()
        self.bytes_sent += len(content)
        return answer

    async def _list(self, _: web.Request) -> web.Response:
        lines = await self._in_thread(self._store.list)
        return web.json_response(
            {"snapshots": [[getattr(line, field.name) for field in fields(line)] for line in lines]}
        )

    async def _figures(self, _: web.Request) -> web.Response:
        figures = self._store.figures()
        return web.json_response(asdict(figures))

    # Writing

    async def _begin(self, request: web.Request) -> web.Response:
        name = request.match_info["draft"]
        if not _DRAFT.fullmatch(name):
            raise ReplicaError(Refusal.REQUEST, "the name of a draft has 32 hex digits")
        if name not in self._drafts:
            self._drafts[name] = _Draft(self._store.begin(), time.monotonic())
        return web.json_response({})

    async def _keep(self, request: web.Request) -> web.Response:
        async with self._draft(request) as draft, self._body(request, JSON_BODY_BYTES_MAX) as body:
            try:
                names = json.loads(body)["names"]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ReplicaError(Refusal.REQUEST, "names are missing") from None
            if not isinstance(names, list) or len(names) > NAMES_MAX or not all(map(_is_chunk_name, names)):
                raise ReplicaError(Refusal.REQUEST, f"names must be those of chunks, {NAMES_MAX} at most")
            kept = await self._in_thread(draft.keep_all, names)
        return web.json_response({"kept": sorted(kept)})

    async def _put_chunk(self, request: web.Request) -> web.Response:
        name = _name(request)
        async with self._draft(request) as draft, self._body(request, CHUNK_BODY_BYTES_MAX) as body:
            await self._in_thread(_store, draft, name, body)
        return web.json_response({})

    async def _publish(self, request: web.Request) -> web.Response:
        async with self._draft(request) as draft, self._body(request, MANIFEST_BODY_BYTES_MAX) as body:
            published = await self._in_thread(lambda: draft.publish(manifest.decode(body)))
        return web.json_response({"snapshot": published})

    async def _leave(self, request: web.Request) -> web.Response:
        draft = self._drafts.pop(request.match_info["draft"], None)
        if draft is not None:
            await self._in_thread(draft.draft.__exit__, None, None, None)
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        await self._in_thread(self._store.finish, _session(request))
        return web.json_response({})

    @asynccontextmanager
    async def _draft(self, request: web.Request) -> AsyncIterator[ObjectDraft]:
        draft = self._drafts.get(request.match_info["draft"])
        if draft is None:
            raise ReplicaError(Refusal.REQUEST, "that draft was left, or nobody used it for too long; begin another")
        draft.users += 1
        try:
            yield draft.draft
        finally:
            draft.users -= 1
            draft.used_s = time.monotonic()

    async def _looking_after_drafts(self, _: web.Application) -> AsyncIterator[None]:
        async def look() -> None:
            while True:
                await asyncio.sleep(DRAFT_IDLE_S / 8)
                await self.leave_idle(time.monotonic() - DRAFT_IDLE_S)

        looking = asyncio.create_task(look())
        yield
        looking.cancel()
        await self.leave_idle(float("inf"))
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def leave_idle(self, since_s: float) -> None:
        """Leave the drafts that nobody has used since then."""
        for name, draft in list(self._drafts.items()):
            if not draft.users and draft.used_s < since_s:
                del self._drafts[name]
                await self._in_thread(draft.draft.__exit__, None, None, None)


def _store(draft: ObjectDraft, name: str, stored: bytes) -> None:
    """Unpacked once, as it arrives: what is not the block of its name is never kept."""
    chunk.decode(name, stored)
    draft.put_stored(name, stored)


def _is_chunk_name(name: object) -> bool:
    return isinstance(name, str) and CHUNK_NAME.fullmatch(name) is not None


def _name(request: web.Request) -> str:
    name = request.match_info["name"]
    if not _is_chunk_name(name):
        raise ReplicaError(Refusal.REQUEST, "the name of a chunk has 32 hex digits")
    return name


def _session(request: web.Request) -> SessionId:
    session = request.match_info["session"]
    if not SESSION_NAME.fullmatch(session):
        raise ReplicaError(Refusal.REQUEST, "the id of a session has 32 hex digits")
    return SessionId(session)
