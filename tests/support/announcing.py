"""Those who announce that a machine is to be left, by their documentation: three clouds' metadata servers, and the
Kubernetes API for one node object.

Owns what clients may rely on there: tokens and headers that are asked for, answers while there is nothing, and how
watches go on and end. What is announced is a test's to say. Nothing of any of them is reproduced beyond that.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """The URL at which it is served."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Ec2:
    """IMDSv2: nothing without a token; 401 with one that is not known; 404 for what is not announced."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.tokens: set[str] = set()
        self.tokens_given = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_put("/latest/api/token", self._token)
        app.router.add_get("/latest/meta-data/{path:.*}", self._get)
        return app

    async def _token(self, request: web.Request) -> web.Response:
        if not 1 <= int(request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21_600:
            return web.Response(status=400)
        self.tokens_given += 1
        token = f"token-{self.tokens_given}=="
        self.tokens.add(token)
        return web.Response(text=token)

    async def _get(self, request: web.Request) -> web.Response:
        if request.headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return web.Response(status=401)
        path = request.match_info["path"]
        if path not in self.found:
            return web.Response(status=404)
        return web.Response(text=json.dumps(self.found[path]))


class ComputeEngine:
    """Google's: 403 without `Metadata-Flavor: Google`, which its answers bear, too."""

    def __init__(self) -> None:
        self.maintenance = "NONE"
        self.preempted = "FALSE"
        self.flavor = "Google"

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/computeMetadata/v1/instance/{what}", self._get)
        return app

    async def _get(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        text = {"maintenance-event": self.maintenance, "preempted": self.preempted}[request.match_info["what"]]
        return web.Response(text=text, headers={"Metadata-Flavor": self.flavor})


class AzureImds:
    """Azure's: 400 without `Metadata: true` or an api-version."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[dict[str, Any]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metadata/scheduledevents", self._events)
        app.router.add_get("/metadata/instance/compute/name", self._name)
        return app

    async def _events(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata") != "true" or "api-version" not in request.query:
            return web.Response(status=400)
        return web.json_response({"DocumentIncarnation": 1, "Events": self.events})

    async def _name(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata") != "true" or request.query.get("format") != "text":
            return web.Response(status=400)
        return web.Response(text=self.name)


class NodeApi:
    """The API server for one node: get, and watches by `metadata.name` from a resourceVersion on; 410 for old ones."""

    def __init__(self, name: str, token: str = "good") -> None:
        self.name = name
        self.token = token
        self.node: dict[str, Any] | None = {"metadata": {"name": name, "resourceVersion": "10"}, "spec": {}}
        self.watches = 0
        self._version = 10
        self._compacted = 0
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._cut = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api/v1/nodes/{name}", self._get)
        app.router.add_get("/api/v1/nodes", self._watch)
        return app

    async def become(self, **parts: Any) -> None:
        """The node's spec or status is another."""
        self._version += 1
        self.node = {"metadata": {"name": self.name, "resourceVersion": str(self._version)}, **parts}
        await self._tell("MODIFIED", self.node)

    async def delete(self) -> None:
        """The node is gone."""
        self._version += 1
        node, self.node = self.node, None
        await self._tell("DELETED", node or {})

    async def cut(self) -> None:
        """Break all watches off, and forget all history."""
        self._cut += 1
        self._compacted = self._version
        async with self._changed:
            self._changed.notify_all()

    async def _tell(self, kind: str, node: dict[str, Any]) -> None:
        self._events.append((self._version, kind, node))
        async with self._changed:
            self._changed.notify_all()

    def _is_known(self, request: web.Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {self.token}"

    async def _get(self, request: web.Request) -> web.Response:
        if not self._is_known(request):
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if self.node is None or request.match_info["name"] != self.name:
            return web.json_response({"kind": "Status", "code": 404}, status=404)
        return web.json_response(self.node)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        assert request.query["fieldSelector"] == f"metadata.name={self.name}"
        if not self._is_known(request):
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        at, cut = int(request.query["resourceVersion"]), self._cut
        if at < self._compacted:
            return web.json_response({"kind": "Status", "code": 410}, status=410)
        self.watches += 1
        answer = web.StreamResponse()
        await answer.prepare(request)
        while self._cut == cut:
            for version, kind, node in [event for event in self._events if event[0] > at]:
                await answer.write(json.dumps({"type": kind, "object": node}).encode() + b"\n")
                at = version
            async with self._changed:
                await self._changed.wait()
        return answer
