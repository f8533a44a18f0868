"""Gateway and nodes in one process, before scripted engines: both storeys' real proxies on real sockets.

A node here is the real proxy with its real fleet paths over a coordinator that follows a script; the gateway is all
real. So what the two say to each other is what they say in a fleet, and what engines do is a test's to choose.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
from aiohttp import web

from midstream.proxy.coordinator import Outcome, Placement, Reason, SessionFacts
from midstream.proxy.elsewhere import Elsewhere
from midstream.proxy.fleet import Believer
from midstream.proxy.server import build_app, make_runner
from midstream.proxy.settings import ProxySettings
from midstream.session.errors import Refused
from midstream.session.marker import KvSource, Marker, Resume
from midstream.sidecar.drain.order import Leaving
from midstream.sidecar.drain.room import Free, Rooms
from midstream.sidecar.drain.saving import Saved
from midstream.sidecar.fleet.proof import SecretBeliever, SecretProver
from midstream.sidecar.fleet_api import fleet_routes, node_record, proving
from midstream.sidecar.fleet_moves import move_routes
from midstream.sidecar.gateway.coordinator import GatewayCoordinator
from midstream.sidecar.gateway.moves import MoveSettings
from midstream.sidecar.gateway.node_watch import NodeWatch
from midstream.sidecar.gateway.orders import Orders
from midstream.sidecar.gateway.routes import routes
from midstream.sidecar.gateway.verdicts import Verdicts
from midstream.sidecar.metrics import Metrics

from .proxying import Client
from .scripted import ScriptedCoordinator, ScriptedEngine

SECRET = b"of this fleet, and of no other 0"
SLOTS = 8
KEY = "k" * 32


class NodeCoordinator(ScriptedCoordinator):
    """A node's coordinator. `kv`: where it gets the KV of a session that it takes in, if it does."""

    def __init__(self, *engines: ScriptedEngine) -> None:
        super().__init__(*engines)
        self.draining = False
        self.ready_count = 1
        self.open_count = 0
        self.open_max = 0
        self.models: tuple[str, ...] = ()
        self.first_kv = KvSource.NONE
        self.admission_wait_s = 0.0
        # Sessions that run here.
        self.open: set[str] = set()
        self._outcomes: dict[str, list[Outcome]] = {}
        self._unseen: set[str] = set()

    async def admit(self, facts: SessionFacts) -> Placement:
        """The first engine, under the generation that a gateway gives."""
        self.calls.append(("admit", facts))
        await asyncio.sleep(self.admission_wait_s)
        if self.refusal is not None:
            raise self.refusal
        self._begin(facts)
        return self._place(facts, Marker(facts.session, facts.generation + 1), ())

    async def take_in(self, facts: SessionFacts, outputs: tuple[int, ...], *, unseen: bool = False) -> Placement:
        """The first engine, with what the gateway's client has."""
        self.calls.append(("take_in", facts, outputs, unseen))
        if self.refusal is not None:
            raise self.refusal
        if facts.policy == "exact" and self.first_kv is KvSource.NONE:
            raise Refused("not_exact", "the session could only be recomputed")
        self._begin(facts)
        if unseen:
            self._unseen.add(facts.session)
        resume = Resume(outputs, self.first_kv, "0" * 32) if outputs else None
        return self._place(facts, Marker(facts.session, facts.generation + 1, resume), outputs)

    def resumed(self, facts: SessionFacts, placement: Placement, gap_s: float) -> None:
        """Note what it came to."""
        super().resumed(facts, placement, gap_s)
        assert self._outcome is not None
        if self._outcome is Outcome.RESTARTED and facts.session in self._unseen:
            self._outcome = Outcome.RECOMPUTED
        self._outcomes[facts.session].append(self._outcome)

    def outcome(self, facts: SessionFacts, tokens: int | None = None) -> Outcome | None:
        """The least exact one."""
        order = (Outcome.RESTARTED, Outcome.RECOMPUTED, Outcome.EXACT)
        return next((o for o in order if o in self._outcomes.get(facts.session, ())), None)

    def ended(self, facts: SessionFacts, ending: str, tokens: int | None = None) -> None:
        """Note it."""
        super().ended(facts, ending, tokens)
        self.open_count -= 1
        self.open.discard(facts.session)

    def reported(self, facts: SessionFacts, placement: Placement, takeovers: int, outcome: Outcome | None) -> None:
        """Engines are no nodes."""
        raise AssertionError

    def told_of(self, session: str) -> dict[str, Any] | None:
        """As a sidecar tells."""
        outcomes = self._outcomes.get(session)
        return None if outcomes is None else {"outcomes": [{"outcome": o.value, "tier": "disk"} for o in outcomes]}

    # What the fleet's paths ask of a sidecar's workers.

    def names(self) -> tuple[str, ...]:
        """The models that are served."""
        return self.models

    def ready(self) -> list[Any]:
        """Workers, all of the same key."""
        return [_Worker()] * self.ready_count

    def _begin(self, facts: SessionFacts) -> None:
        self._next[facts.session] = 0
        self._outcomes[facts.session] = []
        self.open.add(facts.session)
        self.open_count += 1
        self.open_max = max(self.open_max, self.open_count)


class _Worker:
    current = SimpleNamespace(key=SimpleNamespace(digest=lambda: KEY))


class Moving:
    """How a node gives sessions away, and what it holds for others: what a test has it say."""

    def __init__(self, coordinator: NodeCoordinator) -> None:
        self._coordinator = coordinator
        self.rooms = Rooms()
        self.places = SLOTS
        # Sessions that were saved, whether it was the last time, and where.
        self.saves: list[tuple[str, bool, str]] = []
        self.saving_now = self.saving_max = 0
        self.seconds = 0.0
        self.refusal: Refused | None = None
        # The last save of a session waits for this.
        self.may_end = asyncio.Event()
        self.may_end.set()

    def leaving(self) -> list[Leaving]:
        """All that runs here."""
        open_ = sorted(self._coordinator.open)
        return [Leaving(session, 100, len(self._journal(session)), key=KEY) for session in open_]

    def running(self) -> frozenset[str]:
        """The same, by name."""
        return frozenset(self._coordinator.open)

    def free(self) -> list[Free]:
        """One worker."""
        return [Free(KEY, self.places - self._coordinator.open_count, None)]

    async def save(self, session: str, to: str, *, last: bool) -> Saved:
        """Say what the engine has journaled, when that was asked."""
        self.saves.append((session, last, to))
        self.saving_now += 1
        self.saving_max = max(self.saving_max, self.saving_now)
        try:
            if last:
                await self.may_end.wait()
            await asyncio.sleep(0.01)
        finally:
            self.saving_now -= 1
        if self.refusal is not None:
            raise self.refusal
        if session not in self._coordinator.open:
            raise Refused("no_session", f"no session {session} is in flight")
        return Saved(self._journal(session), 100, 1, 0, self.seconds)

    def _journal(self, session: str) -> tuple[int, ...]:
        return next((tuple(e.journals[session]) for e in self._coordinator.engines if session in e.journals), ())


class Node:
    """One node. It can be lost, hang, and come back."""

    def __init__(self, name: str, *engines: ScriptedEngine, believer: Believer | None = None) -> None:
        self.name = name
        self.believer = believer or SecretBeliever(SECRET)
        self.coordinator = NodeCoordinator(*engines)
        self.moving = Moving(self.coordinator)
        # Where it keeps snapshots of others.
        self.replicas = f"peer://{name}:1"
        self.settings = ProxySettings()
        self.elsewhere: Elsewhere | None = None
        # What is added to every answer.
        self.headers: dict[str, str] = {}
        self.polls = 0
        self.url = ""
        self._answers = asyncio.Event()
        self._answers.set()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Serve, where it served before if it did."""
        coordinator = cast(Any, self.coordinator)
        told = {"name": self.name, "url": "http://127.0.0.1", "slots": SLOTS}
        more = fleet_routes(
            self.believer,
            coordinator,
            lambda: node_record(coordinator, coordinator, coordinator, replicas=self.replicas, **told),
        )
        moving = cast(Any, self.moving)
        more += move_routes(proving(self.believer), moving, self.moving.rooms, moving)
        app = build_app(self.coordinator, self.settings, routes=more, elsewhere=self.elsewhere, believer=self.believer)
        app.middlewares.append(self._middleware)

        async def add(_: web.Request, response: web.StreamResponse) -> None:
            response.headers.update(self.headers)

        app.on_response_prepare.append(add)
        self._runner = make_runner(app, shutdown_timeout_s=0.1)
        await self._runner.setup()
        port = int(self.url.rsplit(":", 1)[1]) if self.url else 0
        await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    @property
    def _middleware(self) -> Any:
        @web.middleware
        async def wait(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
            self.polls += request.path.endswith("/node")
            await self._answers.wait()
            return cast(web.StreamResponse, await handler(request))

        return wait

    def hang(self) -> None:
        """Answer nothing any more, and keep all connections."""
        self._answers.clear()

    def wake(self) -> None:
        """Answer again."""
        self._answers.set()

    async def lose(self) -> None:
        """End as a machine that is killed: all connections break."""
        assert self._runner is not None
        assert self._runner.server is not None
        for site in list(self._runner.sites):
            await site.stop()
        for handler in list(self._runner.server.connections):
            if handler.transport is not None:
                handler.transport.abort()
        self._answers.set()
        await self._runner.cleanup()
        self._runner = None

    async def stop(self) -> None:
        """End."""
        if self._runner is not None:
            await self.lose()


class Storeys:
    """A gateway before nodes, and its client."""

    def __init__(self, nodes: list[Node], client: Client, coordinator: GatewayCoordinator, metrics: Metrics) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.client = client
        self.coordinator = coordinator
        self.metrics = metrics

    async def get(self, path: str) -> tuple[int, Any]:
        """What the gateway tells."""
        async with self.client.session.get(self.client.url + path) as answer:
            return answer.status, await answer.json()

    async def until(self, condition: Callable[[], bool], limit_s: float = 20.0) -> None:
        """Wait until something holds."""
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def state(self, name: str) -> str:
        """How a node is, as the gateway has it."""
        node = self.coordinator.nodes.get(name)
        return node.state if node is not None else "gone"

    @property
    def serving(self) -> list[str]:
        """Where the gateway has sessions, one name a session."""
        return [node.id for node in self.coordinator.nodes.all() for _ in range(node.open)]

    def last(self) -> dict[str, Any]:
        """The newest session, as the gateway tells of it."""
        return self.coordinator.sessions()[-1]


@asynccontextmanager
async def storeys(
    *nodes: Node,
    settings: ProxySettings | None = None,
    poll_s: float = 0.1,
    lost_after_s: float = 3.0,
    timeout_s: float = 20.0,
    wait: bool = True,
    moves: MoveSettings | None = None,
) -> AsyncIterator[Storeys]:
    """A running gateway before these nodes; `wait` until it has heard of them all."""
    async with AsyncExitStack() as stack:
        for node in nodes:
            for engine in node.coordinator.engines:
                await stack.enter_async_context(engine.serving())
            await node.start()
            stack.push_async_callback(node.stop)
        prover = SecretProver(SECRET)
        verdicts = await stack.enter_async_context(Verdicts(prover))
        orders = await stack.enter_async_context(Orders(prover))
        metrics = Metrics()
        coordinator = GatewayCoordinator(
            metrics, verdicts, orders, takeover_timeout_s=timeout_s, moves=moves or MoveSettings()
        )
        assert coordinator.moves is not None
        stack.push_async_callback(coordinator.moves.close)
        urls = {node.name: node.url for node in nodes}
        watch = NodeWatch(urls, coordinator.nodes, prover, poll_s=poll_s, lost_after_s=lost_after_s)
        following = asyncio.create_task(watch.follow())
        stack.push_async_callback(_cancelled, following)
        app = build_app(coordinator, settings, routes=routes(coordinator, metrics), prover=prover)
        runner = make_runner(app, shutdown_timeout_s=0.5)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        client = Client(session, f"http://127.0.0.1:{runner.addresses[0][1]}")
        made = Storeys(list(nodes), client, coordinator, metrics)
        if wait:
            await made.until(lambda: all(node.record is not None for node in coordinator.nodes.all()))
        yield made


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def reasons(node: Node) -> list[Reason]:
    """Why a node's own sessions were taken up again there."""
    return [call[1] for call in node.coordinator.of("take_over")]
