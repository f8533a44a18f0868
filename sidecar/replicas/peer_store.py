"""A store in a peer's memory: the client's side (peer_wire.py).

Owns one pool of connections and the signing of requests. Invariant: every call ends within its time; no answer is read
beyond its bound; what comes back is proven here, a chunk by its name and a manifest by its own checksum, whoever sent
it. Threads may call everything.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from ...session import chunk, manifest
from ...session.errors import StoreError
from ...session.ids import SessionId
from ...session.manifest import Manifest
from ...session.store import StoredSnapshot, StoreFigures
from .contract import CHUNK_NAME, SESSION_NAME, SNAPSHOT_NAME, Refusal, ReplicaError
from .credentials import Credentials
from .loop_thread import LoopThread
from .peer_wire import (
    ANSWER_BYTES_MAX,
    BASE,
    BYTES_PER_S_MIN,
    CHUNK_BODY_BYTES_MAX,
    MANIFEST_BODY_BYTES_MAX,
    NAMES_MAX,
    error_of,
)
from .signatures import authorization

CONNECTIONS_MAX = 32
CONNECT_S = 3.0
PIECE_BYTES = 256 << 10
# How a peer that is gone, was killed half-way, or was never one, shows.
_LOST = (aiohttp.ClientError, asyncio.IncompleteReadError, CancelledError, OSError, ValueError, RuntimeError)
# What an answer may take beside the time of the bytes that it is about.
ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a peer is: a URL, or this node's own process at a Unix socket."""

    url: str
    socket: Path | None = None
    credentials: Credentials | None = None


class PeerStore:
    """See contract.ReplicaStore. Nothing is asked before it is needed."""

    def __init__(self, peer: Peer, *, answer_s: float = ANSWER_S) -> None:
        self._peer = peer
        self._answer_s = answer_s
        self._where = str(peer.socket or peer.url)
        self._loop = LoopThread("peer")
        self._session: aiohttp.ClientSession | None = None

    def close(self) -> None:
        """See ReplicaStore.close."""
        session, self._session = self._session, None
        if session is not None:
            self._loop.call(session.close(), 5)
        self._loop.close()

    # Reading

    def get_chunk(self, name: str) -> bytes:
        """See Store.get_chunk."""
        return chunk.decode(name, self._fetch(name))

    def get_stored(self, name: str) -> bytes:
        """See ReplicaReader.get_stored."""
        stored = self._fetch(name)
        chunk.check(name, stored)
        return stored

    def latest(self, session: SessionId) -> Manifest | None:
        """See Store.latest."""
        return self._manifest(session, f"/latest/{session}")

    def named(self, session: SessionId, snapshot: str) -> Manifest | None:
        """See Store.named."""
        return self._manifest(session, f"/named/{session}/{snapshot}") if SNAPSHOT_NAME.fullmatch(snapshot) else None

    def list(self) -> Sequence[StoredSnapshot]:
        """See Store.list."""
        try:
            return [StoredSnapshot(*line) for line in self.json("GET", "/list")["snapshots"]]
        except (TypeError, KeyError):
            raise self._odd() from None

    def figures(self) -> StoreFigures:
        """See Store.figures."""
        try:
            return StoreFigures(**self.json("GET", "/figures"))
        except TypeError:
            raise self._odd() from None

    # Writing

    def begin(self) -> "PeerDraft":
        """See ReplicaStore.begin."""
        draft = PeerDraft(self, f"/drafts/{secrets.token_hex(16)}")
        self.json("POST", draft.path)
        return draft

    def finish(self, session: SessionId) -> None:
        """See Store.finish."""
        self.json("POST", f"/finish/{session}")

    # For drafts, and whoever asks for something else

    def ask(self, method: str, path: str, body: bytes = b"", *, bytes_max: int = ANSWER_BYTES_MAX) -> bytes:
        """The body of an answer; ReplicaError or CorruptError for whatever is not one."""
        within_s = self._answer_s + len(body) / BYTES_PER_S_MIN
        try:
            return self._loop.call(self._exchange(method, path, body, bytes_max, within_s), within_s + 5)
        except TimeoutError:
            raise ReplicaError(Refusal.SLOW, f"{self._where}: no answer within {within_s:.0f} s") from None
        except _LOST as error:
            raise ReplicaError(
                Refusal.UNREACHABLE, f"{self._where}: {error or type(error).__name__}; look whether it runs"
            ) from error

    def json(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        """An answer that is an object."""
        try:
            found = json.loads(self.ask(method, path, body))
        except (ValueError, RecursionError):
            raise self._odd() from None
        if not isinstance(found, dict):
            raise self._odd()
        return found

    # Inside

    def _odd(self) -> ReplicaError:
        return ReplicaError(Refusal.INTERNAL, f"{self._where}: its answer is not one of this midstream's")

    def _fetch(self, name: str) -> bytes:
        if not CHUNK_NAME.fullmatch(name):
            raise StoreError(f"chunk {name[:40]!r}: not the name of a chunk")
        return self.ask("GET", f"/chunks/{name}", bytes_max=CHUNK_BODY_BYTES_MAX)

    def _manifest(self, session: SessionId, path: str) -> Manifest | None:
        if not SESSION_NAME.fullmatch(session):
            return None
        try:
            stored = self.ask("GET", path, bytes_max=MANIFEST_BODY_BYTES_MAX)
        except ReplicaError as error:
            if error.reason is Refusal.MISSING:
                return None
            raise
        found = manifest.decode(stored)
        if found.session != session:
            raise ReplicaError(Refusal.INTERNAL, f"{self._where}: it answered with session {found.session}")
        return found

    async def _exchange(self, method: str, path: str, body: bytes, bytes_max: int, within_s: float) -> bytes:
        session = self._opened()
        target = BASE + path
        headers = {"Content-Length": str(len(body))}
        if self._peer.credentials is not None and self._peer.credentials.secret is not None:
            headers["Authorization"] = authorization(
                self._peer.credentials.secret, method, target, body, now_s=time.time(), once=secrets.token_hex(16)
            )
        async with (
            asyncio.timeout(within_s),
            session.request(method, self._peer.url + target, data=_pieces(body), headers=headers) as answer,
        ):
            content = await self._read(answer, bytes_max)
            if answer.status == 200:
                return content
        try:
            told = json.loads(content)
            reason, text = told.get("reason"), told.get("error")
        except (ValueError, AttributeError):
            reason, text = None, f"status {answer.status}"
        raise error_of(self._where, reason, text)

    async def _read(self, answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
        size = answer.content_length
        if size is None or size > bytes_max:
            answer.close()
            raise ReplicaError(Refusal.TOO_LARGE, f"{self._where}: an answer of {size} bytes; {bytes_max} are taken")
        return await answer.content.readexactly(size)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            context = self._peer.credentials.client if self._peer.credentials is not None else None
            connector: aiohttp.BaseConnector
            if self._peer.socket is not None:
                connector = aiohttp.UnixConnector(str(self._peer.socket), limit=CONNECTIONS_MAX)
            else:
                connector = aiohttp.TCPConnector(limit=CONNECTIONS_MAX, ssl=context if context is not None else True)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False, read_bufsize=1 << 20
            )
        return self._session


async def _pieces(body: bytes) -> AsyncIterator[memoryview]:
    """A body bit by bit: others on the loop have their turn."""
    for at in range(0, len(body), PIECE_BYTES):
        yield memoryview(body)[at : at + PIECE_BYTES]


class PeerDraft:
    """See contract.ReplicaDraft."""

    def __init__(self, store: PeerStore, path: str) -> None:
        self._store = store
        self.path = path
        self._is_left = False

    def put_chunk(self, raw: bytes | bytearray | memoryview) -> str:
        """See Draft.put_chunk."""
        name = chunk.chunk_name(raw)
        if not self.keep(name):
            self.put_stored(name, chunk.encode(raw)[1])
        return name

    def put_stored(self, name: str, stored: bytes) -> None:
        """See ReplicaDraft.put_stored."""
        chunk.check(name, stored)
        if len(stored) > CHUNK_BODY_BYTES_MAX:
            raise ReplicaError(
                Refusal.TOO_LARGE, f"chunk {name}: {len(stored)} bytes; a peer takes {CHUNK_BODY_BYTES_MAX} at most"
            )
        self._store.ask("PUT", f"{self.path}/chunks/{name}", stored)

    def keep(self, name: str) -> bool:
        """See Draft.keep."""
        return bool(self.keep_all([name]))

    def keep_all(self, names: Collection[str]) -> frozenset[str]:
        """See ReplicaDraft.keep_all."""
        wanted = sorted(set(names))
        kept: set[str] = set()
        for at in range(0, len(wanted), NAMES_MAX):
            body = json.dumps({"names": wanted[at : at + NAMES_MAX]}, separators=(",", ":")).encode()
            kept.update(self._store.json("POST", f"{self.path}/keep", body).get("kept", ()))
        # What was not asked for is not believed.
        return frozenset(kept).intersection(wanted)

    def publish(self, manifest_: Manifest) -> str:
        """See Draft.publish."""
        if self._is_left:
            raise ReplicaError(Refusal.REQUEST, "this draft was left; begin another")
        return str(self._store.json("POST", f"{self.path}/publish", manifest.encode(manifest_)).get("snapshot"))

    def __enter__(self) -> "PeerDraft":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_left:
            return
        self._is_left = True
        try:
            self._store.ask("DELETE", self.path)
        except StoreError:
            # It is gone, or leaves what nobody uses by itself in a while.
            return
