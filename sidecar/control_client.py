"""Asks a running sidecar for what only its operator may: the other end of `control`."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import aiohttp

from ..session.errors import EngineError, Refused
from ..session.ids import SessionId
from .control import SOCKET


class ControlClient:
    """Use as an async context manager. Calls raise Refused with the sidecar's own words, EngineError if it is gone."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / SOCKET
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "ControlClient":
        self._http = aiohttp.ClientSession(
            "http://sidecar",
            connector=aiohttp.UnixConnector(str(self._path)),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def move(self, session: SessionId, *, tier: str | None = None, at: int | None = None) -> int:
        """Have a session go on elsewhere after `at` outputs; returns how many there were at the cut."""
        answer = await self._ask(f"/sessions/{session}/move", {"tier": tier, "at": at})
        return int(answer["journal"])

    async def snapshot(self, session: SessionId) -> dict[str, Any]:
        """Store a session now; `generation`, `kv_len`, `outputs` of what is stored."""
        return await self._ask(f"/sessions/{session}/snapshot", {})

    async def fork(
        self, session: SessionId, at: int, changes: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """Branch a session off after `at` outputs; yields the bytes of its stream as they come.

        `headers` go on to the engine, as one that asks for a key wants.
        """
        async with self._asking(
            "POST", f"/sessions/{session}/fork", {"at": at, "set": dict(changes)}, headers
        ) as answer:
            if answer.status != 200:
                raise _refused(answer.status, await answer.read())
            async for piece in answer.content.iter_any():
                yield piece

    async def ask_worker(self, worker: str, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """Have a worker parked or brought back: where it came to rest (`state`, `text`, `ok`, `seconds`)."""
        return await self._ask(f"/workers/{worker}/{verb}", body)

    async def drain(self, *, deadline_s: float | None = None, worker: str | None = None) -> dict[str, Any]:
        """Have the node, or one worker, emptied; how it is then."""
        return await self._ask("/drain", {"deadline_s": deadline_s, "worker": worker})

    async def cancel_drain(self, *, worker: str | None = None) -> dict[str, Any]:
        """Have it serve again."""
        query = "" if worker is None else f"?{urlencode({'worker': worker})}"
        return await self._ask(f"/drain{query}", {}, method="DELETE")

    async def drains(self) -> dict[str, Any]:
        """How the node's drain is, and those of its workers."""
        return await self._ask("/drain", {}, method="GET")

    async def _ask(self, path: str, body: dict[str, Any], *, method: str = "POST") -> dict[str, Any]:
        async with self._asking(method, path, body) as answer:
            raw = await answer.read()
        if answer.status != 200:
            raise _refused(answer.status, raw)
        told: dict[str, Any] = json.loads(raw)
        return told

    @asynccontextmanager
    async def _asking(
        self, method: str, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._http is None:
            raise EngineError("the control client is not open; use it with `async with`")
        try:
            async with self._http.request(method, path, json=body, headers=headers) as answer:
                yield answer
        except (OSError, aiohttp.ClientError) as error:
            raise EngineError(
                f"no sidecar answers at {self._path} ({error}); is it running? Name its folder with --state-dir"
            ) from error


def _refused(status: int, raw: bytes) -> Refused:
    """The sidecar's own words."""
    try:
        said = json.loads(raw)["error"]
        return Refused(str(said["code"]), str(said["message"]))
    except (ValueError, KeyError, TypeError):
        return Refused(str(status), raw[:300].decode("utf-8", "replace"))
