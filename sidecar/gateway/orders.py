"""What a gateway asks of nodes when it takes sessions from one to another: `fleet_moves.py` is the other end.

Owns the questions. Invariants: each is proven, bounded in time and in what is read of its answer; a node that does not
answer, or not in words that are known, is a Refused like one that refuses.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from ...proxy.fleet import Prover
from ...session.errors import Refused
from ...session.ids import SessionId
from ..drain.order import Leaving, leaving_of
from ..fleet_api import SESSION_PATH
from ..fleet_moves import ROOM_PATH, SAVE
from .answers import bounded_text

ANSWER_S = 5.0
# The first snapshot of a long session; a node gives up by itself before that.
SAVE_S = 125.0
_ANSWER_BYTES_MAX = 64 << 20
_CONNECTIONS_EACH = 16


@dataclass(frozen=True, slots=True)
class Saved:
    """What a node says that it has saved: a session's outputs, and how many positions have KV; 0 where none is."""

    outputs: tuple[int, ...]
    kv_len: int
    size_bytes: int
    seconds: float


class Orders:
    """The questions of one gateway. Use as a context."""

    def __init__(self, prover: Prover) -> None:
        self._prover = prover
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Orders":
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=_CONNECTIONS_EACH, ssl=self._prover.tls or True)
        self._http = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def leaving(self, url: str) -> list[Leaving]:
        """What could leave a node. Raises Refused."""
        told = await self._ask("GET", url, SESSION_PATH.rstrip("/"), None, ANSWER_S)
        try:
            return leaving_of(told.get("sessions"))
        except ValueError as error:
            raise Refused("bad_answer", f"{url}: {error}") from error

    async def save(self, url: str, session: SessionId, to: str, *, last: bool) -> Saved:
        """Have a node save a session in another one's memory. Raises Refused."""
        body = {"to": to, "last": last}
        told = await self._ask("POST", url, SESSION_PATH + session + SAVE, body, SAVE_S)
        try:
            outputs = tuple(told["outputs"])
            if not all(type(token) is int and 0 <= token < 1 << 32 for token in outputs):
                raise ValueError("outputs are no token ids")
            return Saved(outputs, int(told["kv_len"]), int(told["size_bytes"]), float(told["seconds"]))
        except (KeyError, TypeError, ValueError) as error:
            raise Refused("bad_answer", f"{url}: {error}") from error

    async def hold(self, url: str, session: SessionId, tokens: int, keys: Collection[str]) -> None:
        """Have a node hold a place. Raises Refused."""
        await self._ask("PUT", url, ROOM_PATH + session, {"tokens": tokens, "keys": sorted(keys)}, ANSWER_S)

    async def release(self, url: str, session: SessionId) -> None:
        """Give the place back. Raises Refused."""
        await self._ask("DELETE", url, ROOM_PATH + session, None, ANSWER_S)

    async def _ask(self, method: str, url: str, path: str, body: Any, within_s: float) -> dict[str, Any]:
        assert self._http is not None, "use it as a context"
        raw = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        proof = self._prover.headers(method, urlsplit(url).path + path, raw)
        timeout = aiohttp.ClientTimeout(total=within_s, sock_connect=ANSWER_S)
        try:
            async with self._http.request(
                method, url + path, data=raw or None, headers=proof, timeout=timeout
            ) as answer:
                text = await bounded_text(answer, _ANSWER_BYTES_MAX)
                told = json.loads(text)
                if not isinstance(told, dict):
                    raise ValueError("its answer is no object")
                if answer.status == 200:
                    return told
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
            raise Refused("unreachable", f"{url}: {type(error).__name__}: {error}") from error
        error_told = told.get("error")
        said = error_told if isinstance(error_told, dict) else {}
        text = str(said.get("message", f"{url}: status {answer.status}"))
        raise Refused(str(said.get("code", answer.status))[:40], text[:300])
