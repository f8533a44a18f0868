"""Calls to the Kubernetes API for Lease objects of one namespace (coordination.k8s.io/v1).

Owns requests, credentials as they change, and what a status means. Invariant: a call ends within `TRY_S`; it is
repeated at most once, with new credentials after 401, or after the wait that 429 asks for. It knows nothing of members.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from ...session.errors import ConfigError, CoordinationError
from .bodies import lines, whole
from .coordination import TRY_S
from .kubernetes_access import KubernetesAccess

_WAIT_S_MAX = 1.5


class KubernetesFault(CoordinationError):
    """The API server answered, and refused."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"Kubernetes API: {status} {text}")
        self.status = status

    @property
    def is_gone(self) -> bool:
        """There is no such object."""
        return self.status == 404

    @property
    def is_conflict(self) -> bool:
        """It is there already, or it is another than the one that was meant."""
        return self.status == 409

    @property
    def is_expired(self) -> bool:
        """So old a version is not known any more; list again."""
        return self.status == 410


class LeaseApi:
    """A client; needs a running event loop from its first call on."""

    def __init__(self, access: KubernetesAccess) -> None:
        self._access = access
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{access.namespace}/leases"
        self._http: aiohttp.ClientSession | None = None

    async def get(self, name: str) -> dict[str, Any]:
        """An object as a quorum has it."""
        return await self._call("GET", f"/{name}")

    async def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A new object; 409 where its name is taken."""
        return await self._call("POST", "", body)

    async def update(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Another content for the object whose resourceVersion is in the body; 409 where it is another by now."""
        return await self._call("PUT", f"/{name}", body)

    async def delete(self, name: str, *, uid: str, version: str = "") -> None:
        """Remove exactly this object, and exactly this version of it if one is named; 409 where it is another."""
        conditions = {"uid": uid, **({"resourceVersion": version} if version else {})}
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": conditions}
        await self._call("DELETE", f"/{name}", options)

    async def list(self, selector: str, limit: int, then: str = "") -> dict[str, Any]:
        """A page of the objects with these labels; `then` is the `continue` of the page before."""
        query = {"labelSelector": selector, "limit": str(limit), **({"continue": then} if then else {})}
        return await self._call("GET", "", query=query)

    async def watch(self, selector: str, version: str, for_s: int) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Events (type, object) since a version, bookmarks among them, until the server ends it.

        KubernetesFault for an event of type ERROR, and CoordinationError when the stream breaks off.
        """
        query = {
            **{"labelSelector": selector, "watch": "1", "allowWatchBookmarks": "true"},
            **{"resourceVersion": version, "timeoutSeconds": str(for_s)},
        }
        timeout = aiohttp.ClientTimeout(total=for_s + 2 * TRY_S, sock_connect=TRY_S)
        try:
            async with self._session().get(
                self._access.server + self._path,
                params=query,
                headers=await self._headers(),
                timeout=timeout,
                server_hostname=self._access.server_name,
            ) as answer:
                if answer.status != 200:
                    raise _fault(answer.status, await whole(answer.content))
                async for line in lines(answer.content):
                    kind, found = _event(line)
                    if kind == "ERROR":
                        raise KubernetesFault(int(found.get("code", 500)), str(found.get("message", ""))[:200])
                    yield kind, found
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise CoordinationError(
                f"Kubernetes API: the watch broke off ({str(error) or type(error).__name__})"
            ) from error

    async def close(self) -> None:
        """Let go of connections."""
        if self._http is not None:
            await self._http.close()

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(TRY_S):
                status, wait_s, said = await self._once(method, path, body, query)
                if status == 401:
                    self._access.reject()
                    status, wait_s, said = await self._once(method, path, body, query)
                elif status == 429 and wait_s <= _WAIT_S_MAX:
                    await asyncio.sleep(wait_s)
                    status, wait_s, said = await self._once(method, path, body, query)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise CoordinationError(
                f"Kubernetes API at {self._access.server} does not answer ({str(error) or type(error).__name__})"
            ) from error
        if status >= 300:
            raise _fault(status, said)
        return _json(said)

    async def _once(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str] | None
    ) -> tuple[int, float, bytes]:
        async with self._session().request(
            method,
            self._access.server + self._path + path,
            json=body,
            params=query,
            headers=await self._headers(),
            server_hostname=self._access.server_name,
        ) as answer:
            return answer.status, _seconds(answer.headers.get("Retry-After", "")), await whole(answer.content)

    async def _headers(self) -> dict[str, str]:
        token = await self._access.token()
        return {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=16, ssl=self._access.tls)
            self._http = aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20)
        return self._http


def _fault(status: int, body: bytes) -> CoordinationError | ConfigError:
    try:
        message = str(_json(body).get("message", ""))[:300]
    except CoordinationError:
        message = "and no JSON"
    if status in (401, 403):
        return ConfigError(
            f"Kubernetes API: {status} {message}; the account needs get, list, watch, create, update and "
            "delete for leases.coordination.k8s.io in its namespace"
        )
    return KubernetesFault(status, message)


def _event(line: bytes) -> tuple[str, dict[str, Any]]:
    said = _json(line)
    found = said.get("object")
    if not isinstance(found, dict):
        raise CoordinationError("Kubernetes API: an event without an object; is this an API server?")
    return str(said.get("type")), found


def _json(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CoordinationError("Kubernetes API: answered no JSON; is this an API server?") from error
    if not isinstance(said, dict):
        raise CoordinationError("Kubernetes API: answered no object; is this an API server?")
    return said


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 1.0
