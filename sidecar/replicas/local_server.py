"""What this node's own mover and sidecar are told of snapshots elsewhere, at a Unix socket.

Owns two routes to read by, as a peer's (peer_wire.py), so that a mover needs no client of its own for each kind of
store, two for figures, and two for the sidecar: one by which it has a session brought to another node, and one by which
it tells that a session is over which was brought here. The socket is 0600: only this user gets there, so nothing is
signed. Invariants: whoever brings takes no thread from who restores; what is begun counts until it is done, whether or
not somebody still waits for it.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from aiohttp import web

from ...session import manifest
from ...session.errors import StoreError
from ...session.ids import SessionId
from .bringer import Brought
from .contract import CHUNK_NAME, SESSION_NAME, Refusal, ReplicaError, ReplicaReader
from .peer_wire import BASE, STATUS, reason_of

READERS = 32
# Beyond what a mover reads at once; the rest is told to come again.
READS_MAX = 128
# As many as a node saves at once, and as many again that nobody waits for any more.
BRINGERS = 8
BRINGS_MAX = 16

T = TypeVar("T")


class _Threads:
    """Threads for one kind of work, of which at most `work_max` is under way or waits for them."""

    def __init__(self, name: str, count: int, work_max: int) -> None:
        self._name = name
        self._work_max = work_max
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._mutex = threading.Lock()
        self._under_way = 0

    async def run(self, work: Callable[[], T]) -> T:
        """What it comes to. ReplicaError where there is too much of it."""
        with self._mutex:
            if self._under_way >= self._work_max:
                raise ReplicaError(Refusal.BUSY, f"{self._name}: {self._work_max} are under way; try again")
            self._under_way += 1
        future = self._threads.submit(work)
        future.add_done_callback(self._done)
        return await asyncio.wrap_future(future)

    def _done(self, _: "Future[Any]") -> None:
        with self._mutex:
            self._under_way -= 1


class LocalServer:
    """The application. `status` and `lag` give what is shown of it all."""

    def __init__(
        self,
        reader: ReplicaReader,
        status: Callable[[], dict[str, float]],
        lag: Callable[[], dict[str, Any]],
        bring: Callable[[SessionId, str], Brought],
        finish: Callable[[SessionId], None],
    ) -> None:
        self._reader = reader
        self._status = status
        self._lag = lag
        self._bring = bring
        self._finish = finish
        self._readers = _Threads("restore", READERS, READS_MAX)
        self._bringers = _Threads("bring", BRINGERS, BRINGS_MAX)

    def app(self) -> web.Application:
        """For a runner."""
        app = web.Application(middlewares=[_told])
        app.router.add_get(f"{BASE}/latest/{{session}}", self._latest)
        app.router.add_get(f"{BASE}/chunks/{{name}}", self._chunk)
        app.router.add_post(f"{BASE}/bring/{{session}}", self._brought)
        app.router.add_post(f"{BASE}/finish/{{session}}", self._finished)
        app.router.add_get(f"{BASE}/status", self._tell_status)
        app.router.add_get(f"{BASE}/lag", self._tell_lag)
        return app

    async def _latest(self, request: web.Request) -> web.Response:
        session = _session(request)
        found = await self._readers.run(lambda: self._reader.latest(session))
        if found is None:
            raise ReplicaError(Refusal.MISSING, "no store that answers has a snapshot of that session")
        return web.Response(body=manifest.encode(found))

    async def _chunk(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not CHUNK_NAME.fullmatch(name):
            raise ReplicaError(Refusal.REQUEST, "the name of a chunk has 32 hex digits")
        return web.Response(body=await self._readers.run(lambda: self._reader.get_stored(name)))

    async def _brought(self, request: web.Request) -> web.Response:
        session = _session(request)
        try:
            to = json.loads(await request.text())["to"]
        except (ValueError, KeyError, TypeError, RecursionError):
            to = None
        if not isinstance(to, str):
            raise ReplicaError(Refusal.REQUEST, 'expected {"to": "peer://HOST:PORT"}')
        return web.json_response(asdict(await self._bringers.run(lambda: self._bring(session, to))))

    async def _finished(self, request: web.Request) -> web.Response:
        session = _session(request)
        await self._readers.run(lambda: self._finish(session))
        return web.json_response({})

    async def _tell_status(self, _: web.Request) -> web.Response:
        return web.json_response(self._status())

    async def _tell_lag(self, _: web.Request) -> web.Response:
        return web.json_response(self._lag())


def _session(request: web.Request) -> SessionId:
    session = request.match_info["session"]
    if not SESSION_NAME.fullmatch(session):
        raise ReplicaError(Refusal.REQUEST, "the id of a session has 32 hex digits")
    return SessionId(session)


@web.middleware
async def _told(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except StoreError as error:
        reason = reason_of(error)
        return web.json_response({"reason": reason.value, "error": str(error)[:500]}, status=STATUS[reason])
