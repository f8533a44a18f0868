"""One simulated gateway: a real coordinator of nodes, real watches, real sessions, over the simulated network.

Owns one host's gateway process and its starts. Of its own it has only what stands for aiohttp's client in the questions
that it asks nodes.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from midstream.proxy import headers
from midstream.proxy.choices import split
from midstream.proxy.policy import policy_of
from midstream.proxy.request import parse_body
from midstream.proxy.sessions import Sessions
from midstream.session.errors import Refused
from midstream.sidecar.fleet.proof import SecretProver
from midstream.sidecar.fleet.record import Record, decode
from midstream.sidecar.fleet_api import LIFE, NODE_PATH
from midstream.sidecar.gateway.coordinator import GatewayCoordinator
from midstream.sidecar.gateway.moves import MoveSettings
from midstream.sidecar.gateway.node_watch import NodeWatch, why_not_believed
from midstream.sidecar.gateway.orders import Orders
from midstream.sidecar.gateway.picture_watch import PictureWatch
from midstream.sidecar.gateway.verdicts import ANSWER_S, Verdicts

from .client import Broken
from .http import Ask, SimAnswer, SimRequest, SimUpstream, request
from .loop import Process
from .place import Shared, coordination_of

GENERATION = "generation"


class SimGateway:
    """One host."""

    def __init__(
        self, shared: Shared, name: str, nodes: Mapping[str, str], *, poll_s: float, lost_s: float, recomputes: bool
    ) -> None:
        self.name = name
        self.host = name
        self.life = 0
        self.is_up = False
        self.process: Process | None = None
        self.coordinator: GatewayCoordinator | None = None
        self.watch: PictureWatch | NodeWatch | None = None
        self._sessions: Sessions | None = None
        self._shared = shared
        self._nodes = nodes
        self._poll_s = poll_s
        self._lost_s = lost_s
        self._recomputes = recomputes
        # The newest answer of a node that was read here, by session, and its generation.
        self._reading: dict[str, tuple[int, SimAnswer | None]] = {}

    def start(self) -> None:
        """A gateway begins."""
        if self.is_up:
            return
        shared = self._shared
        self.life += 1
        self.is_up = True
        shared.network.powered_on(self.host)
        self.process = process = shared.process(f"{self.name}.{self.life}")
        self._reading = {}
        self._prover = SecretProver(shared.secret)
        verdicts = _Verdicts(shared, process, self.host, self._prover)
        self.coordinator = process.context.copy().run(
            lambda: GatewayCoordinator(
                shared.metrics,
                verdicts,
                _Orders(shared, process, self.host, self._prover),
                takeover_timeout_s=shared.takeover_timeout_s,
                moves=MoveSettings(recomputes=self._recomputes),
            )
        )
        upstream = SimUpstream(shared.proxy, shared.network, process, self.host, self._prover)
        upstream.on_answer = self._answered
        self._sessions = Sessions(self.coordinator, upstream, shared.proxy)
        table = self.coordinator.nodes
        coordination = coordination_of(shared, process, self.host)
        if coordination is not None:
            self.watch = PictureWatch(coordination, table)
        else:
            self.watch = process.context.copy().run(
                lambda: _Watch(shared, process, self.host, self._nodes, table, self._prover, self._poll_s, self._lost_s)
            )
        process.start(self.watch.follow(), name=f"{self.name}-nodes")

    def kill(self, *, silently: bool = False) -> None:
        """SIGKILL, or its host's power."""
        if self.is_up:
            self.is_up = False
            assert self.process is not None
            self.process.kill()
            self._shared.network.died(self.process, self.host, silently=silently)

    def pause(self) -> None:
        """SIGSTOP."""
        if self.process is not None and self.is_up:
            self.process.stop()

    def wake(self) -> None:
        """SIGCONT."""
        if self.process is not None and self.process.is_stopped:
            self.process.wake()

    async def handle(self, request: SimRequest) -> web.StreamResponse:
        """A client's request, as the application routes it."""
        assert self._sessions is not None
        body = parse_body(request.body)
        policy = policy_of(request.headers, self._shared.proxy.policy)
        return await self._sessions.run(request, split(body, chat=False), policy, "")  # type: ignore[arg-type]

    def _answered(self, answer: SimAnswer, sent: "CIMultiDict[str]") -> None:
        session = sent.get(headers.REQUEST_ID, "").partition("-")[0]
        _, before = self._reading.get(session, (0, None))
        generation = int(sent.get(headers.REQUEST_ID, "").partition("-")[2] or 1)
        if before is not None and before.is_open:
            self._shared.on_defect(Broken("two-owners", f"{self.name} reads session {session} from two nodes at once"))
        if generation <= self._reading.get(session, (0, None))[0]:
            self._shared.on_defect(Broken("generation", f"{self.name}: session {session} has owner {generation} again"))
        self._reading[session] = generation, answer


async def _asked(
    shared: Shared, process: Process, host: str, url: str, path: str, prover: SecretProver, method: str = "GET",
    body: bytes = b"",
) -> tuple[int, Mapping[str, str], bytes]:  # fmt: skip
    """One question and its whole answer. ConnectionError, TimeoutError or ClientError."""
    proof = CIMultiDict(prover.headers(method, path, body))
    answer = await request(shared.network, process, host, URL(url + path), Ask(method, path, proof, body))
    try:
        parts = []
        while data := await answer.content.readany():
            parts.append(data)
        return answer.status, answer.headers, b"".join(parts)
    finally:
        answer.close()


class _Verdicts(Verdicts):
    def __init__(self, shared: Shared, process: Process, host: str, prover: SecretProver) -> None:
        super().__init__(prover)
        self._sim = shared, process, host, prover

    async def _told(self, base_url: str, path: str) -> dict[str, Any]:
        shared, process, host, prover = self._sim
        try:
            async with asyncio.timeout(ANSWER_S):
                status, _, body = await _asked(shared, process, host, base_url, path, prover)
        except (OSError, TimeoutError, aiohttp.ClientError):
            return {}
        told: dict[str, Any] = json.loads(body) if status == 200 else {}
        return told


class _Orders(Orders):
    def __init__(self, shared: Shared, process: Process, host: str, prover: SecretProver) -> None:
        super().__init__(prover)
        self._sim = shared, process, host, prover

    async def _ask(self, method: str, url: str, path: str, body: Any, within_s: float) -> dict[str, Any]:
        shared, process, host, prover = self._sim
        raw = b"" if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(within_s):
                status, _, text = await _asked(shared, process, host, url, path, prover, method, raw)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise Refused("unreachable", f"{url}: {error}") from error
        told: dict[str, Any] = json.loads(text)
        if status == 200:
            return told
        raise Refused(str(told["error"]["code"]), str(told["error"]["message"]))


class _Watch(NodeWatch):
    def __init__(
        self, shared: Shared, process: Process, host: str, urls: Mapping[str, str], table: Any, prover: SecretProver,
        poll_s: float, lost_after_s: float,
    ) -> None:  # fmt: skip
        super().__init__(urls, table, prover, poll_s=poll_s, lost_after_s=lost_after_s)
        self._sim = shared, process, host, prover

    async def _ask(self, http: aiohttp.ClientSession, url: str, at_most_s: float) -> tuple[Record | None, str, str]:
        shared, process, host, prover = self._sim
        try:
            async with asyncio.timeout(at_most_s):
                status, told, body = await _asked(shared, process, host, url, NODE_PATH, prover)
        except TimeoutError:
            return None, "", "it does not answer"
        except (OSError, aiohttp.ClientError) as error:
            return None, "", f"{type(error).__name__}: {error}"
        if status == 200:
            return decode(body.decode()), told.get(LIFE, ""), ""
        if status == 401:
            return None, "", why_not_believed(told.get("Date", ""), shared.wall_s())
        return None, "", f"it answered {status}"
