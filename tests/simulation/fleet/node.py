"""One simulated node: a real coordinator, real sessions and a real member of the fleet, over simulated engines.

Owns what one host has: its processes (sidecar and engines), its disk, and their starts after deaths. Nothing of the
sidecar's own rules is here. `life` counts the starts of the sidecar; engines end with it, as `midstream run` ends them.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midstream.proxy import headers, problems
from midstream.proxy.coordinator import Reason
from midstream.proxy.fleet import Unproven, has_marker, marker_in
from midstream.proxy.policy import policy_of
from midstream.proxy.request import parse_body, without_transfer_fields
from midstream.proxy.sessions import Sessions
from midstream.session.key import REQUIRED
from midstream.sidecar.choice import Tier
from midstream.sidecar.coordinator import CoordinatorSettings, SidecarCoordinator
from midstream.sidecar.drain.here import Here
from midstream.sidecar.drain.room import Rooms
from midstream.sidecar.drain.saving import Saving
from midstream.sidecar.fleet.coordination import Membership
from midstream.sidecar.fleet.proof import SecretBeliever
from midstream.sidecar.fleet.record import Record
from midstream.sidecar.fleet_api import fleet_routes, node_record, proving
from midstream.sidecar.fleet_member import stay
from midstream.sidecar.fleet_moves import move_routes
from midstream.sidecar.fleet_standing import Standing
from midstream.sidecar.supervise import WorkerState
from midstream.sidecar.workers import Epoch, Worker, Workers

from .engine import SimArena, SimEngine
from .http import Server, SimRequest, SimUpstream
from .loop import WORLD, Process
from .mover import SimMover
from .place import Shared, coordination_of
from .routes import Router
from .stores import SnapshotStore

RESTART_S = (0.3, 1.5)
RESTARTS_MAX = 50


@dataclass(slots=True)
class Made:
    """How a node is made: drawn once, whatever happens to it later."""

    workers: int
    step_s: float
    chunk: int
    slots: int
    key: dict[str, str]
    has_disk: bool
    fault_rate: float
    clock_rate: float
    clock_offset_s: float
    wall_offset_s: float = 0.0
    chance: random.Random = field(default_factory=random.Random)


@dataclass(slots=True)
class _Machine:
    """One worker."""

    worker: Worker
    engine: SimEngine | None = None
    process: Process | None = None
    starts: int = 0


class SimNode:
    """One host."""

    def __init__(self, shared: Shared, name: str, made: Made, elsewhere: Sequence[SnapshotStore]) -> None:
        self.name = name
        self.host = name
        self.made = made
        self.life = 0
        self.is_up = False
        self.process: Process | None = None
        self.coordinator: SidecarCoordinator | None = None
        self.sessions: Sessions | None = None
        self.standing: Standing | None = None
        self.disk = SnapshotStore(f"{name}-disk", name, 4096) if made.has_disk else None
        self.memory = SnapshotStore(f"{name}-memory", name, 4096)
        self._shared = shared
        self._elsewhere = elsewhere
        self._machines: list[_Machine] = []
        self._arenas: dict[Path, tuple[SimArena, _Machine, int]] = {}
        self._deaths: dict[Process, asyncio.Event] = {}

    @property
    def url(self) -> str:
        return f"http://{self.host}:8800"

    @property
    def peer(self) -> str:
        """Where it keeps snapshots of other nodes in its memory."""
        return f"peer://{self.host}:8900"

    @property
    def keeps_others(self) -> bool:
        """Whether snapshots can be brought here, and from here elsewhere."""
        return self._shared.keeps_others and self.disk is not None

    # ---- lives

    def start(self) -> None:
        """A sidecar begins, and starts its engines."""
        if self.is_up:
            return
        shared, made = self._shared, self.made
        self.life += 1
        self.is_up = True
        self._arenas.clear()
        shared.network.powered_on(self.host)
        self.process = process = shared.process(f"{self.name}.{self.life}")
        self.workers = workers = Workers(let_go=self._let_go_of)
        self.mover = SimMover(
            shared.network, self.host, made.chance, made.fault_rate, self.disk, self._elsewhere,
            self._place_of, lambda path: made.key, bytes_per_s=shared.bytes_per_s,
            look_s=shared.look_s,
            own=self.memory, peers=shared.peers,
        )  # fmt: skip
        tiers = frozenset(Tier) - {Tier.IN_PLACE, Tier.MEMORY}
        self.coordinator = SidecarCoordinator(
            workers, self.mover, shared.metrics,
            CoordinatorSettings(shared.takeover_timeout_s, load_timeout_s=1.0, tiers=tiers),
            stores=self.disk is not None, replicas=self.mover if self._elsewhere or self.keeps_others else None,
        )  # fmt: skip
        upstream = SimUpstream(shared.proxy, shared.network, process, self.host)
        coordination = coordination_of(shared, process, self.host, made.clock_rate, made.clock_offset_s)
        self.standing = None if coordination is None else Standing(coordination, shared.takeover_timeout_s)
        self.sessions = Sessions(self.coordinator, upstream, shared.proxy, self.standing)
        self._believer = SecretBeliever(shared.secret, lambda: shared.wall_s() + made.wall_offset_s)
        here = Here(workers, self.coordinator, lambda pool: None, made.slots)
        saving = Saving(self.coordinator, self.mover.bring_to if self.keeps_others else None)
        self._router = Router(
            [
                *fleet_routes(self._believer, self.coordinator, self.record),
                *move_routes(proving(self._believer), here, Rooms(), saving),
            ]
        )
        self._machines = [
            _Machine(workers.add(f"w{number}", f"http://{self.host}:9{number}00")) for number in range(made.workers)
        ]
        for machine in self._machines:
            process.start(self._live(machine), name=f"{self.name}/{machine.worker.name}")
        process.start(self._observe())
        process.start(self.mover.bring())
        Server(shared.network, process, self.host, f"{self.host}:8800", self._handle, shared.on_defect)
        if self.standing is not None:
            process.start(stay(self.standing, self.record, shared.lease_s), name=f"{self.name}-member")

    def kill(self, *, silently: bool = False) -> None:
        """Sidecar and engines die at once: SIGKILL, or the host's power."""
        if not self.is_up:
            return
        self.is_up = False
        for machine in self._machines:
            if machine.process is not None:
                machine.process.kill()
                self._shared.network.died(machine.process, self.host, silently=silently)
        assert self.process is not None
        self.process.kill()
        self._shared.network.died(self.process, self.host, silently=silently)
        self.memory.clear()

    def pause(self, *, engines: bool) -> None:
        """SIGSTOP of the sidecar, or of the whole machine."""
        if self.process is not None and self.is_up:
            self.process.stop()
            for machine in self._machines:
                if engines and machine.process is not None:
                    machine.process.stop()

    def wake(self) -> None:
        """SIGCONT."""
        for process in (self.process, *(machine.process for machine in self._machines)):
            if process is not None and process.is_stopped:
                process.wake()

    def kill_worker(self, number: int) -> bool:
        """One engine dies."""
        machine = self._machines[number % len(self._machines)]
        if not self.is_up or machine.process is None or not machine.process.is_alive:
            return False
        machine.process.kill()
        self._shared.network.died(machine.process, self.host, silently=False)
        self._shared.network.loop.call_later(
            self.made.chance.choice((0.0, 0.02, 0.3)), self._died, machine, machine.process, context=WORLD
        )
        return True

    def hang_worker(self, number: int, *, hangs: bool) -> None:
        """One engine does nothing for a while."""
        machine = self._machines[number % len(self._machines)]
        if machine.engine is not None:
            machine.engine.is_hung = hangs

    def heal_workers(self) -> None:
        """No engine hangs any more."""
        for engine in self.engines():
            engine.is_hung = False

    def engines(self) -> list[SimEngine]:
        """Those that live."""
        engines = (machine.engine for machine in self._machines)
        return [engine for engine in engines if engine is not None and engine.is_alive]

    def drain(self, *, drains: bool) -> None:
        """No new sessions, and those that it has may leave; or a drain that is cancelled."""
        if self.coordinator is not None:
            self.coordinator.draining = drains

    # ---- workers

    async def _live(self, machine: _Machine) -> None:
        """One worker from start to start."""
        worker, shared, chance = machine.worker, self._shared, self.made.chance
        for _ in range(RESTARTS_MAX):
            machine.starts += 1
            number = machine.starts
            path = Path(f"/nowhere/{self.name}.{self.life}/{worker.name}-{number}.arena")
            epoch = self.workers.begin_epoch(worker, number, path)
            facts = {
                "engine": "transformers", "key": self.made.key, "pools": [f"{worker.name}/{number}/0"],
                "adopted": False, "max_sessions": self.made.slots,
            }  # fmt: skip
            arena = SimArena(facts)
            epoch.arena = arena  # type: ignore[assignment]
            self._arenas[path] = (arena, machine, number)
            machine.process = process = shared.process(f"{self.name}.{self.life}/{worker.name}-{number}")
            gone = asyncio.Event()
            self._became(worker, WorkerState.STARTING)
            if number > 1:
                await asyncio.sleep(chance.uniform(*RESTART_S))
            if process.is_alive:
                machine.engine = SimEngine(
                    shared.network, process, self.host, worker.url.removeprefix("http://"), shared.questions, arena,
                    chance, shared.on_defect, step_s=self.made.step_s, chunk=self.made.chunk, runs_max=self.made.slots,
                )  # fmt: skip
                arena.is_published = True
                self._became(worker, WorkerState.READY)
                await self._deaths.setdefault(process, gone).wait()
            self._deaths.pop(process, None)
            self._became(worker, WorkerState.DEAD)
            assert self.coordinator is not None
            self.coordinator.epoch_lost(epoch, Reason.PROCESS_DEATH)
            self._became(worker, WorkerState.RESTARTING)
        self._became(worker, WorkerState.FAILED)

    def _died(self, machine: _Machine, process: Process) -> None:
        event = self._deaths.get(process)
        if event is not None:
            event.set()

    def _became(self, worker: Worker, state: WorkerState) -> None:
        assert self.coordinator is not None
        self.workers.became(worker, state)
        self.coordinator.workers_changed()

    def _let_go_of(self, epoch: Epoch) -> None:
        if epoch.arena_path is not None:
            self._arenas.pop(epoch.arena_path, None)

    def _place_of(self, path: Path) -> tuple[SimArena, SimEngine | None, bool] | None:
        found = self._arenas.get(path)
        if found is None:
            return None
        arena, machine, _ = found
        engine = machine.engine
        is_there = engine is not None and engine.arena is arena and engine.is_alive
        return arena, engine if is_there else None, True

    async def _observe(self) -> None:
        """The mover looks at all arenas again and again."""
        while True:
            await asyncio.sleep(self._shared.look_s)
            for path, (arena, _, _) in list(self._arenas.items()):
                if arena.runs:
                    self.mover.observe(path)

    # ---- the fleet

    def record(self) -> Record:
        """What the node says of itself."""
        assert self.coordinator is not None
        return node_record(
            self.workers,
            self.coordinator,
            self._shared.models,
            name=self.name,
            url=self.url,
            slots=self.made.slots,
            replicas=self.peer if self.keeps_others else "",
        )

    @staticmethod
    def _fenced(standing: Standing, begun: Membership) -> Callable[[], bool]:
        """Whether a token may be written by a stream that begins now: under this lease, or under a later one.

        Whose session it is by then is for its gateway to say, which reads one node at a time.
        """

        def may_write() -> bool:
            return begun.may_send() or (standing.membership or begun).may_send()

        return may_write

    async def _handle(self, request: SimRequest) -> Any:
        """As the daemon's application routes it."""
        assert self.sessions is not None
        routed = self._router.route(request)
        if routed is not None:
            return await routed
        try:
            claimed = self._believer.check(request.method, request.raw_path, request.headers.get(headers.FLEET, ""))
            claimed.require(request.body)
        except Unproven:
            return problems.not_of_the_fleet().response(request.headers, request.path)
        asked = parse_body(request.body)
        assert has_marker(asked), "a gateway makes a session of every request here"
        demanded = policy_of(request.headers, self._shared.proxy.policy)
        marker = marker_in(asked)
        body = without_transfer_fields(asked)
        if self.standing is not None and self.standing.membership is not None:
            request.sink.may_write = self._fenced(self.standing, self.standing.membership)
        return await self.sessions.take_in(request, body, demanded, marker)  # type: ignore[arg-type]


def key_of(layout: str) -> dict[str, str]:
    """A compatibility key; engines of another `layout` cannot use the KV."""
    return {name: name for name in REQUIRED} | {"kv_layout": layout}
