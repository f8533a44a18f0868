"""An API server of Kubernetes that knows Lease objects and nothing else, by the API's documentation.

Owns what clients of it may rely on: one growing resourceVersion for all objects; 409 AlreadyExists at a create, 409
Conflict at an update or delete that names another resourceVersion or uid; 404; label selectors; pages with `continue`;
watches that begin after a resourceVersion, with bookmarks, an end after `timeoutSeconds`, and 410 for versions that are
compacted; 401 without a valid token, 429 with Retry-After. And what a test wants of it: `compact`, `throttle`,
`tokens`, `freeze` (it takes connections and says nothing), `cut_watches`. It does not reproduce its own storage's
failures: it is one process that never loses an acknowledged write.
"""

import asyncio
import contextlib
import json
import ssl
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

_PREFIX = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
_PAGE_MAX = 500


@dataclass
class Event:
    version: int
    kind: str
    found: dict[str, Any]


@dataclass
class LeaseApiServer:
    """Its state; `url` once it runs."""

    tokens: set[str] = field(default_factory=lambda: {"good"})
    bookmark_every_s: float = 0.2
    tls: ssl.SSLContext | None = None
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and name, watches as WATCH

    def __post_init__(self) -> None:
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._version = 100
        self._compacted = 0
        self._events: list[Event] = []
        self._changed = asyncio.Condition()
        self._throttled = 0
        self._awake = asyncio.Event()
        self._awake.set()
        self._watches: set[asyncio.Task[Any]] = set()
        self._continues: dict[str, tuple[int, list[dict[str, Any]]]] = {}

    @property
    def objects(self) -> dict[str, dict[str, Any]]:
        """All objects by name."""
        return {name: found for (_, name), found in self._objects.items()}

    def compact(self) -> None:
        """Forget all history: watches and pages of before get 410."""
        self._compacted = self._version
        self._events.clear()
        self._continues.clear()

    def throttle(self, count: int) -> None:
        """Answer so many requests with 429."""
        self._throttled = count

    def freeze(self) -> None:
        """Say nothing any more, on no connection."""
        self._awake.clear()

    def thaw(self) -> None:
        """Go on where it was."""
        self._awake.set()

    def cut_watches(self) -> None:
        """Break all streams off."""
        for task in self._watches:
            task.cancel()

    async def remove(self, name: str) -> None:
        """Delete an object as an operator would."""
        [key] = [key for key in self._objects if key[1] == name]
        await self._take(key)

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator["LeaseApiServer"]:
        """Serve on a port of loopback."""
        app = web.Application(middlewares=[self._gate])
        app.router.add_get(_PREFIX, self._list)
        app.router.add_post(_PREFIX, self._create)
        app.router.add_get(_PREFIX + "/{name}", self._get)
        app.router.add_put(_PREFIX + "/{name}", self._update)
        app.router.add_delete(_PREFIX + "/{name}", self._delete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True, ssl_context=self.tls)
        await site.start()
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self._awake.set()
            self.cut_watches()
            await runner.cleanup()

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        is_watch = request.query.get("watch") in ("1", "true")
        self.requests.append(("WATCH" if is_watch else request.method, request.match_info.get("name", "")))
        await self._awake.wait()
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if token not in self.tokens or scheme != ("Bearer" if token else ""):
            return _status(401, "Unauthorized", "Unauthorized")
        if self._throttled > 0:
            self._throttled -= 1
            answer = _status(429, "TooManyRequests", "too many requests, please try again later")
            answer.headers["Retry-After"] = "1"
            return answer
        answer = await handler(request)
        await self._awake.wait()
        return answer  # type: ignore[no-any-return]

    async def _get(self, request: web.Request) -> web.Response:
        found = self._objects.get(_key(request))
        return _missing(request) if found is None else web.json_response(found)

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        about = body["metadata"]
        key = (request.match_info["namespace"], about["name"])
        if about.get("resourceVersion"):
            return _status(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        if fault := _unfit(body):
            return fault
        if key in self._objects:
            return _status(409, "AlreadyExists", f'leases.coordination.k8s.io "{key[1]}" already exists')
        about |= {"namespace": key[0], "uid": str(uuid.uuid4())}
        await self._write(key, body, "ADDED")
        return web.json_response(body, status=201)

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        key = _key(request)
        found = self._objects.get(key)
        if found is None:
            return _missing(request)
        if fault := _unfit(body):
            return fault
        about = body["metadata"]
        for field_name in ("uid", "resourceVersion"):
            if about.get(field_name) and about[field_name] != found["metadata"][field_name]:
                return _conflict(request)
        about |= {"namespace": key[0], "uid": found["metadata"]["uid"]}
        await self._write(key, body, "MODIFIED")
        return web.json_response(body)

    async def _delete(self, request: web.Request) -> web.Response:
        key = _key(request)
        found = self._objects.get(key)
        if found is None:
            return _missing(request)
        options = await request.json() if request.can_read_body else {}
        for field_name, wanted in (options.get("preconditions") or {}).items():
            if wanted != found["metadata"][field_name]:
                return _conflict(request)
        await self._take(key)
        return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") in ("1", "true"):
            return await self._watch(request)
        limit = int(request.query.get("limit", _PAGE_MAX))
        if then := request.query.get("continue"):
            if then not in self._continues:
                return _status(410, "Expired", "The provided continue parameter is too old")
            version, left = self._continues[then]
        else:
            version = self._version
            left = [found for key, found in sorted(self._objects.items()) if _is_selected(request, key, found)]
        about: dict[str, Any] = {"resourceVersion": str(version)}
        if left[limit:]:
            about["continue"] = uuid.uuid4().hex
            self._continues[about["continue"]] = (version, left[limit:])
        return web.json_response({"kind": "LeaseList", "metadata": about, "items": left[:limit]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        at = int(request.query["resourceVersion"])
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            await answer.prepare(request)
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "1800"))):
                while True:
                    if at < self._compacted:
                        gone = {
                            "kind": "Status",
                            "code": 410,
                            "reason": "Expired",
                            "message": "too old resource version",
                        }
                        await _send(answer, "ERROR", gone)
                        return answer
                    for event in [e for e in self._events if e.version > at]:
                        key = (event.found["metadata"]["namespace"], event.found["metadata"]["name"])
                        if _is_selected(request, key, event.found):
                            await self._awake.wait()
                            await _send(answer, event.kind, event.found)
                        at = event.version
                    if not await self._wait_beyond(at) and request.query.get("allowWatchBookmarks") == "true":
                        await self._awake.wait()
                        about = {"metadata": {"resourceVersion": str(at)}}
                        await _send(
                            answer, "BOOKMARK", {"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", **about}
                        )
        except TimeoutError:
            return answer
        finally:
            self._watches.discard(task)

    async def _wait_beyond(self, version: int) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.bookmark_every_s), self._changed:
                await self._changed.wait_for(lambda: self._version > version)
                return True
        return False

    async def _write(self, key: tuple[str, str], body: dict[str, Any], kind: str) -> None:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self._objects[key] = body
        await self._tell(kind, body)

    async def _take(self, key: tuple[str, str]) -> None:
        self._version += 1
        found = self._objects.pop(key)
        last = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self._version)}}
        await self._tell("DELETED", last)

    async def _tell(self, kind: str, found: dict[str, Any]) -> None:
        self._events.append(Event(self._version, kind, json.loads(json.dumps(found))))
        async with self._changed:
            self._changed.notify_all()


def _key(request: web.Request) -> tuple[str, str]:
    return request.match_info["namespace"], request.match_info["name"]


def _is_selected(request: web.Request, key: tuple[str, str], found: dict[str, Any]) -> bool:
    wanted = dict(pair.split("=") for pair in request.query.get("labelSelector", "").split(",") if pair)
    labels = found["metadata"].get("labels") or {}
    return key[0] == request.match_info["namespace"] and wanted.items() <= labels.items()


def _unfit(body: dict[str, Any]) -> web.Response | None:
    """What the validation of Lease objects refuses."""
    spec = body.get("spec") or {}
    if spec.get("leaseDurationSeconds") is not None and spec["leaseDurationSeconds"] <= 0:
        return _status(422, "Invalid", "spec.leaseDurationSeconds: must be greater than 0")
    if spec.get("leaseTransitions") is not None and spec["leaseTransitions"] < 0:
        return _status(422, "Invalid", "spec.leaseTransitions: must be greater than or equal to 0")
    if any(len(value) > 63 for value in (body["metadata"].get("labels") or {}).values()):
        return _status(422, "Invalid", "metadata.labels: must be no more than 63 bytes")
    if sum(len(v) for v in (body["metadata"].get("annotations") or {}).values()) > 256 << 10:
        return _status(422, "Invalid", "metadata.annotations: Too long")
    return None


def _missing(request: web.Request) -> web.Response:
    return _status(404, "NotFound", f'leases.coordination.k8s.io "{request.match_info["name"]}" not found')


def _conflict(request: web.Request) -> web.Response:
    return _status(409, "Conflict", f'Operation cannot be fulfilled on "{request.match_info["name"]}"')


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    return web.json_response({**body, "message": message}, status=code)


async def _send(answer: web.StreamResponse, kind: str, found: dict[str, Any]) -> None:
    await answer.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")
