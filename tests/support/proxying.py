"""Runs the proxy in a test: engines and proxy on real sockets, and a client that keeps the bytes it got."""

import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from midstream.proxy.elsewhere import Elsewhere
from midstream.proxy.permission import Permits
from midstream.proxy.server import build_app, make_runner
from midstream.proxy.settings import ProxySettings

from .scripted import ScriptedCoordinator


@dataclass(frozen=True, slots=True)
class Got:
    """An answer as a client got it."""

    status: int
    headers: CIMultiDict[str]
    raw: bytes

    @property
    def events(self) -> list[bytes]:
        """The data of each event, comments left out."""
        parts = self.raw.split(b"\n\n")
        return [part.removeprefix(b"data: ") for part in parts if part.startswith(b"data: ")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events, decoded, without `[DONE]`."""
        return [json.loads(event) for event in self.events if event != b"[DONE]"]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The only choice of each chunk that has one."""
        return [chunk["choices"][0] for chunk in self.chunks if chunk.get("choices")]

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(
            choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in self.choices
        )

    @property
    def ids(self) -> list[int]:
        """The output ids that the client sees."""
        return [i for choice in self.choices for i in choice.get("token_ids") or ()]

    @property
    def finishes(self) -> list[str]:
        """All finish reasons."""
        return [choice["finish_reason"] for choice in self.choices if choice["finish_reason"]]

    @property
    def usages(self) -> list[dict[str, Any]]:
        """All usage objects."""
        return [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]

    @property
    def json(self) -> Any:
        """The body of an unstreamed answer."""
        return json.loads(self.raw)


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the proxy."""

    session: aiohttp.ClientSession
    url: str

    async def post(self, path: str, body: object, **headers: str) -> Got:
        """Post JSON (or bytes as they are) and read the whole answer."""
        data = body if isinstance(body, io.BytesIO) else io.BytesIO(_encoded(body))
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(
            URL(self.url + path, encoded=True), data=data, headers={"Content-Type": "application/json"} | names
        ) as answer:
            return Got(answer.status, CIMultiDict(answer.headers), await answer.read())

    async def complete(self, **fields: Any) -> Got:
        """A streamed completion."""
        return await self.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True} | fields)

    async def chat(self, **fields: Any) -> Got:
        """A streamed chat."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
        return await self.post("/v1/chat/completions", body | fields)


def _encoded(body: object) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


@asynccontextmanager
async def proxied(
    coordinator: ScriptedCoordinator,
    settings: ProxySettings | None = None,
    elsewhere: Elsewhere | None = None,
    permits: Permits | None = None,
) -> AsyncIterator[Client]:
    """A running proxy before the coordinator's engines, and its client."""
    async with AsyncExitStack() as stack:
        for engine in coordinator.engines:
            await stack.enter_async_context(engine.serving())
        app = build_app(coordinator, settings, elsewhere=elsewhere, permits=permits)
        runner = make_runner(app, shutdown_timeout_s=0.5)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Client(session, f"http://{host}:{port}")
