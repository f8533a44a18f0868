"""Asks a running sidecar for what only its operator may: the other end of `control`."""

from pathlib import Path
from types import TracebackType
from typing import Any

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

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._http is None:
            raise EngineError("the control client is not open; use it with `async with`")
        try:
            async with self._http.post(path, json=body) as answer:
                told = await answer.json()
        except (OSError, aiohttp.ClientError, ValueError) as error:
            raise EngineError(
                f"no sidecar answers at {self._path} ({error}); is it running? Name its folder with --state-dir"
            ) from error
        if answer.status != 200:
            said = told.get("error", {})
            raise Refused(str(said.get("code", answer.status)), str(said.get("message", told)))
        return dict(told)
