"""One world: what it is made of, how it lives through its schedule, is healed, and ends.

Owns the wiring and the order of a story's parts. `play` raises what was broken; `counts` says what happened. What must
hold is `invariants.py`'s to say.
"""

import asyncio
import contextlib
import hashlib
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import version
from unittest import mock

from midstream.proxy.settings import ProxySettings
from midstream.proxy.stall import StallPolicy
from midstream.session.ids import SessionId
from midstream.sidecar.fleet.lease_service import Renewals
from midstream.sidecar.metrics import Metrics

from . import invariants
from .befall import befall
from .client import Broken, End, SimClient
from .gateway import SimGateway
from .http import SimRequest, answered
from .loop import WORLD, SimLoop
from .network import Network
from .node import Made, SimNode, key_of
from .place import Shared
from .schedule import WARM_S, Asked, Coordinating, Schedule
from .service import Service
from .stores import SnapshotStore

TRIES_MAX = 200
RETRY_S = 1.0
_RENEWALS = {Coordinating.ETCD: Renewals.UNSEEN, Coordinating.KUBERNETES: Renewals.SEEN}
# Metrics are counters that nobody reads here: one set serves all worlds.
_METRICS = Metrics()


class World:
    """One schedule's. Made within its loop."""

    def __init__(self, schedule: Schedule, loop: SimLoop) -> None:
        shape = schedule.shape
        self.schedule = schedule
        self.loop = loop
        self.began_s = loop.now_s
        # All who join at once are told of each other.
        loop.at_once_max += 20 * shape.nodes**2
        self.is_healed = False
        self.counts: Counter[str] = Counter()
        self.defects: list[BaseException] = []
        # Told of each look, for figures.
        self.on_tick: Callable[[], None] = lambda: None
        self.chance = self._stream("world")
        self.network = Network(loop, self._stream("network"), shape.last_lost)
        renewals = _RENEWALS.get(shape.coordinating)
        service = None if renewals is None else Service(self.network, self._stream("service"), renewals)
        self.shared = Shared(
            loop=loop,
            network=self.network,
            service=service,
            chance=self._stream("shared"),
            proxy=ProxySettings(stall=StallPolicy(floor_s=2.0, factor=20.0, ceiling_s=10.0), assign_seed=False),
            metrics=_METRICS,
            questions={asked.question.prompt: asked.question for asked in schedule.asked},
            on_defect=self.defects.append,
            lease_s=shape.lease_s,
            takeover_timeout_s=shape.takeover_timeout_s,
            bytes_per_s=shape.bytes_per_s,
            keeps_others=shape.keeps_others,
            look_s=shape.look_s,
        )
        self.stores = [SnapshotStore(f"store{n}", f"store{n}", 100_000) for n in range(shape.stores)]
        self.nodes = [self._node(number) for number in range(shape.nodes)]
        self.shared.peers = {node.peer: node.memory for node in self.nodes}
        urls = {node.name: node.url for node in self.nodes}
        self.gateways = [
            SimGateway(self.shared, f"g{n}", urls, poll_s=0.5, lost_s=2.0, recomputes=shape.moves_recompute)
            for n in range(shape.gateways)
        ]
        self.clients = [self._client(asked) for asked in schedule.asked]
        loop.set_exception_handler(self._on_exception)

    def _stream(self, name: str) -> random.Random:
        return random.Random(f"{self.schedule.seed}/{name}")

    def _node(self, number: int) -> SimNode:
        shape, chance = self.schedule.shape, self._stream(f"node {number}")
        odd = chance.random() < shape.odd_keys
        made = Made(
            workers=shape.workers,
            step_s=shape.step_s * chance.uniform(0.7, 1.4),
            chunk=shape.chunk,
            slots=shape.slots,
            key=key_of("odd" if odd else "usual"),
            has_disk=shape.has_disks,
            fault_rate=shape.fault_rate,
            clock_rate=chance.uniform(0.98, 1.02),
            clock_offset_s=chance.uniform(-1e5, 1e5),
            chance=chance,
        )
        return SimNode(self.shared, f"n{number}", made, self.stores)

    @staticmethod
    def _client(asked: Asked) -> SimClient:
        return SimClient(asked.question, asked.at_s, asked.leaves_at, asked.reads_s)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        self.defects.append(error if isinstance(error, BaseException) else AssertionError(str(context)))

    # ---- its story

    def now_s(self) -> float:
        """Since it began."""
        return self.loop.now_s - self.began_s

    async def play(self) -> None:
        """Live through all of it."""
        for node in self.nodes:
            node.start()
        for gateway in self.gateways:
            gateway.start()
        for client in self.clients:
            self._at(client.asks_s, lambda client=client: self._ask(client))
        for failure in self.schedule.failures:
            self._at(failure.at_s, lambda failure=failure: None if self.is_healed else befall(self, failure))
        ends_s = WARM_S + self.schedule.shape.horizon_s
        while self.now_s() < ends_s:
            await self._tick()
        self._heal()
        deadline_s = self.now_s() + invariants.SETTLES_WITHIN_S
        while not all(client.is_over for client in self.clients):
            if self.now_s() > deadline_s:
                late = next(client for client in self.clients if not client.is_over)
                raise late.broken("stuck", f"nothing became of it within {invariants.SETTLES_WITHIN_S:g} s of peace")
            await self._tick()
        await asyncio.sleep(invariants.ENDS_WITHIN_S)
        self._raise_defects()
        invariants.at_the_end(self)
        await self._end()

    def _at(self, at_s: float, act: object) -> None:
        self.loop.call_at(self.began_s + at_s, act, context=WORLD)  # type: ignore[arg-type]

    async def _tick(self) -> None:
        await asyncio.sleep(self.schedule.shape.tick_s)
        self._raise_defects()
        invariants.at_any_time(self)
        self.on_tick()

    def _raise_defects(self) -> None:
        if self.defects:
            raise self.defects[0]

    def _heal(self) -> None:
        """From here on nothing befalls anybody, and all that was down is started."""
        self.is_healed = True
        self.network.heal_all()
        service = self.shared.service
        if service is not None:
            service.is_up, service.slow_s, service.late_s, service.loss = True, 0.0, 0.0, 0.0
        for node in self.nodes:
            node.made.wall_offset_s = 0.0
            node.made.fault_rate = 0.0
            node.wake()
            node.drain(drains=False)
            node.heal_workers()
            node.start()
        for gateway in self.gateways:
            gateway.wake()
            gateway.start()

    async def _end(self) -> None:
        for gateway in self.gateways:
            gateway.kill()
        for node in self.nodes:
            node.kill()
        await asyncio.sleep(invariants.ENDS_WITHIN_S)
        self._raise_defects()
        invariants.nothing_is_left(self)

    # ---- clients

    def _ask(self, client: SimClient) -> None:
        """A client sends its request to some gateway that it can reach."""
        first = client.question.number + client.tries
        client.tries += 1
        several = [self.gateways[(first + n) % len(self.gateways)] for n in range(len(self.gateways))]
        gateway = next((one for one in several if one.is_up), None)
        if gateway is None:
            self.loop.call_later(RETRY_S, lambda: self._ask(client), context=WORLD)
            return
        assert gateway.process is not None
        client.gateway = gateway.process
        request = SimRequest(client.ask(), client)
        client.task = gateway.process.start(self._served(gateway, client, request))

    async def _served(self, gateway: SimGateway, client: SimClient, request: SimRequest) -> None:
        try:
            await answered(gateway.handle, request)
        except ConnectionError:
            pass
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if client.gateway is not None and client.gateway.is_alive:
                self.defects.append(error)
            return
        finally:
            if client.gateway is not None and client.gateway.is_alive:
                self._over(client)

    def _over(self, client: SimClient) -> None:
        """Its connection is at an end."""
        try:
            client.ended()
        except Broken as error:
            self.defects.append(error)
            return
        if client.end is End.REFUSED and client.status == 503 and client.tries < TRIES_MAX:
            self.counts["asked again"] += 1
            client.again()
            self.loop.call_later(RETRY_S, lambda: self._ask(client), context=WORLD)
            return
        client.is_over = True
        self.counts[f"client {client.end}"] += 1
        if client.code:
            self.counts[f"given up: {client.code}"] += 1
        if client.report is not None:
            self.counts[f"outcome {client.report.outcome}"] += 1
            self.counts["takeovers"] += client.report.takeovers
        try:
            invariants.of_a_client(client)
        except Broken as error:
            self.defects.append(error)

    def kill_gateway(self, gateway: SimGateway) -> None:
        """Its clients see their connections break."""
        process = gateway.process
        gateway.kill()
        for client in self.clients:
            if client.gateway is process and not client.is_over and client.end is End.OPEN and client.task is not None:
                self._over(client)

    def digest(self) -> str:
        """What all clients got, in few characters: two plays of one schedule are one story."""
        told = [
            (c.question.number, c.end, c.tokens, c.differs_at, str(c.report), c.tries, round(c.ended_s, 6))
            for c in self.clients
        ]
        return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()


def play(schedule: Schedule, made_one: Callable[[World], None] = lambda world: None) -> World:
    """One schedule from its beginning to its end. What it raises bears the schedule as a note."""
    with _virtual(schedule.seed) as loop, asyncio.Runner(loop_factory=lambda: loop) as runner:
        made: list[World] = []

        async def whole() -> None:
            made.append(World(schedule, loop))
            made_one(made[0])
            await made[0].play()

        try:
            runner.run(whole())
        except BaseException as error:
            at_s = f"{made[0].now_s():.3f} s" if made else "its making"
            error.add_note("\n".join([f"at {at_s} of", *schedule.lines()]))
            raise
        finally:
            if made:
                for process in made[0].shared.processes:
                    process.wake()
    return made[0]


@contextlib.contextmanager
def _virtual(seed: int) -> Iterator[SimLoop]:
    """A loop whose time is everybody's, and chance that comes from the seed alone."""
    loop = SimLoop()
    ids = random.Random(f"{seed}/ids")
    kept = random.getstate()
    random.seed(f"{seed}/global")

    def wall_s() -> float:
        return 1.7e9 + loop.now_s

    def drawn() -> uuid.UUID:
        return uuid.UUID(int=ids.getrandbits(128))

    def drawn_session() -> SessionId:
        return SessionId(drawn().hex)

    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(time, "time", wall_s),
        mock.patch.object(uuid, "uuid4", drawn),
        mock.patch("midstream.proxy.sessions.new_session_id", drawn_session),
        mock.patch("midstream.sidecar.fleet_api.version", _version),
    ):
        try:
            yield loop
        finally:
            random.setstate(kept)


@lru_cache
def _version(name: str) -> str:
    return version(name)
