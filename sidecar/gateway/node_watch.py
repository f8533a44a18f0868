"""What the nodes of a gateway say of themselves, asked again and again.

Owns the list of nodes and their last words. Invariant: a node that has not answered for `lost_after_s` is lost, is told
of once, and gets nothing until it answers again. Every wait is bounded. Where sessions go is `nodes`' to choose.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from urllib.parse import urlsplit

import aiohttp

from ...proxy.fleet import Prover
from ..fleet.record import RECORD_BYTES_MAX, Readiness, Record, decode, with_readiness
from ..fleet_api import NODE_PATH
from .nodes import Node

_LOG = logging.getLogger("midstream.gateway")

ANSWER_S = 2.0


class NodeWatch:
    """Follows nodes until it is cancelled. `on_lost`: a node's name; `on_change`: something else is known."""

    def __init__(
        self,
        urls: Mapping[str, str],
        prover: Prover,
        *,
        poll_s: float,
        lost_after_s: float,
        on_lost: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self._nodes = {name: Node(name, url) for name, url in urls.items()}
        self._heard_s: dict[str, float] = {}
        self._prover = prover
        self._poll_s = poll_s
        self._lost_after_s = lost_after_s
        self._on_lost = on_lost
        self._on_change = on_change

    def all(self) -> list[Node]:
        """All nodes, as last heard of."""
        return list(self._nodes.values())

    def get(self, name: str) -> Node:
        """One of them."""
        return self._nodes[name]

    def add_open(self, name: str, more: int) -> None:
        """So many sessions more (or fewer) are there."""
        node = self._nodes[name]
        self._nodes[name] = replace(node, open=node.open + more)

    async def follow(self) -> None:
        """Ask all of them, each at its own pace."""
        timeout = aiohttp.ClientTimeout(total=min(ANSWER_S, self._lost_after_s))
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as http, asyncio.TaskGroup() as tasks:
            for name in self._nodes:
                tasks.create_task(self._follow_one(http, name))

    async def _follow_one(self, http: aiohttp.ClientSession, name: str) -> None:
        while True:
            began_s = time.monotonic()
            record, why = await self._ask(http, self._nodes[name].url)
            now_s = time.monotonic()
            if record is not None:
                self._heard_s[name] = now_s
            elif now_s - self._heard_s.get(name, now_s - self._lost_after_s) >= self._lost_after_s:
                self._lose(name, why)
                record = None
            else:
                record = self._nodes[name].record
            if record != self._nodes[name].record:
                _LOG.info("event=node node=%s readiness=%s", name, record.readiness.value if record else "lost")
                self._nodes[name] = replace(self._nodes[name], record=record)
                self._on_change()
            await asyncio.sleep(max(self._poll_s - (time.monotonic() - began_s), self._poll_s / 2))

    def _lose(self, name: str, why: str) -> None:
        if self._nodes[name].record is not None:
            _LOG.warning("event=node_lost node=%s why=%s", name, why)
            self._nodes[name] = replace(self._nodes[name], record=None)
            self._on_lost(name)
            self._on_change()

    async def _ask(self, http: aiohttp.ClientSession, url: str) -> tuple[Record | None, str]:
        try:
            async with http.get(
                url + NODE_PATH, headers=self._prover.headers("GET", urlsplit(url).path + NODE_PATH, b"")
            ) as answer:
                text = (await answer.content.read(RECORD_BYTES_MAX + 1)).decode()
                if answer.status == 200:
                    return decode(text), ""
                return None, f"it answered {answer.status}: {text[:200]}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return None, f"{type(error).__name__}: {error}"
        except ValueError as error:
            return None, f"it said something that cannot be read: {error}"

    def suspect(self, name: str) -> None:
        """It broke an answer off: it is not to be asked for anything until it has answered again."""
        node = self._nodes[name]
        if node.is_ready and node.record is not None:
            self._nodes[name] = replace(node, record=with_readiness(node.record, Readiness.NOT_READY))
