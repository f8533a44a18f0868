"""Notices of Kubernetes: the node object says that it is cordoned, tainted, or in a condition that is a reason to go.

Owns the judgement of a node object, and the watch over one. Invariants: of a watch that breaks off, or of which the
server has forgotten where it was, the object is read anew; an object that was there and is gone is a notice, for its
machine is. One that never was there is a wrong name.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Collection
from typing import Any

import aiohttp

from ...session.errors import MidstreamError
from ..fleet.bodies import lines, whole
from ..fleet.kubernetes_access import KubernetesAccess
from .contract import Notice, NoticeError, Tell

ANSWER_S = 5.0
WATCH_S = 240
# So often at most is the object read, whatever becomes of watches.
AGAIN_S = 1.0
# And one that is gone, which may come back.
GONE_AGAIN_S = 5.0


def notice_of(node: dict[str, Any], taints: Collection[str], conditions: Collection[str]) -> Notice | None:
    """What a node object announces: `taints` are keys, `conditions` types, each with `=STATUS` behind it or `=True`."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    if (node.get("metadata") or {}).get("deletionTimestamp"):
        return Notice("the node is being deleted")
    for taint in spec.get("taints") or ():
        if taint.get("key") in taints:
            return Notice(f"taint {taint['key']}:{taint.get('effect', '')}")
    for condition in status.get("conditions") or ():
        told = f"{condition.get('type')}={condition.get('status')}"
        if told in conditions or (condition.get("status") == "True" and condition.get("type") in conditions):
            return Notice(f"condition {told}")
    return Notice("cordoned") if spec.get("unschedulable") is True else None


class KubernetesNode:
    """The node of this name."""

    name = "kubernetes"

    def __init__(
        self, access: KubernetesAccess, node: str, taints: Collection[str], conditions: Collection[str]
    ) -> None:
        self._access = access
        self._node = node
        self._taints = frozenset(taints)
        self._conditions = frozenset(conditions)
        self._was_there = False

    async def follow(self, tell: Tell) -> None:
        """See Source.follow."""
        connector = aiohttp.TCPConnector(limit=4, ssl=self._access.tls)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as http:
            while True:
                version = await self._read(http, tell)
                if version is None:
                    await asyncio.sleep(GONE_AGAIN_S * (1 + random.random()))
                    continue
                async for kind, found in self._events(http, version):
                    if kind == "DELETED":
                        tell(Notice("the node was deleted"))
                        break
                    if kind == "ERROR":
                        break
                    if kind in ("ADDED", "MODIFIED"):
                        tell(notice_of(found, self._taints, self._conditions))
                await asyncio.sleep(AGAIN_S * (1 + random.random()))

    async def _read(self, http: aiohttp.ClientSession, tell: Tell) -> str | None:
        """Tell of the object as it is; its version, None where it is gone."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        status, body = 0, b""
        for _ in range(2):
            try:
                async with http.get(self._url(f"/{self._node}"), timeout=timeout, **await self._asking()) as answer:
                    status, body = answer.status, await whole(answer.content)
            except (aiohttp.ClientError, OSError, TimeoutError, MidstreamError) as error:
                raise NoticeError(
                    f"Kubernetes API at {self._access.server} does not answer ({str(error) or type(error).__name__})"
                ) from error
            if status != 401:
                break
            self._access.reject()
        if status == 404 and self._was_there:
            tell(Notice("the node was deleted"))
            return None
        if status == 404:
            raise NoticeError(f"there is no node {self._node!r}; set drain.kubernetes_node to spec.nodeName of the pod")
        if status != 200:
            raise NoticeError(f"Kubernetes API: {status} for node {self._node}; the account needs get, list and watch "
                              "of nodes, which are the cluster's and need a ClusterRole")  # fmt: skip
        found = _object(body)
        self._was_there = True
        tell(notice_of(found, self._taints, self._conditions))
        return str((found.get("metadata") or {}).get("resourceVersion", ""))

    async def _events(self, http: aiohttp.ClientSession, version: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        query = {"fieldSelector": f"metadata.name={self._node}", "watch": "1", "resourceVersion": version,
                 "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}  # fmt: skip
        timeout = aiohttp.ClientTimeout(total=WATCH_S + 2 * ANSWER_S, sock_connect=ANSWER_S)
        try:
            async with http.get(self._url(""), params=query, timeout=timeout, **await self._asking()) as answer:
                if answer.status == 410:
                    return
                if answer.status != 200:
                    raise NoticeError(f"Kubernetes API: {answer.status} for a watch of node {self._node}")
                async for line in lines(answer.content):
                    said = _object(line)
                    found = said.get("object")
                    yield str(said.get("type")), found if isinstance(found, dict) else {}
        except (aiohttp.ClientError, OSError, TimeoutError):
            # The object is read anew, and that says whether the server is there.
            return

    def _url(self, path: str) -> str:
        return f"{self._access.server}/api/v1/nodes{path}"

    async def _asking(self) -> dict[str, Any]:
        token = await self._access.token()
        headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        return {"headers": headers, "server_hostname": self._access.server_name}


def _object(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise NoticeError("Kubernetes API: answered no object; is this an API server?")
    return said
